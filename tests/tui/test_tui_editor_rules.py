"""The editor's rules, without a screen: what is written is what was there, byte for byte; completion; checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.document._document import Document

from shadowsup.supervisor.config.schema import json_schema
from shadowsup.tui.config_check import check, environment_of
from shadowsup.tui.config_complete import Completer, place
from shadowsup.tui.config_file import ConfigFile
from shadowsup.tui.config_save import diff, reload_lines
from shadowsup.tui.errors import TuiError

BODY = "version: 1\nworkers:\n  - name: chat\n    engine: transformers\n    model: org/model\n"


def file_of(tmp_path: Path, data: bytes) -> ConfigFile:
    path = tmp_path / "node.yaml"
    path.write_bytes(data)
    return ConfigFile(path)


# --- bytes ----------------------------------------------------------------------------------------------------------------------

_LINES = st.lists(st.tuples(st.text(alphabet="ab: #é\t😀", max_size=6), st.sampled_from(["\n", "\r\n", "\r", "\u2028", "\x0c", "\x85"])))


@settings(max_examples=300, deadline=None)
@given(lines=_LINES, last=st.text(alphabet="ab#", max_size=4), bom=st.booleans())
def test_a_text_that_is_only_looked_at_is_saved_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]], last: str, bom: bool
) -> None:
    text = ("\ufeff" if bom else "") + "".join(line + end for line, end in lines) + last
    file = file_of(tmp_path_factory.getbasetemp(), text.encode())
    assert file.encode(Document(file.text).lines) == text.encode()


@settings(max_examples=200, deadline=None)
@given(lines=_LINES, at=st.integers(0, 30))
def test_a_line_that_is_put_in_leaves_every_other_byte_alone(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]], at: int
) -> None:
    text = "".join(f"{n}{line}{end}" for n, (line, end) in enumerate(lines)) + "end"
    file = file_of(tmp_path_factory.getbasetemp(), text.encode())
    edited = list(Document(file.text).lines)
    at = min(at, len(edited) - 1)
    edited.insert(at, "NEW")
    saved = file.encode(edited).decode()
    before, after = saved.split("NEW")
    rest = after.removeprefix("\r\n") if after.startswith("\r\n") else after[1:]
    assert before + rest == text


def test_the_mode_the_link_and_the_backup_are_as_they_should_be(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_bytes(b"old\n")
    real.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(real)
    file = ConfigFile(link)
    file.save(b"new\n")
    assert link.is_symlink() and real.read_bytes() == b"new\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert file.backup.read_bytes() == b"old\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.yaml", "real.yaml", "real.yaml~"]
    file.save(b"newer\n")
    assert file.backup.read_bytes() == b"new\n"


def test_a_file_that_somebody_else_changed_is_not_written(tmp_path: Path) -> None:
    file = file_of(tmp_path, b"mine\n")
    (tmp_path / "node.yaml").write_bytes(b"theirs\n")
    with pytest.raises(TuiError, match="changed by somebody else"):
        file.save(b"mine, edited\n")
    assert (tmp_path / "node.yaml").read_bytes() == b"theirs\n"
    (tmp_path / "node.yaml").unlink()
    with pytest.raises(TuiError, match="changed by somebody else"):
        file.save(b"mine, edited\n")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, b"old\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TuiError, match="No space left"):
        file.save(b"new\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.yaml"]
    assert (tmp_path / "node.yaml").read_bytes() == b"old\n"


@pytest.mark.parametrize(("data", "words"), [(b"\xff\xfe", "not UTF-8"), (b"a: \x1b[2J", "control characters")])
def test_what_is_no_text_is_not_edited_here(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(TuiError, match=words):
        file_of(tmp_path, data)


def test_the_diff_shows_what_changes_and_a_little_around_it() -> None:
    lines = ["".join(part for part, _ in line) for line in diff("a\nb\nc\nd\ne\nf\n", "a\nb\nc\nD\ne\nf\n")]
    assert lines == ["@@ -2,5 +2,5 @@", " b", " c", "-d", "+D", " e", " f"]


def test_a_reload_that_was_taken_back_says_why_and_what_goes_on() -> None:
    failed = {
        "n": 4,
        "state": "failed",
        "message": "chat.3 ended with status 1\nline a\nline b\nRuntimeError: no",
        "workers": {"chat": "failed"},
    }
    lines = ["".join(part for part, _ in line) for line in reload_lines(failed, "r3", "node.yaml~")]
    assert lines[0] == "reload 4 failed  chat.3 ended with status 1  chat: failed"
    assert lines[1:3] == ["line b", "RuntimeError: no"]
    assert "r3 goes on" in lines[3] and "node.yaml~" in lines[3]
    running = reload_lines({"n": 4, "state": "handing_over", "summary": "replaces chat", "workers": {}}, "r3", "")
    assert running[0][0] == ("reload 4 handing over  ", "warn") and len(running) == 1


# --- checks ---------------------------------------------------------------------------------------------------------------------


def test_problems_have_their_place_and_variables_those_of_the_supervisor(tmp_path: Path) -> None:
    found = check(BODY + "    shadow: 1\n    served_name: ${WHO}\n", tmp_path / "node.yaml", {"PATH": "/bin"})
    assert [(problem.line, problem.column) for problem in found.errors] == [(6, 5), (7, 18)]
    assert "did you mean" in found.errors[0].message
    assert check(BODY + "    served_name: ${WHO}\n", tmp_path / "node.yaml", {"WHO": "me"}).errors == ()
    assert check("a: [", tmp_path / "node.yaml", {}).errors
    assert environment_of(os.getpid())["PATH"] == os.environ["PATH"]
    assert environment_of(None)["PATH"] == os.environ["PATH"]


# --- completion -----------------------------------------------------------------------------------------------------------------

CONFIG = """\
version: 1
node:
  name: demo
