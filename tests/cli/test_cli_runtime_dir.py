"""Where a node's runtime directory is, for who starts one and for who looks for one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import STATUS, FakeSupervisor

from shadowsup.supervisor import runtime_dir
from shadowsup.supervisor.errors import NotRunning, SupervisorError
from shadowsup.supervisor.runtime_dir import Base, clean, create, find, for_start

Cli = Callable[..., Any]


@pytest.fixture
def places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two bases, as root's and a user's would be, in this order."""
    first, second = folder / "run", folder / "tmp"
    for path in (first, second):
        path.mkdir(mode=0o700)
    monkeypatch.setattr(runtime_dir, "bases", lambda _: (Base(first), Base(second)))
    return first, second


def test_the_places_are_looked_at_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert [str(base.path) for base in runtime_dir.bases({"XDG_RUNTIME_DIR": "/run/user/7"})] == [
        "/run/shadowsup",
        "/run/user/7/shadowsup",
        "/tmp/shadowsup-0",
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert [str(base.path) for base in runtime_dir.bases({"XDG_RUNTIME_DIR": "relative"})] == ["/tmp/shadowsup-7"]


def test_a_start_takes_the_option_then_the_variable_then_the_config_then_the_first_place(places: tuple[Path, Path]) -> None:
    environ = {"SHADOWSUP_RUNTIME_DIR": "/from/variable"}
    assert for_start("n", explicit=Path("/from/option"), configured=Path("/c"), environ=environ) == Path("/from/option")
    assert for_start("n", explicit=None, configured=Path("/c"), environ=environ) == Path("/from/variable")
    assert for_start("n", explicit=None, configured=Path("/c"), environ={}) == Path("/c")
    assert for_start("n", explicit=None, configured=None, environ={}) == places[0] / "n"


def test_a_start_finds_its_node_where_it_runs_already(places: tuple[Path, Path]) -> None:
    there = places[1] / "n"
    there.mkdir(mode=0o700)
    with FakeSupervisor(there, {}):
        assert for_start("n", explicit=None, configured=None, environ={}) == there


def test_a_client_takes_the_only_node_there_is_and_says_which(places: tuple[Path, Path], cli: Cli) -> None:
    there = places[1] / "demo"
    there.mkdir(mode=0o700)
    with FakeSupervisor(there, {"status": STATUS}):
        result = cli("status", "-o", "json")
    assert result.code == 0
    assert result.err == f"node demo in {there}\n"
    assert result.out.startswith("{")


def test_a_client_that_was_told_says_nothing(places: tuple[Path, Path], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    there = places[1] / "demo"
    there.mkdir(mode=0o700)
    with FakeSupervisor(there, {"status": STATUS}):
        assert cli("--runtime-dir", there, "status").err == ""
        monkeypatch.setenv("SHADOWSUP_RUNTIME_DIR", str(there))
        assert cli("status").err == ""


def test_a_living_node_is_taken_before_what_a_dead_one_left(places: tuple[Path, Path], cli: Cli) -> None:
    dead, living = places[0] / "dead", places[1] / "living"
    for path in (dead, living):
        path.mkdir(mode=0o700)
    (dead / "node.json").write_text("{}")
    with FakeSupervisor(living, {"status": STATUS}):
        result = cli("status")
    assert result.code == 0
    assert result.err == f"node living in {living} (also there: {dead})\n"


def test_several_nodes_are_named_and_none_is_guessed(places: tuple[Path, Path], cli: Cli) -> None:
    one, two = places[0] / "one", places[1] / "two"
    for path in (one, two):
        path.mkdir(mode=0o700)
    with FakeSupervisor(one, {}), FakeSupervisor(two, {}):
        result = cli("status")
    assert result.code == 2
    assert f"2 nodes are running: {one}, {two}" in result.err
    assert "--runtime-dir" in result.err


def test_no_node_is_told_with_where_was_looked(places: tuple[Path, Path]) -> None:
    with pytest.raises(NotRunning) as caught:
        find(explicit=None, environ={})
    assert str(places[0]) in caught.value.hint
    assert str(places[1]) in caught.value.hint


def test_a_folder_in_tmp_that_another_could_have_made_is_not_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = folder / "shadowsup-0"
    (base / "evil").mkdir(parents=True)
    (base / "evil" / "node.json").write_text("{}")
    base.chmod(0o777)
    monkeypatch.setattr(runtime_dir, "bases", lambda _: (Base(base, world=True),))
    with pytest.raises(NotRunning):
        find(explicit=None, environ={})


# --- making one -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_folder(folder: Path) -> Iterator[Path]:
    """A folder that is open to everyone, like /tmp."""
    path = folder / "t"
    path.mkdir()
    path.chmod(0o1777)
    yield path


def test_it_is_made_for_us_alone_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = create(folder / "base" / "demo")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_one_that_is_ours_is_taken_as_it_is(folder: Path) -> None:
    create(folder / "demo")
    (folder / "demo" / "x").touch()
    assert create(folder / "demo") == folder / "demo"
    assert (folder / "demo" / "x").exists()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o755, 0o777])
