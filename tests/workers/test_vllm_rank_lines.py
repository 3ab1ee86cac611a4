"""What goes between EngineCore and its ranks beside vLLM's own calls: descriptors to them, last words back. No vLLM is needed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from shadowsup.wire.engine import EngineSpec, Failed, KvSpec
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm.ranks import FDS_A_MESSAGE, RankedArena, RankPart, Ranks, say, take_fds, together

SPEC = EngineSpec(
    node="n",
    worker="w",
    engine="w.1",
    seq=1,
    kind="vllm",
    model="m",
    served_name="w",
    world=2,
    kv=KvSpec(size=0),
    runtime_dir="/r",
    keeper_socket="/k",
    beat_endpoint="ipc:///b",
    link_socket="/l",
)


class Pair:
    """Two ranks' ends, and what they were called for."""

    def __init__(self, stack: ExitStack) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ranks = Ranks(SPEC, self._call)
        self.lines: list[socket.socket] = []
        for _ in range(2):
            with self.ranks.seat() as line:
                self.lines.append(stack.enter_context(line.dup()))
        stack.callback(self.ranks.forget)

    def _call(self, method: str, timeout_s: float | None, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        return [0, 1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def part(size: int, *, device: str = "host", blocks: int = 4, weights: str = "a") -> RankPart:
    return RankPart(
        device=device, size=size, blocks=blocks, block_tokens=16, block_bytes=size // blocks, reserve=1, fingerprint=((weights, "1"),)
    )


def memfds(stack: ExitStack, count: int) -> list[int]:
    found = [os.memfd_create(f"slab-{number}") for number in range(count)]
    for fd in found:
        stack.callback(os.close, fd)
    return found


def test_each_rank_is_sent_its_own_segments(pair: Pair) -> None:
    with ExitStack() as stack:
        fds = memfds(stack, 3)
        RankedArena(pair.ranks, [part(8192), part(4096)]).map_segments(fds, [4096, 4096, 4096])
        assert pair.calls == [("kept_map", [[4096, 4096], [4096]])]
        for line, mine in zip(pair.lines, (fds[:2], fds[2:]), strict=True):
            got = take_fds(line, len(mine))
            assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in mine]
            for fd in got:
                os.close(fd)


def test_more_segments_than_one_message_takes(pair: Pair) -> None:
    with ExitStack() as stack:
        fds = memfds(stack, FDS_A_MESSAGE + 7)
        pair.ranks.map(fds, [[1] * len(fds), []])
        got = take_fds(pair.lines[0], len(fds))
        assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in fds]
        for fd in got:
            os.close(fd)


def test_segments_that_do_not_fill_the_arenas_are_sent_to_nobody(pair: Pair) -> None:
    with pytest.raises(WorkerError, match="do not fill"):
        RankedArena(pair.ranks, [part(8192), part(4096)]).map_segments([0, 0], [4096, 8192])
    assert pair.calls == []
    with pytest.raises(WorkerError, match="0 came"):
        take_fds(pair.lines[0], 1)


def test_all_ranks_answer_a_promotion_or_it_has_failed(pair: Pair) -> None:
    pair.ranks.serve()
    with pytest.raises(WorkerError, match="ranks"):
        Ranks(SPEC, lambda *_: [0]).serve()


def test_the_last_words_of_the_rank_that_failed_first_are_told(pair: Pair) -> None:
    assert pair.ranks.failure() is None
    say(pair.lines[1], 5.0, Failed(engine="w.1", stage="load", message="out of memory", fatal=True, fault="cuda_oom"))
    say(pair.lines[0], 6.0, Failed(engine="w.1", stage="load", message="the other rank hung up"))
    told = pair.ranks.failure()
    assert told is not None and (told.message, told.fatal, told.fault) == ("out of memory", True, "cuda_oom")


def test_the_fingerprint_has_every_rank_and_its_place() -> None:
    one = together([part(8192, weights="a"), part(8192, weights="b")])
    assert one.block_bytes == 4096
    assert one.parts == (("host", 8192), ("host", 8192))
    assert one.fingerprint != together([part(8192, weights="b"), part(8192, weights="a")]).fingerprint
    assert one.fingerprint != together([part(8192, weights="a")]).fingerprint
    with pytest.raises(WorkerError, match="different shapes"):
        together([part(8192), part(8192, blocks=8)])
