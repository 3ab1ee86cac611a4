"""The fork server: ``python -m shadowsup.workers.nursery --socket PATH --preload NAME [--ready-fd N]``.

It imports what takes seconds to import and then forks engines in milliseconds. To be forkable it stays as simple as a process can be: one
thread, no event loop, no ZeroMQ, no torch operation (parents that had run one left children that hung), no CUDA. It counts its threads
before every fork and refuses rather than hand out a child with somebody else's locks in it. It serves one supervisor at a time and
outlives it; its children outlive the nursery. See `shadowsup.wire.nursery` for the protocol.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import importlib
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shadowsup.wire import accepting, credentials, framing
from shadowsup.wire import nursery as wire
from shadowsup.wire.engine import EngineSpec
from shadowsup.wire.nursery import Child, Clone, Exited, Fork, Forked, ForkRefused, Quit, Ready
from shadowsup.workers import fork_child, nursery_spare, registry

_CHUNK = 256 * 1024
_FD_SPACE = socket.CMSG_SPACE(64 * array.array("i").itemsize)
_UNTOLD = 1024
"""Ends of engines that are remembered while no supervisor is connected."""

_SINGLE_THREADED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")

_NVML_THREAD = re.compile(r"cuda[0-9a-f]{8,}")
"""NVML, too, leaves a thread of the driver's behind, even when it was shut down (driver 580); vLLM asks it which GPU there is when it is
imported. A child without that thread initialises NVML and CUDA anew: so vLLM's own EngineCore does, forked from its API server."""

_CUDA_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""

_HARMLESS = ("jemalloc_bg_thd",)
"""Names of threads that hold nothing over a fork: jemalloc (pyarrow's, which scikit-learn and so transformers import where they are
installed) takes its locks before a fork, and a child does without the thread."""


class _Closed(Exception):
    """The supervisor's connection is of no use any more."""


