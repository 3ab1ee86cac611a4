"""Being somebody else for a moment: credentials belong to a thread in Linux, so one thread can have those of another user.

ZeroMQ's threads are made by, and have the credentials of, whoever makes the context: use a context of your own inside.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
NOBODY = 65_534
_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""Numbers of setgroups, setresgid, setresuid: the C library's functions would change every thread."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or platform.machine() not in _CALLS, reason="only root can be another user; the modes of the files are tested anyway"
)


def as_nobody(function: Callable[[], T], groups: Sequence[int] = ()) -> T:
    """Run ``function`` as the user nobody in ``groups``; return what it returns, raise what it raises."""
    libc = ctypes.CDLL(None, use_errno=True)
    setgroups, setresgid, setresuid = _CALLS[platform.machine()]
    result: list[T] = []
    failure: list[BaseException] = []

    def change(*words: object) -> None:
        if libc.syscall(*words) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def run() -> None:
        try:
            change(setgroups, len(groups), (ctypes.c_uint32 * max(len(groups), 1))(*groups))
            change(setresgid, NOBODY, NOBODY, NOBODY)
            change(setresuid, NOBODY, NOBODY, NOBODY)
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
