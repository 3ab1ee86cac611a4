"""How I/O threads and signal handlers wake the step loop: an eventfd, so that waiting costs nothing and waking costs microseconds."""

from __future__ import annotations

import os
import select


class Doorbell:
    """Any thread or signal handler rings, one thread waits. A ring that nobody waits for is kept, so none is lost."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def ring(self) -> None:
        """Wake the waiting thread. After `close` this does nothing: a late signal may come."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for a ring. Returns False when ``timeout_s`` passed without one."""
        rung = bool(self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        if rung:
            self.clear()
        return rung

    def clear(self) -> None:
        """Forget rings until now."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
