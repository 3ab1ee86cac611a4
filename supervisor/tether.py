"""Sees an engine's death before the kernel has taken its memory apart.

A dying process is torn down address space first, files second: with a gigabyte mapped in pages of 4 KiB, its sockets end some
50 ms after a SIGKILL (two busy cores, `benchmarks/host_death.py`), and so does a lifeline. The engine's main thread therefore holds a
robust mutex, whose waiter the kernel wakes at the very start. What remains to be known is that no other thread still runs: each of them
shows an empty ``/proc/PID/task/TID/statm`` as soon as it has left its address space, after which it can execute nothing in it. Then the
memory is frozen, though it is not unmapped yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from shadowsup.robust_mutex import RobustMutex

LOOK_S = 0.05
MOST_LOOK_S = 2.0
"""Between two looks whether an engine that has just started holds its end: doubles from the first to the most, so that one that never
takes it costs next to nothing."""
FREEZE_LOOK_S = 0.0002
FREEZE_SOON_S = 0.1
LATE_LOOK_S = 0.005
"""Between two looks from `FREEZE_SOON_S` after a death on: what is left waits for a processor."""
FREEZE_FOR_S = 5.0
"""Longer than anybody waits for it."""
STUCK_FROM_S, STUCK_LOOK_S, STUCK_LOOKS = 0.05, 0.025, 3
"""A healthy tree has left its memory before the first look at whether it is stuck; the last of these is 0.1 s after the kill. A thread may
wait in the kernel for a moment on its way out: stuck is what every look finds there."""

log = logging.getLogger("shadowsup.tether")


class Tether:
    """The supervisor's end, a file in the runtime directory. A thread waits for it, which ends with the engine.

    Raises:
        OSError: it cannot be made; the lifeline alone tells then.
    """

    def __init__(self, path: Path, *, made: bool = False) -> None:
        """``made``: it is there, and its engine may hold the other end."""
        if not made:
            path.unlink(missing_ok=True)
        self._mutex = RobustMutex(str(path), create=not made)
        self._over = threading.Event()
        self._watched = False
        self.owner = 0
        """Who holds the other end, or held it when it died; 0: nobody has taken it yet."""

    def watch(self, pid: int, died: Callable[[], None], frozen: Callable[[], None]) -> None:
        """Have ``died`` and then ``frozen`` called on the running loop. Neither comes when the engine ends without having taken its end.

        Whoever took it is who writes the memory: ``pid`` itself, or a child of it (vLLM's EngineCore).
        """
        loop = asyncio.get_running_loop()
        self._watched = True

        def tell(what: Callable[[], None]) -> None:
            try:
                loop.call_soon_threadsafe(what)
            except RuntimeError:  # the loop is closed: nobody is there to be told
                pass

        def wait() -> None:
            try:
                pause_s = LOOK_S
                while not self._mutex.held:
                    if self._over.wait(pause_s):
                        return
                    pause_s = min(2 * pause_s, MOST_LOOK_S)
                self.owner = self._mutex.owner or pid
                if self._mutex.wait_for_death():
                    tell(died)
                    if left_its_memory(self.owner, FREEZE_FOR_S):
                        tell(frozen)
            finally:
                self._mutex.close()

        threading.Thread(target=wait, name=f"tether-{pid}", daemon=True).start()

    def over(self) -> None:
        """The engine is gone, or was never started: do not wait for it to take its end any more. Idempotent."""
        if not self._watched and not self._over.is_set():
            self._mutex.close()
        self._over.set()


def left_its_memory(pid: int, timeout_s: float) -> bool:
    """Wait until no thread of the (dying) process has an address space. False: some still had after ``timeout_s``."""
    began_s = time.monotonic()
    while _has_memory(pid):
        spent_s = time.monotonic() - began_s
        if spent_s >= timeout_s:
            return False
        time.sleep(FREEZE_LOOK_S if spent_s < FREEZE_SOON_S else LATE_LOOK_S)
    return True


async def stuck(pids: Callable[[], Collection[int]]) -> bool:
    """Look, from the kill on, whether the kernel keeps one of these processes in their memory. Returns when that is known, 0.1 s later.

    What waits for a processor is not stuck, however long that takes.
    """
    await asyncio.sleep(STUCK_FROM_S)
    kept = await asyncio.to_thread(_kept_by_the_kernel, pids())
    for _ in range(STUCK_LOOKS - 1):
        if not kept:
            break
        await asyncio.sleep(STUCK_LOOK_S)
        kept &= await asyncio.to_thread(_kept_by_the_kernel, pids())
    return bool(kept)


def _kept_by_the_kernel(pids: Collection[int]) -> frozenset[str]:
    """Return the threads of ``pids`` that have memory and wait for something that no signal ends (D state).

    None of a process of which another thread has memory and does not wait so: on their way out threads wait for each other in D state,
    and that one may be what they wait for.
    """
    found: set[str] = set()
    for pid in pids:
        try:
            left = [task for task in Path(f"/proc/{pid}/task").iterdir() if _task_has_memory(task)]
        except OSError:  # reaped, or out of descriptors
            continue
        if all(_waits_in_the_kernel(task) for task in left):
            found |= {task.name for task in left}
    return frozenset(found)


def _waits_in_the_kernel(task: Path) -> bool:
    try:
        # The name, in parentheses, may hold anything; the state follows its last one.
        return (task / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"D"
    except (OSError, IndexError):
        return False


def _has_memory(pid: int) -> bool:
    """Whether some thread of ``pid`` has, or may have: what cannot be looked at (no descriptor left) is not known to be frozen."""
    try:
        return any(map(_task_has_memory, Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):  # reaped
        return False
    except OSError:
        return True


def _task_has_memory(task: Path) -> bool:
    try:
        return not (task / "statm").read_bytes().startswith(b"0 ")
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return False
