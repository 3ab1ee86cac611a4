"""Engines that a supervisor had started and not yet recorded when it died, and those that its successor is just starting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shadowsup.supervisor import adoption
from shadowsup.supervisor.adoption import Adoption
from shadowsup.supervisor.tree import TAG_NAME

NODE, INSTANCE = "strays", "0011aabb"


@contextmanager
def engine(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run something with the tag of an engine of the node; it has begun to run its program when this enters."""
    words = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"
    env = {TAG_NAME: f"{NODE}/{name}/{INSTANCE}"}
    with subprocess.Popen([sys.executable, "-c", words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(2) == b"up"
        try:
            yield process
        finally:
            process.kill()


async def test_an_engine_that_was_never_recorded_is_ended_and_one_that_is_just_being_started_is_not(tmp_path: Path) -> None:
    node: Any = SimpleNamespace(registry=SimpleNamespace(entries=()), config=SimpleNamespace(node=SimpleNamespace(name=NODE)))
    with engine("chat.3") as left:
        found = Adoption(tmp_path, SimpleNamespace(instance=INSTANCE), SimpleNamespace(workers=()), ())  # type: ignore[arg-type]
        while adoption._boot_ticks() <= found.began_ticks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with engine("chat.4") as ours:  # of a worker that was taken over at once, while others still waited for their engines' words
            await adoption._end_unrecorded(node, found)
            assert left.wait(60) == -9
            assert ours.poll() is None
