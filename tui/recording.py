"""An incident, kept: what a dashboard was told, as compressed JSON lines, and a feed that plays them again.

The first line says what the file is. Every other one is ``{"ts": …, "kind": …, …}``: ``look`` (an observation), ``missed``, ``lines`` (of
logs), ``answer`` (of a reading verb). A file that was cut off, because its writer was killed, is played as far as it goes.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import msgspec

from shadowsup.errors import ShadowsupError
from shadowsup.tui.errors import TuiError
from shadowsup.tui.feed import ANSWER_S, Feed, Missed, Told
from shadowsup.tui.story import Observation

FORM = 1
ANSWERS = ("blocks", "inspect")
"""Verbs that are asked for each worker while it is recorded; `memory` and others are kept when somebody asks."""
ANSWERS_EVERY_S = 10.0
FLUSH_S = 1.0
HISTORY_S = 900.0
"""How much of what was before is played at once after a jump: as far back as histories go."""
NO_TIME = float("-inf")
SPEEDS = (1.0, 4.0, 16.0, 64.0)


class Recorder:
    """A feed that writes down what another one tells. The file is for its owner alone: logs are in it.

    Raises:
        TuiError: the file is there already, or cannot be written.
    """

    live = True

    def __init__(self, feed: Feed, path: Path) -> None:
        self.name = feed.name
        self._feed = feed
        self._lock = threading.Lock()
        self._flushed_s = 0.0
        self._asked_s = float("-inf")
        self._told_of: set[tuple[str, object]] = set()
        self._failed = ""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise TuiError(f"{path} is there already", "record into another file") from None
        except OSError as error:
            raise TuiError(f"cannot write {path}: {error.strerror}") from None
        self._raw = os.fdopen(fd, "wb")
        self._file: gzip.GzipFile | None = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=6)
        self._put({"shadowsup_recording": FORM, "name": feed.name, "ts": time.time()})

    def start(self, told: Told, missed: Missed) -> None:
        def look(observation: Observation) -> None:
            self._put({"kind": "look", "ts": observation.ts, **_as_json(observation)})
            self._ask_all(observation)
            told(observation)

        def miss(message: str, hint: str) -> None:
            self._put({"kind": "missed", "ts": time.time(), "message": message, "hint": hint})
            missed(message, hint)

        self._feed.start(look, miss)

    def ask(self, verb: str, timeout_s: float = ANSWER_S, /, **args: Any) -> Any:
        result = self._feed.ask(verb, timeout_s, **args)
        self._put({"kind": "answer", "ts": time.time(), "verb": verb, "args": args, "result": result})
        return result

    def log_lines(self) -> Sequence[bytes]:
        lines = self._feed.log_lines()
        if lines:
            self._put({"kind": "lines", "ts": time.time(), "lines": [line.decode(errors="replace") for line in lines]})
        return lines

    def close(self) -> None:
        self._feed.close()
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                self._raw.close()
                self._file = None

    def _ask_all(self, observation: Observation) -> None:
        """On the feed's thread: what the worker view would ask."""
        now_s = time.monotonic()
        if now_s - self._asked_s < ANSWERS_EVERY_S and not observation.recoveries:
            return
        self._asked_s = now_s
        if observation.fresh:
            self._told_of.clear()
        for worker in observation.status.get("workers") or []:
            # How engines are started changes with a reload, which also changes the worker's revision.
            known = (worker["name"], worker.get("revision"))
            for verb in ("blocks",) if known in self._told_of else ANSWERS:
                with contextlib.suppress(ShadowsupError):
                    self.ask(verb, worker=worker["name"])
            self._told_of.add(known)

    def _put(self, record: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None or self._failed:
                return
            try:
                self._file.write(msgspec.json.encode(record) + b"\n")
                if time.monotonic() - self._flushed_s >= FLUSH_S:
                    self._flushed_s = time.monotonic()
                    self._file.flush(zlib.Z_SYNC_FLUSH)  # a dashboard that is killed leaves all but the last second
                    self._raw.flush()
            except OSError as error:
                # A full disk ends the recording, not the dashboard.
                self._failed = error.strerror or "unknown"

    @property
    def note(self) -> str:
        return f"recording failed: {self._failed}" if self._failed else "recording"


def _as_json(observation: Observation) -> dict[str, Any]:
    return {
        "status": observation.status,
        "events": list(observation.events),
        "recoveries": list(observation.recoveries),
        "fresh": observation.fresh,
    }


class Replay:
    """A feed out of a recording. `pause`, `seek` and `faster` may be called from any thread.

    Raises:
        TuiError: it is no recording.
    """

    live = False

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._records = list(_read(path))
        # Records come from several threads, and a clock may be set back: what was written later is not earlier.
        began = next(ts for ts, _ in self._records if ts > NO_TIME)
        self._stamps = list(accumulate((max(ts, began) for ts, _ in self._records), max))
        self._least = 1 + next(number for number, (_, raw) in enumerate(self._records) if b'"kind":"look"' in raw[:24])
        self._next = 0
        self._logged = 0
        self._at = self._stamps[0]
        self._speed = SPEEDS[0]
        self._last_s: float | None = None
        self._paused = False
        self._jumped = True
        self._wake = threading.Event()
        self._stop = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # --- a feed -----------------------------------------------------------------------------------------------------------------

    def start(self, told: Told, missed: Missed) -> None:
        self._thread = threading.Thread(target=self._run, args=(told, missed), name="replay", daemon=True)
        self._thread.start()

    def ask(self, verb: str, timeout_s: float = ANSWER_S, /, **args: Any) -> Any:
        wanted = {name: value for name, value in args.items() if name != "cells"}
        with self._lock:
            end = self._next
        for _, raw in reversed(self._records[:end]):
            if b'"kind":"answer"' not in raw[:24]:
                continue
            record = msgspec.json.decode(raw)
            if record["verb"] == verb and {k: v for k, v in record["args"].items() if k != "cells"} == wanted:
                return record["result"]
        raise TuiError(f"{verb} is not in the recording up to here", "what is asked for now and then comes a little later")

    def log_lines(self) -> Sequence[bytes]:
        with self._lock:
            begin, end = self._logged, self._next
            self._logged = end
        return [
            line.encode()
            for _, raw in self._records[begin:end]
            if b'"kind":"lines"' in raw[:24]
            for line in msgspec.json.decode(raw)["lines"]
        ]

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None

    # --- the controls -----------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stand still, or go on."""
        self._paused = not self._paused
        self._wake.set()

    def faster(self) -> None:
        """The next speed, the first after the last."""
        self._speed = SPEEDS[(SPEEDS.index(self._speed) + 1) % len(SPEEDS)]
        self._wake.set()

    def seek(self, seconds: float) -> None:
        """Go forward, or back, by ``seconds``."""
        with self._lock:
            self._at = max(self._stamps[0], min(self._stamps[-1], self._at + seconds))
            self._go_to(self._at)
            self._jumped = True
        self._wake.set()

    def logs_again(self) -> None:
        """Logs were cleared after a jump: `log_lines` begins anew."""
        with self._lock:
            self._logged = 0

    def _go_to(self, at: float) -> int:
        """Take ``at`` for what was played last, under the lock; nothing of the logs is new before somebody has cleared them."""
        self._next = self._logged = max(self._least, bisect_right(self._stamps, at))
        return self._next

    @property
    def note(self) -> str:
        with self._lock:
            at, ended = self._at, self._next >= len(self._records)
        state = "ended" if ended else "paused" if self._paused else f"{self._speed:g}×"
        done = (at - self._stamps[0]) / max(1e-9, self._stamps[-1] - self._stamps[0])
        return f"replay {time.strftime('%F %T', time.localtime(at))} {state} {done:.0%}"

    def _run(self, told: Told, missed: Missed) -> None:
        while not self._stop:
            self._wake.clear()
            self._step(time.monotonic(), told, missed)
            self._wake.wait(0.1)

    def _step(self, now_s: float, told: Told, missed: Missed) -> None:
        """Play what has come due since the last step, or jump. ``now_s``: monotonic."""
        with self._lock:
            jumped, self._jumped = self._jumped, False
            if not self._paused and not jumped and self._last_s is not None:
                self._at = min(self._stamps[-1], self._at + (now_s - self._last_s) * self._speed)
            at, self._last_s = self._at, now_s
        if jumped:
            self._jump(at, told)
        else:
            self._play(at, told, missed)

    def _play(self, at: float, told: Told, missed: Missed) -> None:
        while True:
            with self._lock:
                # A jump that came meanwhile has moved on: what was about to be played is of the moment before.
                if self._jumped or self._next >= len(self._records) or self._stamps[self._next] > at:
                    return
                raw = self._records[self._next][1]
                self._next += 1
            record = msgspec.json.decode(raw)
            if record["kind"] == "look":
                told(_observation(record))
            elif record["kind"] == "missed":
                missed(record["message"], record["hint"])

    def _jump(self, at: float, told: Told) -> None:
        """Bring a story that is empty again to ``at``: all events and recoveries, and the looks as far back as histories go."""
        # First of all: who draws the position when the first look comes, and nothing comes after it, must see the new one.
        with self._lock:
            end = self._go_to(at)
        begin = bisect_right(self._stamps, at - HISTORY_S)
        events: list[dict[str, Any]] = []
        recoveries: list[dict[str, Any]] = []
        first = True
        for number in range(end):
            raw = self._records[number][1]
            if b'"kind":"look"' not in raw[:24]:
                continue
            if number < begin and b'"events":[]' in raw and b'"fresh":false' in raw:
                continue
            record = msgspec.json.decode(raw)
            if record["fresh"]:
                events, recoveries = [], []
            if number < begin:
                events += record["events"]
                recoveries += record["recoveries"]
                continue
            found = _observation(record)
            if first:
                more = {"events": (*events, *found.events), "recoveries": (*recoveries, *found.recoveries)}
                found = Observation(found.status, more["events"], more["recoveries"], fresh=True, ts=found.ts, rewound=True)
                first = False
            told(found)


def _observation(record: dict[str, Any]) -> Observation:
    return Observation(record["status"], tuple(record["events"]), tuple(record["recoveries"]), fresh=record["fresh"], ts=record["ts"])


def _read(path: Path) -> Iterator[tuple[float, bytes]]:
    """Yield (ts, line), and at least one look. Lines of logs and answers have no time: they belong to the look before."""
    looks = 0
    try:
        with gzip.open(path, "rb") as file:
            head = msgspec.json.decode(next(_lines(file), b"null"))
            if not isinstance(head, dict) or head.get("shadowsup_recording") != FORM:
                raise TuiError(f"{path} is no recording of this version", "make one with shadowsup tui --record FILE")
            for line in _lines(file):
                record = msgspec.json.decode(line, type=_Stamp)
                looks += record.kind == "look"
                yield record.ts if record.kind in ("look", "missed") else NO_TIME, line
    except OSError as error:
        raise TuiError(f"cannot play {path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, zlib.error) as error:
        raise TuiError(f"{path} is no recording: {error}", "make one with shadowsup tui --record FILE") from None
    if not looks:
        raise TuiError(f"there is nothing in {path} yet")


class _Stamp(msgspec.Struct):
    kind: str
    ts: float


def _lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """Yield whole lines; the end of a file that was cut off is its end."""
    with contextlib.suppress(EOFError):
        for line in file:
            if line.endswith(b"\n"):
                yield line.rstrip(b"\n")
