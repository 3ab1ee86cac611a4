"""The recoveries of a node over the death of its supervisor: none is lost, none is counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shadowsup.supervisor.protocol import Recovery
from shadowsup.supervisor.recovery import RecoveryBook


def recovery(worker: str = "chat", epoch: int = 2, **figures: float) -> Recovery:
    return Recovery(n=0, worker=worker, kind="shadow", cause="engine process died", ts=0.0, epoch=epoch, from_engine="chat.1", **figures)  # type: ignore[arg-type]


async def abandoned(folder: Path) -> RecoveryBook:
    """Return the book of the next supervisor. The first had two that are complete and two that are not."""
    first = RecoveryBook(folder / "done.jsonl", folder / "open.json")
    for epoch in (2, 3):
        first.note(recovery(epoch=epoch), done=True)
    first.note(recovery(epoch=4, detect_ms=1.0, promote_ms=5.0))
    first.note(recovery("other", epoch=9))
    await asyncio.sleep(0)  # what is saved is saved in the loop's next turn
    assert first._file is not None
    first._file.close()
    book = RecoveryBook(folder / "done.jsonl", folder / "open.json")
    book.resume(0.0)
    return book


async def test_numbers_go_on_and_what_was_complete_is_shown(tmp_path: Path) -> None:
    book = await abandoned(tmp_path)
    assert [(one.n, one.epoch) for one in book.all()] == [(1, 2), (2, 3)]
    assert book.counts("chat") == {"shadow": 2}
    later = recovery(epoch=7)
    assert book.note(later)
    assert later.n == 5
    book.close()


async def test_one_that_was_cut_short_is_gone_on_with_under_its_number(tmp_path: Path) -> None:
    book = await abandoned(tmp_path)
    rest = recovery(epoch=4, promote_ms=0.0, fence_ms=30.0)
    rest.cause = "the supervisor died"
    assert not book.note(rest), "it was told when it began"
    assert (rest.n, rest.cause, rest.detect_ms, rest.promote_ms, rest.fence_ms) == (3, "engine process died", 1.0, 5.0, 30.0)
    book.note(rest, done=True)
    book.settle()
    assert [one.n for one in book.all()] == [1, 2, 3, 4]
    assert book.counts("chat") == {"shadow": 3}
    assert book.counts("other") == {"shadow": 1}
    book.close()
    third = RecoveryBook(tmp_path / "done.jsonl", tmp_path / "open.json")
    third.resume(0.0)
    assert [one.n for one in third.all()] == [1, 2, 3, 4]
    third.close()


async def test_what_cannot_be_read_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "open.json").write_text("[{")
    (tmp_path / "done.jsonl").write_text('{"n": 1}\nrubbish\n')
    book = RecoveryBook(tmp_path / "done.jsonl", tmp_path / "open.json")
    book.resume(0.0)
    book.settle()
    assert book.all() == []
    book.close()
