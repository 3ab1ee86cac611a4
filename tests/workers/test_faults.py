"""Faults on demand: off unless asked for, found in the tokens they were asked for, and real."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.faults import VARIABLE, Faults


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def faults(text: str) -> Faults:
    found = Faults.from_environment(decode, {VARIABLE: text})
    assert found is not None
    return found


def test_without_the_variable_there_are_none() -> None:
    assert Faults.from_environment(decode, {}) is None
    assert Faults.from_environment(decode, {VARIABLE: "  "}) is None


def test_ids_are_found_where_they_stand_and_nowhere_else() -> None:
    asked = faults("raise@2,3")
    for harmless in ((), (2,), (3, 2), (2, 0, 3), (512, 0, 0), tuple(range(4, 100))):
        asked.look([harmless])
    for fatal in ((2, 3), (9, 9, 2, 3, 9)):
        with pytest.raises(RuntimeError, match="asked for"):
            asked.look([(1,), fatal])


def test_words_are_found_in_the_text() -> None:
    asked = faults("raise@text:go boom; oom@text:eat")
    asked.look([tuple(b"go bo"), tuple(b"om")])
    with pytest.raises(RuntimeError):
        asked.look([tuple(b"please go boom now")])
    with pytest.raises(MemoryError):
        asked.look([tuple(b"eat all")])


def test_a_file_strikes_once(tmp_path: Path) -> None:
    asked = faults(f"raise@file:{tmp_path / 'strike'}")
    asked.look([(1,)])
    (tmp_path / "strike").touch()
    with pytest.raises(RuntimeError):
        asked.look([(1,)])
    asked.look([(1,)])


@pytest.mark.parametrize(("action", "status"), [("segv", -signal.SIGSEGV), ("abort", -signal.SIGABRT), ("exit", 1)])
def test_a_process_ends_as_was_asked(action: str, status: int) -> None:
    pid = os.fork()
    if pid == 0:
        faults(f"{action}@7").look([(7,)])
        os._exit(0)
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == status


@pytest.mark.parametrize("wrong", ["segv", "explode@1", "segv@", "segv@one"])
def test_what_cannot_be_understood_is_refused_with_words(wrong: str) -> None:
    with pytest.raises(WorkerError, match="is no fault") as refused:
        faults(wrong)
    assert refused.value.fatal
    assert "segv" in refused.value.hint


def test_a_gpus_fault_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one here, and its context would be lost")
    with pytest.raises(RuntimeError, match="no GPU here"):
        faults("cuda@1").look([(1,)])
