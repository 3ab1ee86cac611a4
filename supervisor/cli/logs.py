"""``shadowsup logs``: reads the files, so it works while the supervisor is down."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import sys
import time
from pathlib import Path
from typing import IO

import click

from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.errors import NoAnswer, NotRunning, SupervisorError
from shadowsup.supervisor.runtime_dir import read_record

POLL_S = 0.2
_CHUNK = 64 * 1024
_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


@click.command()
@click.argument("worker", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as it is written, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Begin with the last N lines.")
@click.pass_context
def logs(ctx: click.Context, worker: str | None, follow: bool, lines: int) -> None:
    """Show the output of the engines of WORKER, or of every part of the node. Works while the supervisor is down, too."""
    folder, names = where(locate(ctx), worker)
    paths = files(folder, worker, names)
    if not paths and not follow:
        raise SupervisorError(f"there is no output{f' of {worker}' if worker else ''} in {folder}", "shadowsup status shows the workers")
    followers = {path: Follower(path) for path in paths}
    try:
        # The end is marked first: what is written meanwhile is shown once, by the followers.
        ends = {path: follower.seek_end() for path, follower in followers.items()}
        _write(last_lines(ends, lines))
        while follow:
            for path in files(folder, worker, names):
                followers.setdefault(path, Follower(path))
            written = [line for follower in followers.values() for line in follower.read()]
            _write(sorted(written, key=_stamp) if len(followers) > 1 else written)
            if not written:
                time.sleep(POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def where(runtime_dir: Path, worker: str | None) -> tuple[Path, frozenset[str]]:
    """Return the folder of the logs, and the names of files that the supervisor says are the worker's.

    Raises:
        SupervisorError: no such worker, or nothing tells where the logs are.
    """
    from shadowsup.supervisor.client import call

    try:
        result = call(runtime_dir, "logs", worker=worker)
        paths = [Path(path) for path in result.get("paths") or []]
        if paths:
            return paths[0].parent, frozenset(path.name for path in paths)
    except (NotRunning, NoAnswer):
        pass
    record = read_record(runtime_dir)
    if record.get("logs_dir"):
        return Path(record["logs_dir"]), frozenset()
    if record.get("state_dir"):
        return Path(record["state_dir"]) / "logs", frozenset()
    raise NotRunning(
        f"no supervisor is running in {runtime_dir}, and nothing there tells where its logs are", "they are in node.state_dir of its config"
    )


def files(folder: Path, worker: str | None, names: frozenset[str]) -> list[Path]:
    """Return the current (not rotated) log files of a worker: ``NAME.log`` and those of its engines, ``NAME.K.log``; all without one."""
    with contextlib.suppress(OSError):
        return sorted(
            path
            for path in folder.iterdir()
            if path.suffix == ".log"
            and (worker is None or path.name in names or path.stem == worker or re.fullmatch(rf"{re.escape(worker)}\.\d+", path.stem))
        )
    return []


class Follower:
    """Reads what is appended to a file, over rotation and removal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def seek_end(self) -> int:
        """Go to the end and return it (bytes)."""
        self._open()
        return self._file.seek(0, os.SEEK_END) if self._file is not None else 0

    def read(self) -> list[bytes]:
        """Return the whole lines that are new. A file that took the place of this one is read from its start, after the rest of this."""
        if self._file is None and not self._open():
            return []
        lines: list[bytes] = []
        while self._file is not None:
            lines += self._lines(self._file)
            if not self._replaced(self._file):
                break
            lines += self._lines(self._file)  # what was written between the read and the rotation
            if self._rest:
                lines.append(self._rest + b"\n")
                self._rest = b""
            self.close()
            self._open()
        return lines

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        with contextlib.suppress(OSError):
            self._file = self._path.open("rb")
            return True
        return False

    def _replaced(self, file: IO[bytes]) -> bool:
        there = os.fstat(file.fileno())
        try:
            now = self._path.stat()
        except OSError:
            return False  # between the two renames of a rotation, or removed: the next look tells
        if (there.st_dev, there.st_ino) != (now.st_dev, now.st_ino):
            return True
        if now.st_size < file.tell():
            file.seek(0)  # truncated
        return False

    def _lines(self, file: IO[bytes]) -> list[bytes]:
        data = self._rest + file.read()
        *whole, self._rest = data.split(b"\n")
        return [line + b"\n" for line in whole]


def last_lines(ends: dict[Path, int], count: int) -> list[bytes]:
    """Return the last ``count`` lines of all files together, by their time stamps; ``ends``: how far each file is read (bytes)."""
    if count == 0:
        return []
    tails = []
    for path, end in ends.items():
        lines = _tail(path, end, count)
        number = 1
        while len(lines) < count:
            older = path.with_name(f"{path.name}.{number}")
            try:
                lines = _tail(older, older.stat().st_size, count - len(lines)) + lines
            except OSError:
                break
            number += 1
        tails.append(lines)
    merged = list(heapq.merge(*tails, key=_stamp))
    return merged[-count:]


def _tail(path: Path, end: int, count: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data, start = b"", end
            while start > 0 and data.count(b"\n") <= count:
                step = min(_CHUNK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except OSError:
        return []
    lines = data.splitlines(keepends=True)
    if start > 0:
        lines = lines[1:]
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    return lines[-count:]


def _stamp(line: bytes) -> bytes:
    """Return the time a line begins with, to sort by; a line without one sorts first, which keeps it next to its neighbours."""
    return line[:24] if _STAMP.match(line) else b""


def _write(lines: list[bytes]) -> None:
    stream = sys.stdout.buffer
    for line in lines:
        stream.write(line)
    stream.flush()
