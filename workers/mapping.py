"""mmap with a fixed address, which Python's own mmap module does not offer. Everything here raises OSError with the kernel's words."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

PAGE = os.sysconf("SC_PAGE_SIZE")
"""Bytes."""

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def round_up(size: int, to: int = PAGE) -> int:
    """Return the smallest multiple of ``to`` that is not less than ``size``."""
    return -(-size // to) * to


def reserve(size: int) -> int:
    """Take an address range of ``size`` bytes that no access is allowed to. Returns its address.

    Raises:
        OSError: the kernel refuses (address space limit).
    """
    return _mmap(0, size, PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)


def map_fd(fd: int, size: int, protection: int, *, address: int = 0, offset: int = 0) -> int:
    """Map ``size`` bytes of ``fd`` shared. With ``address`` the pages there are replaced in one step. Returns the address.

    Raises:
        OSError: the kernel refuses (permission, seals, too many mappings).
    """
    return _mmap(address, size, protection, _MAP_SHARED | (_MAP_FIXED if address else 0), fd, offset)


def unmap(address: int, size: int) -> None:
    """Raises OSError when the range was never mapped by us in this form."""
    if _libc.munmap(address, size) != 0:
        raise _error("munmap", address, size)


def as_array(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the ``size`` bytes at ``address`` as an array. It does not keep the mapping alive and numpy believes it writable."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


@contextmanager
def read_only_fd(fd: int) -> Iterator[int]:
    """Open the file behind ``fd`` a second time, for reading.

    A shared mapping of a descriptor that may write counts as a writable one, whatever its protection: F_SEAL_WRITE fails with EBUSY, and
    before Linux 6.7 such a mapping of a sealed memfd fails with EPERM. Only a descriptor opened O_RDONLY maps without that right.
    """
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield reader
    finally:
        os.close(reader)


def _mmap(address: int, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address or None, size, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _error("mmap", address, size)
    return int(result)


def _error(call: str, address: int, size: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call} of {size} bytes at {address:#x}: {os.strerror(number)}")
