"""The list of processes that the next supervisor finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.policy.past import Past
from shadowsup.supervisor.policy.restart import BookState
from shadowsup.supervisor.registry import Entry, Mark, OutOfUse, Registry


def me() -> Identity:
    identity = ids.of(os.getpid())
    assert identity is not None
    return identity


def test_recorded_processes_that_still_run_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    registry = Registry(path)
    entry = Entry(identity=me(), what="engine", engine="chat.1", tag="demo/chat.1/x", pgid=os.getpgrp(), data={"link": "/l"})
    registry.record(entry)
    assert path.stat().st_mode & 0o777 == 0o600
    for gone in (
        Identity(pid=me().pid, start_time=me().start_time - 1, boot_id=me().boot_id),
        Identity(pid=me().pid, start_time=me().start_time, boot_id="another boot"),
        Identity(pid=2**22 - 1, start_time=1, boot_id=me().boot_id),
    ):
        registry.record(Entry(identity=gone, what="engine"))
    successor = Registry(path)
    assert successor.leftovers() == (entry,)
    assert successor.entries == (entry,)
    successor.forget(entry.identity)
    successor.forget(entry.identity)
    assert Registry(path).leftovers() == ()


def test_recording_again_replaces(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "processes.json")
    registry.record(Entry(identity=me(), what="engine", data={"epoch": "1"}))
    registry.record(Entry(identity=me(), what="engine", data={"epoch": "2"}))
    assert [entry.data for entry in Registry(tmp_path / "processes.json").leftovers()] == [{"epoch": "2"}]


def test_first_start_has_no_leftovers(tmp_path: Path) -> None:
    assert Registry(tmp_path / "processes.json").leftovers() == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "processes": []}'])
def test_list_that_cannot_be_understood_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes.json").write_text(text)
    with pytest.raises(SupervisorError) as caught:
        Registry(tmp_path / "processes.json").leftovers()
    assert caught.value.hint


def test_list_that_cannot_be_written_is_said_and_leaves_no_half_file(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "nowhere" / "processes.json")
    with pytest.raises(SupervisorError, match="cannot write"):
        registry.record(Entry(identity=me(), what="engine"))
    assert list(tmp_path.iterdir()) == []
    assert registry.entries == (), "who could not be recorded must not run"


def test_a_process_that_is_gone_is_forgotten_though_the_list_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    registry = Registry(folder / "processes.json")
    registry.record(Entry(identity=me(), what="engine"))
    (folder / "processes.json").unlink()
    folder.rmdir()
    registry.forget(me())
    assert registry.entries == ()
    folder.mkdir()
    other = Entry(identity=Identity(pid=1, start_time=1, boot_id=me().boot_id), what="keeper")
    registry.record(other)
    assert me() not in {entry.identity for entry in Registry(folder / "processes.json").leftovers()}


def test_writer_killed_at_any_instant_leaves_a_whole_list(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    code = f"""
from pathlib import Path
import os
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.policy.past import Past
from shadowsup.supervisor.policy.restart import BookState
from shadowsup.supervisor.registry import Entry, Mark, OutOfUse, Registry
registry, me = Registry(Path({str(path)!r})), ids.of(os.getppid())
for n in range(10**9):
    registry.record(Entry(identity=me, what="engine", engine="x" * (n % 5000)))
    if n == 0: print(flush=True)
"""
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        (entry,) = Registry(path).leftovers()
        assert entry.identity == me()


def test_what_a_worker_has_been_through_is_void_after_another_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "processes.json"
    registry = Registry(path)
    past = Past(service=BookState((1.0, 2.0), 2, 7.0), down="no such model")
    registry.set_mark("chat", Mark(seq=3, epoch=2, past=past))
    registry.set_out_of_use((OutOfUse(gpu="GPU-a", by="xid 79", why="off the bus"),))
    same = Registry(path)
    same.resume()
    assert same.mark("chat").past == past and same.out_of_use == registry.out_of_use
    monkeypatch.setattr(ids, "boot_id", lambda: "another boot")
    other = Registry(path)
    other.resume()
    assert other.mark("chat") == Mark(seq=3, epoch=2) and other.out_of_use == ()