class _Connection:
    """The supervisor: frames with descriptors, blocking sends (answers are small and few)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._unpacker = framing.Unpacker()
        self._fds: deque[int] = deque()
        sock.settimeout(5.0)  # for sends only: reads happen when there is something to read

    def receive(self) -> list[bytes]:
        """Return the frames that one read completes. Raises _Closed."""
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(_CHUNK, _FD_SPACE, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise _Closed(str(error)) from None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise _Closed("descriptors were lost: this process is at its limit of open files")
        if not data:
            raise _Closed("end of stream")
        try:
            return list(self._unpacker.feed(data))
        except framing.FrameError as error:
            raise _Closed(str(error)) from None

    def take_fds(self, count: int) -> list[int]:
        """Return the next descriptors that arrived. Raises _Closed when there are fewer."""
        if len(self._fds) < count:
            raise _Closed(f"{count} descriptors were announced, {len(self._fds)} came")
        return [self._fds.popleft() for _ in range(count)]

    def send(self, message: wire.FromNursery, fds: tuple[int, ...] = ()) -> None:
        """Raises _Closed."""
        frame = framing.pack(wire.encode(message))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self.sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            self.sock.sendall(frame[sent:], socket.MSG_NOSIGNAL)
        except OSError as error:
            raise _Closed(str(error)) from None

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())
        self.sock.close()


@dataclass(frozen=True)
class _Running:
    child: Child
    pidfd: int


class Nursery:
    """Serves at ``path`` (mode 0600).

    Args:
        preload: what was imported, for `Ready`.
        import_s: how long that took.
        max_threads: with more threads than this in the process no fork is made.
        start: what the child calls with its spec.
        imported: environment variables that the imports have set, as they do in an engine that is spawned cold. vLLM, for one, sees to it
            that asking for a device initialises none.
    """

    def __init__(
        self,
        path: str,
        *,
        preload: str,
        import_s: float,
        max_threads: int,
        start: Callable[[EngineSpec], None],
        imported: Mapping[str, str],
    ) -> None:
        self._path = path
        self._preload = preload
        self._import_s = import_s
        self._max_threads = max_threads
        self._start = start
        self._imported = imported
        self._running: dict[int, _Running] = {}
        self._untold: deque[Exited] = deque(maxlen=_UNTOLD)
        self._connection: _Connection | None = None
        self._quit = False
        self._full = False
        """No descriptor was left for a connection: the selector would report it again at once, so the listener rests."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(path).unlink(missing_ok=True)  # the path belongs to one nursery at a time: the supervisor has made sure of that
        self._listener.bind(path)
        Path(path).chmod(0o600)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        # Signals interrupt nothing by themselves; through this pair they wake the selector.
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, self._drain_wakeups)

    def serve(self) -> None:
        """Serve until SIGTERM or `Quit`; then remove the socket. Engines live on."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        try:
            while not self._quit:
                ready = self._selector.select(accepting.REST_S if self._full else None)
                if self._full and not ready:
                    self._full = False
                    self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                for key, _ in ready:
                    callback: Callable[[], None] = key.data
                    callback()
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._close()
            Path(self._path).unlink(missing_ok=True)

    # --- the supervisor --------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in accepting.NO_ROOM:
                print(f"nursery: cannot accept connections: {error}", file=sys.stderr)
                self._full = True
                self._selector.unregister(self._listener)
            return  # otherwise it is gone again, and dials again
        who = credentials.peer(sock)
        if not who.ours:
            print(f"nursery: refused a connection of uid {who.uid} (pid {who.pid})", file=sys.stderr)
            sock.close()
            return
        self._hang_up()
        self._connection = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, self._read)
        children = tuple(running.child for running in self._running.values() if running.child.engine)
        self._send(
            Ready(
                pid=os.getpid(),
                preload=self._preload,
                import_s=self._import_s,
                threads=_threads(),
                max_threads=self._max_threads,
                children=children,
            )
        )
        while self._untold and self._connection is not None:
            if self._send(self._untold[0]):
                self._untold.popleft()

    def _read(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            for payload in connection.receive():
                message = wire.decode_request(payload)
                if isinstance(message, Quit):
                    self._quit = True
                else:
                    self._fork(message, fork_child.Inheritance(*connection.take_fds(wire.FORK_FDS)))
        except (_Closed, msgspec.MsgspecError) as error:
            print(f"nursery: connection ended: {error}", file=sys.stderr)
            if connection is self._connection:
                self._hang_up()

    def _send(self, message: wire.FromNursery, fds: tuple[int, ...] = ()) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(message, fds)
        except _Closed as error:
            print(f"nursery: connection ended: {error}", file=sys.stderr)
            self._hang_up()
            return False
        return True

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._selector.unregister(connection.sock)
            connection.close()

    # --- children --------------------------------------------------------------------------------------------------------------

    def _fork(self, request: Fork | Clone, given: fork_child.Inheritance) -> None:
        engine = request.spec.engine if isinstance(request, Fork) else ""
        try:
            threads = _threads()
            if threads > self._max_threads:
                names = ", ".join(_thread_names())
                words = f"the nursery has {threads} threads ({names}) and may have {self._max_threads}: a child could inherit a held lock"
                self._send(ForkRefused(number=request.number, engine=engine, message=words, hint="start this engine by a cold spawn"))
                return
            started = time.perf_counter()
            try:
                pid, pidfd = self._fork_child(request, given)
            except OSError as error:
                words = f"fork failed: {error.strerror}"
                self._send(ForkRefused(number=request.number, engine=engine, message=words, hint="check ulimit -u, -n and free memory"))
                return
            fork_s = time.perf_counter() - started
            child = Child(engine=engine, pid=pid, start_time=_start_time(pid))
            self._running[pid] = _Running(child, pidfd)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pid))
            answer = Forked(number=request.number, engine=engine, pid=pid, start_time=child.start_time, fork_s=fork_s)
            self._send(answer, (pidfd,))
        finally:
            # Ours would hold the engine's lifeline and log pipes open after its death.
            for fd in (given.lifeline, given.stdout, given.stderr):
                os.close(fd)

    def _fork_child(self, request: Fork | Clone, given: fork_child.Inheritance) -> tuple[int, int]:
        """Fork; returns pid and pidfd in the parent, never in the child. Raises OSError: there is no child."""
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal for the child must wait until it no longer has our handlers, which would swallow it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                self._close()
                if isinstance(request, Clone):
                    nursery_spare.stand_by(given, self._succeed)
                fork_child.become(request.spec, {**request.env, **self._imported}, given, self._start)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return pid, os.pidfd_open(pid)  # ours and not reaped: the pid cannot be another's
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _reap(self, pid: int) -> None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done == 0:
            return
        running = self._running.pop(pid)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        if not running.child.engine:
            return  # a spare: the supervisor watches it itself
        exited = Exited(engine=running.child.engine, pid=pid, status=os.waitstatus_to_exitcode(status))
        if not self._send(exited):
            self._untold.append(exited)

    def _succeed(self, ready_fd: int) -> None:
        """In a spare, which shares nothing with the nursery it was but what was imported: be the next one."""
        nursery = Nursery(
            self._path,
            preload=self._preload,
            import_s=self._import_s,
            max_threads=self._max_threads,
            start=self._start,
            imported=self._imported,
        )
        nursery.announce(ready_fd)
        nursery.serve()

    def announce(self, ready_fd: int) -> None:
        """Write the byte that says that the socket is served; closes ``ready_fd``."""
        os.write(ready_fd, b"1")
        os.close(ready_fd)

    # --- the end ---------------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        self._quit = True

    def _drain_wakeups(self) -> None:
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass

    def _close(self) -> None:
        """Close every descriptor through the object that owns it, so that no object closes a stranger's later. In a child too."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._selector.close()
        for end in (self._listener, self._wake, self._woken):
            end.close()
        for running in self._running.values():
            os.close(running.pidfd)
        self._running.clear()


