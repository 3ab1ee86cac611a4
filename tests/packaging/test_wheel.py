"""What is built is what is in the tree."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = {"shadowsup": "shadowsup", "supervisor": "shadowsup/supervisor", "memkeeper": "shadowsup/memkeeper"} | {
    "workers": "shadowsup/workers",
    "tui": "shadowsup/tui",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    # A copy keeps build/ and *.egg-info out of the tree.
    source = out / "source"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        origin = ROOT / name
        if origin.is_file() and not name.startswith((".typing/", "tests/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(origin.read_bytes())
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    build = [sys.executable, "-m", "build", "--no-isolation", "-o", str(out), str(source)]
    subprocess.run(build, check=True, capture_output=True, env=environ)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dist.glob("*.whl")))


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


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    found = email.message_from_bytes(wheel.read(name))
    assert (found["Name"], found["License-Expression"], found["Requires-Python"]) == ("shadowsup", "Apache-2.0", ">=3.11")
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    needed = [Requirement(text) for text in found.get_all("Requires-Dist", [])]
    lasting = {requirement.name for requirement in needed if requirement.marker is None or "extra" not in str(requirement.marker)}
    assert not lasting & {"torch", "transformers", "vllm", "accelerate", "huggingface-hub"}


def test_every_example_is_in_the_wheel_and_the_completions_where_shells_look(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    examples = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {f"shadowsup/{example}" for example in examples} <= names
    shared = {name.partition(".data/data/share/")[2] for name in names}
    assert {
        "bash-completion/completions/shadowsup",
        "zsh/site-functions/_shadowsup",
        "fish/vendor_completions.d/shadowsup.fish",
    } <= shared


def test_the_source_distribution_has_the_documents(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "docs/design.md", "configs/reference.yaml", "pyproject.toml"} <= names


# --- as a new user has it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed ``shadowsup`` in a virtual environment that has the wheel and what it declares, nothing else: no torch.

    Nothing is downloaded: the distributions that it needs are linked from this environment.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    for distribution in closure(dist):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            origin = Path(str(distribution.locate_file(top)))
            if origin.exists() and not (packages / top).exists():
                (packages / top).symlink_to(origin)
    install = [
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    subprocess.run([sys.executable, *install, str(next(dist.glob("*.whl")))], check=True, capture_output=True, env=environ)
    home = tmp_path_factory.mktemp("home")
    environ |= {"HOME": str(home), "PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([str(folder / "bin/shadowsup"), *words], cwd=home, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done

    return run


def closure(dist: Path) -> list[metadata.Distribution]:
    """Return the distributions that the wheel needs, by what it and they declare."""
    wheel = zipfile.ZipFile(next(dist.glob("*.whl")))
    described = email.message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))))
    found: dict[str, metadata.Distribution] = {}
    waiting = [(Requirement(text), frozenset({""})) for text in described.get_all("Requires-Dist", [])]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = requirement.name.lower()
        if name not in found:
            found[name] = metadata.distribution(name)
            wanted = frozenset({"", *requirement.extras})
            waiting += [(Requirement(text), wanted) for text in found[name].requires or ()]
    return list(found.values())


def test_it_runs_without_torch(installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    assert installed("version").stdout.startswith("shadowsup ")
    checks = json.loads(installed("doctor", "-o", "json").stdout)["checks"]
    assert [c["level"] for c in checks if c["evidence"].startswith("engine: transformers")] == ["warning"]
    listed = installed("config", "example").stdout.split()
    assert {"node.yaml", "prometheus/alerts.yaml", "completions/shadowsup.fish"} <= set(listed)
    for name in ("node.yaml", "command.yaml", "reference.yaml"):
        path = tmp_path / name
        path.write_text(installed("config", "example", name).stdout)
        assert "ok (node" in installed("validate", str(path)).stdout
    assert "no example" in installed("config", "example", "nothing.yaml", code=2).stderr


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_it_runs_a_node(installed: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    config = tmp_path / "command.yaml"
    text = installed("config", "example", "command.yaml").stdout
    config.write_text(text.replace("127.0.0.1:8000", "127.0.0.1:0").replace("cwd: /tmp", f"cwd: {tmp_path}"))
    where = ("--runtime-dir", str(tmp_path / "run"))
    installed(*where, "start", str(config), "-d", "--wait")
    try:
        assert "healthy" in installed(*where, "status").stdout
    finally:
        installed(*where, "stop")