gateway:
  |
workers:
  - name: chat     # a comment
    engine: transformers
    kv:
      size: 1GiB
    env:
      A: b
  - name: cmd
    engine: command
"""


def at_bar(text: str) -> tuple[list[str], int, int]:
    before = text[: text.index("|")]
    return text.replace("|", "", 1).split("\n"), before.count("\n"), len(before) - before.rfind("\n") - 1


@pytest.fixture(scope="module")
def completer() -> Completer:
    return Completer(json_schema())


def labels(completer: Completer, text: str) -> list[str]:
    found = place(*at_bar(text))
    return [] if found is None else [candidate.label for candidate in completer.candidates(found)]


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("|", ["version", "workers", "node", "gateway", "memkeeper"], ["name"]),
        (CONFIG, ["listen", "max_inflight"], ["name", "engine"]),
        ("workers:\n  - |", ["name", "engine", "shadows"], ["listen"]),
        ("workers:\n- |", ["name", "engine"], ["listen"]),
        ("workers:\n  - name: a\n    |", ["engine", "kv"], ["name"]),
        ("workers:\n- name: a\n  |", ["engine"], ["name"]),
        ("workers:\n  - name: a\n\n  # comment\n\n    sh|", ["shadows"], ["engine"]),
        ("workers:\n  - name: a\n    kv:\n      |", ["size", "block_tokens", "reserve"], ["engine"]),
        ("workers:\n  - name: a\n    kv:\n      size: 1GiB\n    |", ["health"], ["kv", "size"]),
        ("workers:\n  - name: a\n    health:\n      hang:\n        fl|", ["floor"], ["ceiling"]),
        ("workers:\n  - engine: |", ["transformers", "vllm", "loop", "command"], []),
        ("workers:\n  - engine: tr|", ["transformers"], ["vllm"]),
        ("workers:\n  - engine: transformers\n    dtype: |\n    name: a", ["auto", "float32", "bfloat16"], []),
        ("workers:\n  - engine: transformers\n    |", ["model"], ["command", "ready", "port"]),
        ("workers:\n  - engine: command\n    |", ["command", "ready"], ["kv"]),
        ("workers:\n  - name: a\n    kv: {size: 1GiB, |", ["block_tokens", "reserve"], ["size"]),
        ("workers:\n  - name: a\n    kv: {reserve: |", ["auto"], ["size"]),
        ("memkeeper: {backend: c|", ["cuda"], ["host"]),
        ("workers:\n  - {name: a, engine: |", ["vllm"], []),
        ("workers:\n  - name: a\n    ready: {notify: |", ["true"], []),
        ("node:\n  name: x\n  state_dir: &here y\n  gr|", ["group"], []),
    ],
)
def test_keys_and_values_are_those_of_the_place(completer: Completer, text: str, has: list[str], lacks: list[str]) -> None:
    found = labels(completer, text)
    assert set(has) <= set(found)
    assert not set(lacks) & set(found)


@pytest.mark.parametrize("text", ["# nam|", "version: 1 # |", 'node: {name: "de|', "node:\n  name:|", "x-mine:\n  foo: |", "  -|"])
def test_nothing_is_offered_where_nothing_is_known(completer: Completer, text: str) -> None:
    assert labels(completer, text) == []


def test_a_key_brings_its_colon_and_what_it_means(completer: Completer) -> None:
    by_label: dict[str, Any] = {c.label: c for c in completer.candidates(place(["workers:", "  - "], 1, 4))}  # type: ignore[arg-type]
    assert by_label["shadows"].insert == "shadows: "
    assert by_label["kv"].insert == "kv:"
    assert "ready to take over" in by_label["shadows"].detail and "(default 1)" in by_label["shadows"].detail
    assert next(iter(by_label)) == "name"  # what must be there comes first


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="ab:-# \n{}[],'\"&|>", max_size=60), row=st.integers(0, 10), column=st.integers(0, 20))
def test_no_text_however_broken_breaks_completion(completer: Completer, text: str, row: int, column: int) -> None:
    lines = text.split("\n")
    row = min(row, len(lines) - 1)
    found = place(lines, row, min(column, len(lines[row])))
    if found is not None:
        completer.candidates(found)