def preload(name: str) -> float:
    """Import what ``name`` stands for and return how long it took, in seconds.

    Raises:
        ImportError: a module that was asked for by its own name is not there. What a kind stands for differs between the versions of
            its libraries: one that is missing is said and skipped, for engines import for themselves what they need.
    """
    started = time.perf_counter()
    for module in registry.preload_modules(name):
        try:
            importlib.import_module(module)
        except ImportError as error:
            if name not in registry.PRELOADS:
                raise
            print(f"nursery: {module} is not preloaded: {error}", file=sys.stderr)
    # Children share these pages until somebody writes to them; the collector would, in every child.
    gc.collect()
    gc.freeze()
    return time.perf_counter() - started


def _threads() -> int:
    """Return the threads of this process, Python's or not, that a child could miss."""
    missed = [name for name in _thread_names() if name not in _HARMLESS]
    if any(map(_NVML_THREAD.fullmatch, missed)) and not _cuda_is_initialised():
        missed = [name for name in missed if not _NVML_THREAD.fullmatch(name)]
    return len(missed)


def _cuda_is_initialised() -> bool:
    """Return whether this process has called cuInit: no child of it could use a device. Asking initialises nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_NOT_INITIALISED)


def _thread_names() -> list[str]:
    return sorted(entry.joinpath("comm").read_text().strip() for entry in Path("/proc/self/task").iterdir())


def _start_time(pid: int) -> int:
    """Return field 22 of /proc/PID/stat. The name in field 2 may contain anything, so count from its closing bracket."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shadowsup.workers.nursery", description="Fork server for engines.")
    parser.add_argument("--socket", required=True, help="Unix socket to serve at")
    parser.add_argument("--preload", default="", help="engine kind, or modules separated by commas, to import before serving")
    parser.add_argument("--ready-fd", type=int, default=-1, help="gets one byte when the socket is served")
    parser.add_argument("--max-threads", type=int, default=1, help="refuse to fork with more threads than this")
    options = parser.parse_args(arguments)
    # Thread pools are started by what is imported next; children set their own number.
    os.environ.update(dict.fromkeys(_SINGLE_THREADED, "1"))
    from shadowsup.workers.main import start

    before = dict(os.environ)
    try:
        import_s = preload(options.preload)
    except ImportError as error:
        print(f"nursery: cannot preload {options.preload}: {error}", file=sys.stderr)
        return 2
    importlib.import_module("shadowsup.workers.runtime")
    nursery = Nursery(
        options.socket,
        preload=options.preload,
        import_s=import_s,
        max_threads=options.max_threads,
        start=start,
        imported={name: value for name, value in os.environ.items() if before.get(name) != value},
    )
    if options.ready_fd >= 0:
        nursery.announce(options.ready_fd)
    nursery.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
