"""A robust mutex in shared memory: who waits for it is woken by the kernel the moment its owner's thread dies.

This is POSIX's PTHREAD_MUTEX_ROBUST by ctypes. The kernel walks a dying thread's list of robust mutexes before it tears down the
address space (``exit_mm_release`` in kernel/fork.c), so the news does not wait for hundreds of megabytes to be unmapped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_PROCESS_SHARED = 1
_ROBUST = 1
"""PTHREAD_PROCESS_SHARED and PTHREAD_MUTEX_ROBUST of glibc's and musl's pthread.h."""
_ATTRIBUTE_BYTES = 64
"""More than ``sizeof(pthread_mutexattr_t)`` anywhere; ``pthread_mutex_t`` (40 or 48 bytes) has `_HELD_AT` bytes."""
_HELD_AT = 256
_OWNER_AT = 260

_libc = ctypes.CDLL(None, use_errno=False)


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(code, f"{what}: {os.strerror(code)}")


class RobustMutex:
    """The mutex in the first page of the file at ``path``, mapped into this process.

    Raises:
        OSError: the file cannot be opened or mapped, or the C library has no robust mutexes.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, mmap.PAGESIZE)  # in a full tmpfs the first store would be a SIGBUS otherwise
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._cell = (ctypes.c_char * mmap.PAGESIZE).from_buffer(self._map)
        if create:
            self._initialise()

    def _initialise(self) -> None:
        attributes = (ctypes.c_char * _ATTRIBUTE_BYTES)()
        _check(_libc.pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED), "pthread_mutexattr_setpshared")
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST), "pthread_mutexattr_setrobust")
        _check(_libc.pthread_mutex_init(self._cell, attributes), "pthread_mutex_init")
        _check(_libc.pthread_mutexattr_destroy(attributes), "pthread_mutexattr_destroy")

    @property
    def held(self) -> bool:
        """Whether its owner has taken it (or had, before it died)."""
        return self._map[_HELD_AT] == 1

    @property
    def owner(self) -> int:
        """Pid of who took it; once `held`."""
        return int.from_bytes(self._map[_OWNER_AT : _OWNER_AT + 4], "little")

    def hold(self) -> None:
        """Own it until the calling thread ends. The memory stays mapped as long: the kernel looks there.

        Raises:
            OSError: it is owned already.
        """
        _check(_libc.pthread_mutex_trylock(self._cell), "pthread_mutex_trylock")
        self._map[_OWNER_AT : _OWNER_AT + 4] = os.getpid().to_bytes(4, "little")
        self._map[_HELD_AT] = 1
        # An interpreter that ends would unmap it, and the kernel would find nothing to tell of the thread's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))

    def wait_for_death(self) -> bool:
        """Block until the owner's thread has died (True) or let go (False). Only once `held`; releases the GIL meanwhile."""
        code = _libc.pthread_mutex_lock(self._cell)
        if code == errno.EOWNERDEAD:
            _libc.pthread_mutex_consistent(self._cell)
        elif code:
            return False
        _libc.pthread_mutex_unlock(self._cell)
        return bool(code == errno.EOWNERDEAD)

    def close(self) -> None:
        """Unmap. Not in the process that holds it."""
        del self._cell
        self._map.close()
