"""Saying that what follows compiles: it may take long, hold the GIL, and make no step, and is no hang.

`compiling` is for whatever does so knowingly, in whichever module. What torch compiles by itself (``torch.compile``, when a shape is new)
is noticed by the hooks that torch offers. Whose step loop it is (`shadowsup.workers.life`) says who is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_told: list[Callable[[str], None]] = []
_depth = 0
_hooked = False


def tell(listener: Callable[[str], None]) -> None:
    """Call ``listener`` with what is being compiled, and with nothing when that is over; on the thread that compiles."""
    _told[:] = [listener]


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """While this lasts, the engine says that it compiles ``what``. May be nested."""
    _began(what)
    try:
        yield
    finally:
        _ended()


def watch_torch() -> None:
    """Notice what torch compiles, once torch has what compiles; costs next to nothing, so it is called for each step."""
    global _hooked
    if _hooked:
        return
    module: Any = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return
    _hooked = True
    handler = getattr(module, "callback_handler", None)
    if handler is not None:
        handler.register_start_callback(lambda *_: _began("a graph of torch.compile"))
        handler.register_end_callback(lambda *_: _ended())


def _began(what: str) -> None:
    global _depth
    _depth += 1
    if _depth == 1:
        for listener in _told:
            listener(what)


def _ended() -> None:
    global _depth
    _depth = max(0, _depth - 1)
    if _depth == 0:
        for listener in _told:
            listener("")
