"""``shadowsup logs``: reads the files, so it works while the supervisor is down."""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from shadowsup.supervisor.cli.complete import workers_argument
from shadowsup.supervisor.cli.filters import Grep, filter_options
from shadowsup.supervisor.cli.log_files import Follower, chosen_lines, last_lines, stamp_of
from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.cli.output import dim, output_option, source_colored, wants_color
from shadowsup.supervisor.errors import NoAnswer, NotRunning, SupervisorError
from shadowsup.supervisor.runtime_dir import read_record

POLL_S = 0.2
_LINES = 50
_ENDED_LINES = 400
"""Two ends (`ScribeClient.open` keeps 200 lines of each)."""
_MARK = re.compile(rb"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) (?P<source>\S+) \| ")
"""What the scribe puts before each line."""


@click.command()
@workers_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as it is written, until Ctrl-C.")
@click.option("--ended", is_flag=True, help="Only the last lines of engines that have ended: no flood of a later one takes them away.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Begin with the last N lines.  [default: 50; with --since: all]")
@filter_options()
@output_option
@click.pass_context
def logs(
    ctx: click.Context,
    workers: tuple[str, ...],
    follow: bool,
    ended: bool,
    lines: int | None,
    since: float | None,
    grep: Any,
    invert: bool,
    output: str,
) -> None:
    """Show the output of the engines of each WORKER, or of every part of the node, merged by time.

    Each line has its time (UTC) and its source. Works while the supervisor is down, too. With -o json each line is wrapped into an object
    of its own, as it is.
    """
    folder, names = where(locate(ctx), workers)
    paths = files(folder, workers, names, ended=ended)
    if not paths and not follow:
        of = f" of {', '.join(workers)}" if workers else ""
        raise SupervisorError(f"there is no output{of} in {folder}", "shadowsup status shows the workers")
    chosen = Grep(grep, invert)
    show: Callable[[Iterable[bytes]], None] = JsonWriter(chosen) if output == "json" else Writer(chosen)
    followers = {path: Follower(path) for path in paths}
    try:
        # The end is marked first: what is written meanwhile is shown once, by the followers.
        ends = {path: follower.seek_end() for path, follower in followers.items()}
        if since is None and grep is None:
            show(last_lines(ends, (_ENDED_LINES if ended else _LINES) if lines is None else lines))
        else:
            show(chosen_lines(ends, chosen, since, lines if lines is not None or since is not None else _LINES))
        while follow:
            for path in files(folder, workers, names, ended=ended):
                followers.setdefault(path, Follower(path))
            written = [line for follower in followers.values() for line in follower.read()]
            show(sorted(written, key=stamp_of) if len(followers) > 1 else written)
            if not written:
                time.sleep(POLL_S)
    finally:
        for follower in followers.values():
            follower.close()


def where(runtime_dir: Path, workers: Sequence[str]) -> tuple[Path, frozenset[str]]:
    """Return the folder of the logs, and the names of files that the supervisor says are those of the workers (all parts without one).

    Raises:
        SupervisorError: no such worker, or nothing tells where the logs are.
    """
    from shadowsup.supervisor.client import call

    named: Sequence[str | None] = workers or [None]
    try:
        paths = [Path(path) for worker in named for path in call(runtime_dir, "logs", worker=worker).get("paths") or []]
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


def files(folder: Path, workers: Sequence[str], names: frozenset[str], *, ended: bool = False) -> list[Path]:
    """Return the current (not rotated) log files of workers: ``NAME.log`` and those of their engines, ``NAME.K.log``; all without one.

    ``ended``: those with the last lines of engines that have ended, ``NAME.ended``.
    """
    own = re.compile("|".join(rf"{re.escape(worker)}(\.\d+)?" for worker in workers))
    with contextlib.suppress(OSError):
        there = sorted(path for path in folder.iterdir() if path.suffix == (".ended" if ended else ".log"))
        return [path for path in there if not workers or path.with_suffix(".log").name in names or own.fullmatch(path.stem)]
    return []


class Writer:
    """Writes lines to stdout as they are; on a terminal time and source are set apart by colour, and the sources line up."""

    def __init__(self, chosen: Grep) -> None:
        self._chosen = chosen
        self._color = wants_color()
        self._width = 0

    def __call__(self, lines: Iterable[bytes]) -> None:
        stream = sys.stdout.buffer
        for line in lines:
            if self._chosen(line.rstrip(b"\n")):
                stream.write(self._colored(line) if self._color else line)
        stream.flush()

    def _colored(self, line: bytes) -> bytes:
        match = _MARK.match(line)
        if match is None:
            return line
        source = match["source"].decode(errors="replace")
        self._width = min(max(self._width, len(source)), 16)
        return f"{dim(match['time'].decode())} {source_colored(f'{source:<{self._width}}', source)} ".encode() + line[match.end() :]


class JsonWriter:
    """Writes each line as a JSON object in the form of an event. What an engine printed is its message; nothing in it is looked at."""

    def __init__(self, chosen: Grep) -> None:
        self._chosen = chosen

    def __call__(self, lines: Iterable[bytes]) -> None:
        from shadowsup.supervisor.cli.reporter import line_of

        for line in lines:
            text = line.rstrip(b"\n")
            if not self._chosen(text):
                continue
            match = _MARK.match(text)
            if match is None:
                click.echo(line_of("output", text.decode(errors="replace"), ts=0.0))
                continue
            source = match["source"].decode(errors="replace")
            worker, dot, number = source.rpartition(".")
            of_engine = bool(dot) and number.isdigit()
            more = {"worker": worker, "engine": source} if of_engine else {}
            seconds = datetime.datetime.fromisoformat(match["time"].decode()).timestamp()
            message = text[match.end() :].decode(errors="replace")
            click.echo(line_of("output", message, ts=seconds, source=source, **more))
        sys.stdout.flush()
