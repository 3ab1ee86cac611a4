"""What is built is what is in the tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"shadowsup": "shadowsup", "supervisor": "shadowsup/supervisor", "memkeeper": "shadowsup/memkeeper"} | {
    "workers": "shadowsup/workers",
    "tui": "shadowsup/tui",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    # --no-isolation would need setuptools in the environment; a copy keeps build/ and *.egg-info out of the tree.
    source = out / "source"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        origin = ROOT / name
        if origin.is_file() and not name.startswith((".typing/", "tests/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(origin.read_bytes())
    subprocess.run([sys.executable, "-m", "build", "--wheel", "-o", str(out), str(source)], check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.mark.timeout(300)
def test_every_module_of_the_tree_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    expected = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert expected - packed == set(), "a subpackage is missing from [tool.setuptools] packages"
    assert packed - expected == set()


def test_the_wheel_is_typed_licensed_and_has_its_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "shadowsup/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "shadowsup = shadowsup.supervisor.cli:main" in wheel.read(entry_points).decode()
