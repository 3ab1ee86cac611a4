"""``config edit``: whatever happens, the file is the old one or the new one, and what was typed is somewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeSupervisor

from shadowsup.supervisor.config import load

Cli = Callable[..., Any]
TEXT = "version: 1\n# mine\nworkers:\n  - {name: chat, engine: transformers, model: x}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "node.yaml"
    file.write_text(TEXT)
    file.chmod(0o640)
    return file


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make these lines of Python the editor; ``path``: the file that it edits, ``text``: what is in it."""

    def use(code: str) -> None:
        script = tmp_path / "editor.py"
        script.write_text(f"import pathlib, sys\npath = pathlib.Path(sys.argv[1])\ntext = path.read_text()\n{code}\n")
        monkeypatch.setenv("VISUAL", f"{sys.executable} {script}")

    return use


def drafts(path: Path) -> list[Path]:
    return sorted(file for file in path.parent.iterdir() if file.name.startswith(".node."))


def test_a_change_is_saved_in_one_step_and_the_old_file_kept(path: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor("path.write_text(text.replace('chat', 'talk'))")
    before = path.stat().st_ino
    result = cli("config", "edit", path)
    assert (result.code, result.out) == (0, f"{path}: saved; the old one is node.yaml~\n")
    assert load(path).config.workers[0].name == "talk"
    assert path.with_name("node.yaml~").read_text() == TEXT
    assert (path.stat().st_mode & 0o777, path.stat().st_ino != before, drafts(path)) == (0o640, True, [])


def test_an_editor_that_replaces_the_file_is_understood(path: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor("new = path.with_name('new'); new.write_text(text.replace('chat', 'talk')); new.replace(path)")
    assert cli("config", "edit", path).code == 0
    assert load(path).config.workers[0].name == "talk"
    assert path.stat().st_mode & 0o777 == 0o640


def test_no_change_changes_nothing(path: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor("")
    assert cli("config", "edit", path).out == f"{path}: not changed\n"
    assert not path.with_name("node.yaml~").exists()
    assert drafts(path) == []


def test_what_is_wrong_is_not_saved_and_not_lost(path: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor("path.write_text(text.replace('model', 'modell'))")
    result = cli("config", "edit", path)
    assert (result.code, path.read_text()) == (2, TEXT)
    assert re.search(r"node.yaml:4:\d+: unknown key 'modell'", result.err)
    (draft,) = drafts(path)
    assert f"what you wrote is in {draft}" in result.err
    assert "modell" in draft.read_text()


def test_on_a_terminal_the_errors_stand_on_top_when_it_is_edited_again(path: Path, tmp_path: Path, editor: Callable[[str], None]) -> None:
    seen = tmp_path / "seen"
    editor(
        f"seen = pathlib.Path({str(seen)!r})\n"
        "seen.write_text(text)\n"
        "path.write_text(text.replace('modell:', 'model:') if 'modell' in text else text.replace('model:', 'modell:'))"
    )
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "shadowsup.supervisor.cli", "config", "edit", str(path)],
        stdin=secondary,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        os.close(secondary)
        os.write(primary, b"y\n")
        out, err = process.communicate(timeout=30)
        os.close(primary)
    assert process.returncode == 0, err
    assert "Edit again?" in err
    lines = seen.read_text().splitlines()
    noted = [line for line in lines if line.startswith("#! ")]
    at = next(number for number, line in enumerate(lines, 1) if "modell:" in line and not line.startswith("#!"))
    assert any(re.match(rf"#! line {at}, column \d+: unknown key 'modell'", line) for line in noted)
    # Corrected, the text is as it was: nothing is left of the notes.
    assert path.read_text() == TEXT
    assert drafts(path) == []
    assert "not changed" in out


def test_a_file_that_changed_underneath_is_left_alone(path: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor(f"path.write_text(text.replace('chat', 'talk')); pathlib.Path({str(path)!r}).write_text('theirs')")
    result = cli("config", "edit", path)
    assert (result.code, path.read_text()) == (1, "theirs")
    assert "changed by somebody else" in result.err
    (draft,) = drafts(path)
    assert "talk" in draft.read_text()


@pytest.mark.parametrize("wrote", [True, False])
def test_an_editor_that_fails_changes_nothing(path: Path, cli: Cli, editor: Callable[[str], None], wrote: bool) -> None:
    editor(f"path.write_text('half') if {wrote} else None; sys.exit(3)")
    result = cli("config", "edit", path)
    assert (result.code, path.read_text(), len(drafts(path))) == (1, TEXT, int(wrote))
    assert "ended with status 3" in result.err


def test_an_editor_that_is_not_there_is_told(path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    result = cli("config", "edit", path)
    assert (result.code, drafts(path)) == (1, [])
    assert "cannot run the editor /no/such/editor" in result.err
    monkeypatch.setenv("VISUAL", "'")
    assert "is no command" in cli("config", "edit", path).err
    monkeypatch.delenv("VISUAL")
    monkeypatch.setenv("EDITOR", "true")
    assert cli("config", "edit", path).code == 0


def test_a_link_stays_a_link(path: Path, cli: Cli, editor: Callable[[str], None], tmp_path: Path) -> None:
    editor("path.write_text(text.replace('chat', 'talk'))")
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert cli("config", "edit", link).code == 0
    assert link.is_symlink()
    assert load(path).config.workers[0].name == "talk"


def test_a_running_node_is_said_to_take_it_at_its_next_start(path: Path, folder: Path, cli: Cli, editor: Callable[[str], None]) -> None:
    editor(f"path.write_text(text.replace('workers:', 'node: {{runtime_dir: {folder}}}\\nworkers:'))")
    (folder / "node.json").write_text(json.dumps({"config": str(path)}))
    with FakeSupervisor(folder, {}):
        result = cli("--runtime-dir", folder, "config", "edit")  # the file is the running node's
    assert result.code == 0, result.err
    assert "shadowsup reload" in result.err and "applies the change" in result.err


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path, cli: Cli) -> None:
    assert cli("config", "edit", tmp_path / "nope.yaml").code == 2
