"""Host memory: memfds, sealed in size, with every page there from the start."""

from __future__ import annotations

import errno
import fcntl
import os

from shadowsup.memkeeper.backends.host_memory import available, size_text
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory

DEVICE = "host"


class HostBackend:
    """See `base.Backend`. A segment's pages are allocated at once, so that a lack of memory is an error here and never a SIGBUS later."""

    name = "host"

    def probe(self) -> None:
        os.close(os.memfd_create("shadowsup-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    def granularity(self, device: str) -> int:
        if device != DEVICE:
            raise KeeperError(f"the host backend has no device {device}", "start the memkeeper with a backend for this device")
        return os.sysconf("SC_PAGESIZE")

    def require(self, size: int, device: str) -> None:
        self.granularity(device)
        figures = available()
        # fallocate alone would not refuse: it would take the machine's last page and leave the rest to the OOM killer.
        if size > figures.usable:
            raise OutOfMemory(
                f"cannot create {size_text(size)} of host memory: {figures}", "free a worker, or ask for less (kv.size, shadows, model)"
            )

    def allocate(self, size: int, name: str, device: str) -> int:
        self.require(size, device)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                limit = " (RLIMIT_FSIZE)" if error.errno == errno.EFBIG else ""
                raise OutOfMemory(
                    f"the kernel refused {size_text(size)} of host memory: {os.strerror(error.errno)}{limit}; {available()}"
                ) from None
            raise
        except BaseException:
            os.close(fd)
            raise
        return fd

    def usage(self, device: str) -> str:
        return str(available())

    def seal(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            return
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise KeeperError(
                    "cannot seal: a writable mapping of the segment still exists",
                    "the publisher unmaps it, or maps a read-only fd in its place, before it seals",
                ) from None
            raise KeeperError(f"cannot seal: {error}") from error