def test_one_that_is_open_to_others_is_refused(folder: Path, mode: int) -> None:
    (folder / "demo").mkdir()
    (folder / "demo").chmod(mode)
    with pytest.raises(SupervisorError, match="open to other users") as caught:
        create(folder / "demo")
    assert "chmod 700" in caught.value.hint


def test_a_group_may_be_let_in(folder: Path) -> None:
    group = os.getegid()
    for _ in range(2):
        assert create(folder / "demo", group=group).stat().st_mode & 0o777 == 0o750


def test_one_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "demo").mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SupervisorError, match=f"another user \\(uid {uid}\\)"):
        create(folder / "demo")


def test_a_link_in_a_folder_open_to_everyone_is_refused(open_folder: Path, folder: Path) -> None:
    (folder / "target").mkdir(mode=0o700)
    (open_folder / "demo").symlink_to(folder / "target")
    (open_folder / "base").symlink_to(folder / "target")
    for path in (open_folder / "demo", open_folder / "base" / "demo"):
        with pytest.raises(SupervisorError, match="symbolic link"):
            create(path)


def test_a_base_in_a_folder_open_to_everyone_must_be_closed(open_folder: Path) -> None:
    (open_folder / "base").mkdir()
    (open_folder / "base").chmod(0o777)
    with pytest.raises(SupervisorError, match="other users may write"):
        create(open_folder / "base" / "demo")


def test_a_link_of_ours_elsewhere_is_followed(folder: Path) -> None:
    (folder / "target").mkdir(mode=0o700)
    (folder / "demo").symlink_to(folder / "target")
    assert create(folder / "demo") == folder / "demo"


def test_a_file_is_refused(folder: Path) -> None:
    (folder / "demo").touch()
    with pytest.raises(SupervisorError, match="is not a folder"):
        create(folder / "demo")


def test_a_path_that_is_too_long_for_sockets_is_refused_with_the_limit(folder: Path) -> None:
    with pytest.raises(SupervisorError, match="Linux allows 107") as caught:
        create(folder / ("x" * 80), longest_name=4)
    assert "at most 81 bytes" in caught.value.hint
    assert create(folder / ("x" * (81 - len(str(folder)) - 1)), longest_name=4)


def test_cleaning_removes_what_a_node_made_and_follows_no_link(folder: Path) -> None:
    outside = folder / "outside"
    outside.mkdir()
    (outside / "file").touch()
    path = create(folder / "demo")
    (path / "engines").mkdir()
    (path / "engines" / "spec.json").touch()
    (path / "link").symlink_to(outside)
    (path / "engines" / "link").symlink_to(outside)
    clean(path)
    assert not path.exists()
    assert (outside / "file").exists()
    clean(path)
