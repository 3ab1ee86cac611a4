"""Faults on demand, for drills: an engine that misbehaves when it computes a certain sequence of tokens. Off unless `VARIABLE` is set.

    env: {SHADOWSUP_FAULT: "segv@text:please crash"}            # of a worker; several are joined by ;
    env: {SHADOWSUP_FAULT: "hang@1,17,99; cuda@text:boom"}
    env: {SHADOWSUP_FAULT: "hang@file:/tmp/strike"}

An action, ``@``, and when it strikes. Tokens: ids, or ``text:`` and what they decode to, are looked for in a request's prompt and output,
and the fault strikes each engine that runs such a request, as a real one would. A file: once it is there, the next step of whichever
engine finds it removes it and is struck.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shadowsup.workers.errors import WorkerError

VARIABLE = "SHADOWSUP_FAULT"

log = logging.getLogger("shadowsup.engine")


class Action(str, enum.Enum):
    HANG = "hang"
    """The step does not return; its thread sleeps."""
    SPIN = "spin"
    """The step does not return; its thread computes."""
    RAISE = "raise"
    SEGV = "segv"
    ABORT = "abort"
    EXIT = "exit"
    """It exits within 10 ms, without a word."""
    OOM = "oom"
    """More memory is asked for than there is: of the device where there is one."""
    CUDA = "cuda"
    """A kernel is given an index that is out of bounds (only on a GPU)."""


Occasion = tuple[int, ...] | str | Path
"""Ids, text, or a file."""


class Faults:
    """What to look for. ``decode``: ids to text."""

    def __init__(self, wanted: Sequence[tuple[Action, Occasion]], decode: Callable[[Sequence[int]], str]) -> None:
        self._wanted = wanted
        self._decode = decode

    @classmethod
    def from_environment(cls, decode: Callable[[Sequence[int]], str], environment: Mapping[str, str] = os.environ) -> Faults | None:
        """Return what `VARIABLE` asks for; None without it.

        Raises:
            WorkerError: (fatal) it cannot be understood.
        """
        text = environment.get(VARIABLE, "")
        if not text.strip():
            return None
        wanted = tuple(_parse(part.strip()) for part in text.split(";") if part.strip())
        log.warning("%s is set: this engine misbehaves on purpose (%s)", VARIABLE, text)
        return cls(wanted, decode)

    def look(self, requests: Iterable[Sequence[int]]) -> None:
        """The step is about to compute these requests (all tokens of each): misbehave if one is as was asked for.

        Raises:
            RuntimeError, MemoryError: such is the fault.
        """
        for tokens in requests:
            for action, occasion in self._wanted:
                if self._found(occasion, tokens):
                    log.warning("a fault was asked for: %s", action.value)
                    _strike(action)

    def _found(self, sequence: Occasion, tokens: Sequence[int]) -> bool:
        if isinstance(sequence, Path):
            try:
                sequence.unlink()
            except OSError:
                return False
            return True
        if isinstance(sequence, str):
            return sequence in self._decode(tokens)
        where, size = array("q", tokens).tobytes(), 8
        at = where.find(array("q", sequence).tobytes())
        while at % size and at >= 0:
            at = where.find(array("q", sequence).tobytes(), at + 1)
        return at >= 0


def _parse(text: str) -> tuple[Action, Occasion]:
    name, at, what = text.partition("@")
    try:
        if not at or not what:
            raise ValueError("no sequence")
        action = Action(name.strip())
        if what.startswith("text:"):
            return action, what.removeprefix("text:")
        if what.startswith("file:"):
            return action, Path(what.removeprefix("file:"))
        return action, tuple(int(part) for part in what.split(","))
    except ValueError as error:
        actions = ", ".join(action.value for action in Action)
        raise WorkerError(
            f"{VARIABLE}: {text!r} is no fault ({error})",
            f"write ACTION@1,2,3, ACTION@text:WORDS or ACTION@file:PATH; actions are {actions}",
            fatal=True,
        ) from error


def _strike(action: Action) -> None:
    match action:
        case Action.HANG:
            while True:
                time.sleep(0.01)
        case Action.SPIN:
            while True:
                pass
        case Action.SEGV:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.string_at(8)
        case Action.ABORT:
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            os.abort()
        case Action.EXIT:
            time.sleep(0.01)
            os._exit(1)
        case Action.OOM:
            _ask_for_too_much()
        case Action.CUDA:
            _index_out_of_bounds()
        case Action.RAISE:
            raise RuntimeError("a fault was asked for")


def _ask_for_too_much() -> NoReturn:
    torch = _torch_with_gpu()
    if torch is not None:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    raise MemoryError(f"{len(bytearray(1 << 50))} bytes were there after all")


def _index_out_of_bounds() -> NoReturn:
    torch = _torch_with_gpu()
    if torch is None:
        raise RuntimeError("a CUDA fault was asked for, but there is no GPU here")
    torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
    torch.cuda.synchronize()
    raise RuntimeError("the device did not mind an index that is out of bounds")


def _torch_with_gpu() -> Any:
    import sys

    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None
