"""A process that hangs in the kernel holds up nobody but the thread that reads of it (P06)."""

from __future__ import annotations

import threading
import time

import pytest

from shadowsup.supervisor.proc_reads import _hung, bounded_reads, hanging


def proc_threads() -> int:
    return sum(thread.name == "proc" for thread in threading.enumerate())


def test_every_key_is_read() -> None:
    assert bounded_reads(range(1000), lambda key: key * 2) == {key: key * 2 for key in range(1000)}
    assert bounded_reads([], lambda key: key) == {}
    assert proc_threads() == 0


def test_a_read_that_hangs_is_left_out_and_the_others_are_made() -> None:
    """P06: a stubbed read stands for a process whose address space is locked by a fault that never ends; D state itself cannot be made
    here."""
    release = threading.Event()

    def read(key: int) -> int:
        if key in (3, 7):
            release.wait()
        return key

    try:
        began_s = time.monotonic()
        # On a machine that does other things as well a thread may not run for a while that is no hang.
        assert set(bounded_reads(range(10), read, 1.0)) == set(range(10)) - {3, 7}
        assert time.monotonic() - began_s < 30.0
        assert hanging() == {3, 7}
        # It is not tried again, and costs neither time nor a thread, while it hangs.
        threads = proc_threads()
        assert set(bounded_reads(range(10), read, 30.0)) == set(range(10)) - {3, 7}
        assert proc_threads() == threads == 2
    finally:
        release.set()
    for thread in list(_hung.values()):
        thread.join(10.0)
    assert bounded_reads(range(10), read) == {key: key for key in range(10)}
    assert hanging() == frozenset()


def test_what_a_late_read_says_no_longer_counts() -> None:
    release, entered = threading.Event(), threading.Event()

    def read(key: int) -> str:
        entered.set()
        release.wait()
        return "late"

    found = bounded_reads([1], read, 0.02)
    threads = list(_hung.values())
    release.set()
    for thread in threads:
        thread.join(10.0)
    assert found == {}


def test_a_failure_is_the_callers() -> None:
    def read(key: int) -> int:
        raise PermissionError(key)

    with pytest.raises(PermissionError):
        bounded_reads([1], read)
