"""``python -m shadowsup.supervisor.scribe --socket PATH [--ready-fd N]``: the process that reads what the node's processes print.

Its one duty is that nobody who prints ever waits: it reads every pipe in turn, a bounded piece each, whatever becomes of the supervisor
(streams outlive connections) and of the disk (`shadowsup.supervisor.scribe_writer`). It ends on `Quit` or SIGTERM, or when there is
neither a stream nor a supervisor for `IDLE_S`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import resource
import selectors
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.memkeeper.protocol import MAX_FDS
from shadowsup.supervisor import scribe_protocol as wire
from shadowsup.supervisor.scribe_file import stamp
from shadowsup.supervisor.scribe_stream import Lines
from shadowsup.supervisor.scribe_writer import STALL_S, Counter, Writer
from shadowsup.wire import credentials

READ_SIZE = 64 * 1024
"""Bytes read from one pipe before the next one has its turn: a pipe's default capacity."""

DRAIN_MAX = 1024 * 1024
"""Bytes read at once from a pipe whose tail is asked for, or at the end: the largest pipe an unprivileged process can have."""

ENDED_MAX = 64
"""Streams that have ended and whose last lines are still known."""

IDLE_S = 30.0
ENDED = ".ended"
"""Ending of the file with engines' last lines, beside the log."""
ENDS_MAX = 1024 * 1024
"""Bytes before that file is rotated, once: more than two ends of `ScribeClient.open`'s 200 lines of `TAIL_LINE_MAX`."""
MAX_REQUEST = 1024 * 1024
"""Bytes of one request."""


@dataclass(eq=False)
class _Stream:
    spec: wire.Add
    fd: int
    lines: Lines
    counter: Counter = field(default_factory=Counter)
    received: int = 0

    @property
    def path(self) -> Path:
        return Path(self.spec.path)

    @property
    def ended(self) -> bool:
        return self.fd < 0

    def figures(self) -> wire.Figures:
        spec = self.spec
        return wire.Figures(
            key=spec.key,
            stream=spec.stream,
            source=spec.source,
            path=spec.path,
            max_size=spec.max_size,
            keep=spec.keep,
            tail_lines=spec.tail_lines,
            received=self.received,
            dropped=self.counter.not_written + self.counter.not_queued,
            ended=self.ended,
        )


@dataclass(frozen=True, eq=False)
class _Watch:
    channel: Channel
    number: int
    stream: _Stream


class Scribe:
    """The loop. One thread, with the disk's (`Writer`) beside it."""

    def __init__(self, listener: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener = listener
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._writer = Writer()
        self._streams: dict[str, _Stream] = {}
        self._ended: OrderedDict[str, _Stream] = OrderedDict()
        self._paused: set[_Stream] = set()
        self._channels: set[Channel] = set()
        self._watches: dict[int, _Watch] = {}
        self._serials = itertools.count(1)
        self._stopping = False
        self._idle_since = clock()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._writer.wake_fd, selectors.EVENT_READ, self._woken)

    def stop(self) -> None:
        """End the loop after the event in hand; safe in a signal handler."""
        self._stopping = True

    def run(self, wake: socket.socket | None = None) -> None:
        """Serve until told to stop, then write what is in the pipes. ``wake``: becomes readable when a signal has come."""
        if wake is not None:
            self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(64))
        while not self._stopping and not self._idle_for_long():
            for key, _ in self._selector.select(STALL_S / 5 if self._paused else 5.0):
                key.data()
            self._resume()
        for stream in list(self._streams.values()):
            self._drain(stream)
            self._end(stream)
        self._writer.close()
        for channel in list(self._channels):
            self._disconnect(channel)
        self._selector.close()

    def _idle_for_long(self) -> bool:
        now_s = self._clock()
        if self._streams or self._channels:
            self._idle_since = now_s
        return now_s - self._idle_since > IDLE_S

    # --- pipes ----------------------------------------------------------------------------------------------------------------

    def _readable(self, stream: _Stream) -> None:
        if stream.ended or stream in self._paused:  # by an event of the same turn
            return
        if not self._writer.room(stream.path) and not self._writer.stalled(stream.path):
            # The disk is behind, but moving: let the pipe fill for a moment rather than lose lines.
            self._selector.unregister(stream.fd)
            self._paused.add(stream)
            return
        self._read(stream)

    def _read(self, stream: _Stream) -> bool:
        """Read one piece; end the stream at its end. Returns whether there may be more."""
        try:
            chunk = os.read(stream.fd, READ_SIZE)
        except BlockingIOError:
            return False
        if not chunk:
            self._end(stream)
            return False
        stream.received += len(chunk)
        self._put(stream, stream.lines.feed(chunk, time.time()))
        return True

    def _drain(self, stream: _Stream) -> None:
        """Read what is in the pipe now, `DRAIN_MAX` of it at most (its process may print without end)."""
        for _ in range(DRAIN_MAX // READ_SIZE):
            if stream.ended:
                return
            self._writer.wait_room(stream.path)
            if not self._read(stream):
                return

    def _put(self, stream: _Stream, data: bytes) -> None:
        if data:
            self._writer.put(stream.path, data, stream.counter)

    def _resume(self) -> None:
        for stream in [paused for paused in self._paused if self._writer.room(paused.path) or self._writer.stalled(paused.path)]:
            self._paused.discard(stream)
            self._selector.register(stream.fd, selectors.EVENT_READ, lambda stream=stream: self._readable(stream))

    def _woken(self) -> None:
        os.eventfd_read(self._writer.wake_fd)

    def _end(self, stream: _Stream) -> None:
        if stream.ended:
            return
        if stream not in self._paused:
            self._selector.unregister(stream.fd)
        self._paused.discard(stream)
        os.close(stream.fd)
        stream.fd = -1
        now_s = time.time()
        self._put(stream, stream.lines.finish(now_s))
        self._writer.release(stream.path)
        self._keep_end(stream, now_s)
        del self._streams[stream.spec.key]
        self._ended[stream.spec.key] = stream
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for serial in stream.lines.watched:
            self._report(serial, None)
        for channel in list(self._channels):
            self._send(channel, wire.Ended(key=stream.spec.key, stream=stream.spec.stream))

    def _keep_end(self, stream: _Stream, now_s: float) -> None:
        """Write the last lines of an engine once more, to a file that nothing else is written to: a flood of its successor, which rotates
        the log away in seconds, must not take along why this one died. Two ends at least are there at any time (`ENDS_MAX`)."""
        spec = stream.spec
        engine = spec.source.rpartition(".")[0] == stream.path.stem
        if not engine or not stream.lines.kept or self._stopping:  # then it is us who end
            return
        path = stream.path.with_suffix(ENDED)
        mark = stamp(now_s) + b" " + spec.source.encode() + b" | "
        self._writer.use(path, max_size=ENDS_MAX, keep=1)
        self._writer.put(path, b"".join(mark + line + b"\n" for line in stream.lines.kept), Counter())
        self._writer.release(path)

    # --- requests ---------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        who = credentials.peer(sock)
        if not who.ours:
            print(f"scribe: refused a connection of uid {who.uid} (pid {who.pid})", file=sys.stderr)
            sock.close()
            return
        channel = Channel(sock, max_frame=MAX_REQUEST)
        self._channels.add(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._serve(channel))

    def _serve(self, channel: Channel) -> None:
        if channel not in self._channels:  # disconnected by an event of the same turn
            return
        try:
            channel.flush()
            self._listen_for(channel)
            for payload in channel.receive():
                if channel not in self._channels:
                    break
                self._handle(channel, wire.decode_request(payload))
        except (ChannelClosed, msgspec.MsgspecError):
            self._disconnect(channel)

    def _send(self, channel: Channel, message: wire.FromScribe, fds: list[OwnedFd] | None = None) -> None:
        if channel not in self._channels:
            return
        try:
            channel.send(wire.encode(message), fds or [])
        except ChannelClosed:
            self._disconnect(channel)
            return
        self._listen_for(channel)

    def _listen_for(self, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
        key = self._selector.get_key(channel)
        if key.events != events:
            self._selector.modify(channel, events, key.data)

    def _disconnect(self, channel: Channel) -> None:
        if channel not in self._channels:
            return
        self._channels.discard(channel)
        self._selector.unregister(channel)
        channel.close()
        for serial, watch in list(self._watches.items()):
            if watch.channel is channel:
                self._unwatch(serial)

    def _handle(self, channel: Channel, request: wire.ToScribe) -> None:
        match request:
            case wire.Add():
                self._add(request, channel.take_fds(1)[0])
                self._send(channel, wire.Done(number=request.number))
            case wire.Tail():
                self._tail(channel, request)
            case wire.Watch():
                self._watch(channel, request)
            case wire.Unwatch():
                for serial, watch in list(self._watches.items()):
                    if watch.channel is channel and watch.number == request.watch:
                        self._unwatch(serial)
                self._send(channel, wire.Done(number=request.number))
            case wire.GetStats():
                figures = [stream.figures() for stream in self._all()]
                self._send(channel, wire.Stats(number=request.number, streams=figures, errors=self._writer.errors()))
            case wire.Takeover():
                self._hand_over(channel, request)
            case wire.Quit():
                for stream in list(self._streams.values()):
                    self._drain(stream)
                self._send(channel, wire.Done(number=request.number))
                self.stop()

    def _all(self) -> list[_Stream]:
        return [*self._ended.values(), *self._streams.values()]

    def _named(self, name: str) -> _Stream | None:
        """Return the newest stream of that name: a living one, else the one that ended last."""
        return next((stream for stream in reversed(self._all()) if stream.spec.stream == name), None)

    def _add(self, spec: wire.Add, fd: int) -> None:
        if spec.key in self._streams or spec.key in self._ended:
            os.close(fd)
            return
        os.set_blocking(fd, False)
        former = self._named(spec.stream)
        stream = _Stream(spec, fd, Lines(spec.source, spec.tail_lines, former.lines.kept if former is not None else ()))
        self._writer.use(stream.path, max_size=spec.max_size, keep=spec.keep)
        self._streams[spec.key] = stream
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._readable(stream))

    def _tail(self, channel: Channel, request: wire.Tail) -> None:
        stream = self._named(request.stream)
        if stream is None:
            self._send(channel, wire.Refused(number=request.number, message=f"there is no stream {request.stream}"))
            return
        self._drain(stream)
        self._send(channel, wire.Lines(number=request.number, lines=stream.lines.tail(request.lines)))

    def _watch(self, channel: Channel, request: wire.Watch) -> None:
        stream = self._named(request.stream)
        if stream is None:
            self._send(channel, wire.Refused(number=request.number, message=f"there is no stream {request.stream}"))
            return
        serial = next(self._serials)
        try:
            pattern = re.compile(request.pattern.encode(), re.MULTILINE)
        except re.error as error:
            self._send(channel, wire.Refused(number=request.number, message=f"{request.pattern!r} is no regular expression: {error}"))
            return
        self._send(channel, wire.Done(number=request.number))
        self._watches[serial] = _Watch(channel, request.number, stream)
        stream.lines.watch(serial, pattern, lambda line: self._report(serial, line))
        if stream.ended:
            self._report(serial, None)

    def _report(self, serial: int, line: str | None) -> None:
        """Answer a watch, once."""
        watch = self._watches.get(serial)
        if watch is not None:
            self._unwatch(serial)
            self._send(watch.channel, wire.Matched(watch=watch.number, line=line))

    def _unwatch(self, serial: int) -> None:
        self._watches.pop(serial).stream.lines.unwatch(serial)

    def _hand_over(self, channel: Channel, request: wire.Takeover) -> None:
        streams = self._all()
        for start in range(0, max(len(streams), 1), MAX_FDS):
            part = streams[start : start + MAX_FDS]
            fds = [OwnedFd(os.dup(stream.fd)) for stream in part if not stream.ended]
            held = wire.Held(number=request.number, streams=[stream.figures() for stream in part], more=start + MAX_FDS < len(streams))
            self._send(channel, held, fds)


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, in place of a socket that a dead scribe left there. Mode 0600.

    Raises:
        OSError: the folder is missing or the path too long.
    """
    # Bound under another name and renamed over the old one: at no moment is there a path that refuses.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(temporary))
        listener.listen(16)
        temporary.rename(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def main(argv: list[str] | None = None) -> int:
    """Run the scribe. Returns the exit status: 0, or 1 when it cannot listen."""
    parser = argparse.ArgumentParser(prog="shadowsup-scribe")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, default=-1)
    args = parser.parse_args(argv)
    path: Path = args.socket
    try:
        listener = listen(path)
    except OSError as error:
        print(f"scribe: cannot listen at {path}: {error}", file=sys.stderr)
        return 1
    inode = path.stat().st_ino
    # A pipe for each process of the node: the soft limit (often 1024) is a default, not a decision.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    wake, signalled = socket.socketpair()
    for end in (wake, signalled):
        end.setblocking(False)
    scribe = Scribe(listener)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: scribe.stop())
    if args.ready_fd >= 0:
        os.write(args.ready_fd, b"1")
        os.close(args.ready_fd)
    try:
        scribe.run(wake)
    finally:
        signal.set_wakeup_fd(-1)
        listener.close()
        if path.exists() and path.stat().st_ino == inode:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
