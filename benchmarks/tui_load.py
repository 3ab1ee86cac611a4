"""What the dashboard costs, and how soon it answers a key, before a node of 64 engines and 8 GPUs: ``python benchmarks/tui_load.py``.

The node is a fake in a process of its own that speaks the real control protocol (`tests/tui/tui_node.py`); its figures change with every
look. The dashboard is the real program in a pseudo-terminal of 200 × 60. Measured are

* its processor time over a span at the usual two looks a second, on the overview, on the worker view and on the log screen, in percent of
  one core; the threads that ask the node and read the logs are in it;
* the time from the write of a key into the terminal to the first byte that the screen answers, taken between two looks so that it is the
  key that is answered;
* its memory with 100,000 log lines held, and how long a filter over them takes until the screen shows it.

Prints JSON; ``--out FILE`` also writes it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import psutil

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.machine import cpu_s

ROOT = Path(__file__).parents[1]
NODE = ROOT / "tests" / "tui" / "tui_node.py"
SIZE = (60, 200)
LINES = 100_000
QUIET_S = 0.08
"""No output for this long: the last look has been drawn."""


class Terminal:
    """A dashboard in a pseudo-terminal."""

    def __init__(self, runtime_dir: Path) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        command = [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(runtime_dir), "tui", "--write"]
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self._child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        os.close(theirs)
        self.process = psutil.Process(self._child.pid)
        self.seen = b""
        self.bytes = 0

    def read(self, timeout_s: float) -> bytes:
        """Return what comes within ``timeout_s``, at once when something does; empty when nothing does."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return b""
        data = os.read(self._fd, 1 << 16)
        self.bytes += len(data)
        self.seen = (self.seen + data)[-(1 << 20) :]
        return data

    def until(self, text: str, timeout_s: float = 30.0) -> float:
        """Wait for a text, and return how long that took (seconds). What was drawn before does not count."""
        self.seen = b""
        began_s = time.monotonic()
        while text.encode() not in self.seen:
            if time.monotonic() - began_s > timeout_s:
                raise SystemExit(f"the dashboard did not show {text!r}: {self.seen[-2000:]!r}")
            self.read(0.5)
        return time.monotonic() - began_s

    def drain(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.read(left_s)

    def settle(self) -> None:
        """Wait for the end of a look: some output, then none."""
        while not self.read(1.0):
            pass
        while self.read(QUIET_S):
            pass

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def answered_s(self, key: str) -> float:
        """Press a key between two looks; return when the first byte of the answer came (seconds)."""
        self.settle()
        began_s = time.monotonic()
        self.press(key)
        while not self.read(5.0):
            raise SystemExit(f"no answer to {key!r}")
        return time.monotonic() - began_s

    def busy(self, seconds: float) -> float:
        """Return the processor time of the program over ``seconds``, as a share of one core."""
        before_s, began_s = cpu_s(self.process.pid), time.monotonic()
        self.drain(seconds)
        return (cpu_s(self.process.pid) - before_s) / (time.monotonic() - began_s)

    def close(self) -> None:
        self._child.send_signal(signal.SIGKILL)  # killing it harms nothing
        self._child.wait()
        os.close(self._fd)


def measure(*, engines: int = 64, gpus: int = 8, seconds: float = 20.0, keys: int = 40, lines: int = LINES) -> dict[str, Any]:
    """Run everything; return the figures: shares of a core, seconds, bytes."""
    with tempfile.TemporaryDirectory(prefix="tui-load-") as name:
        folder = Path(name) / "node"
        node = subprocess.Popen([sys.executable, str(NODE), str(folder), str(engines), str(gpus)], stdout=subprocess.PIPE)
        assert node.stdout is not None
        try:
            node.stdout.readline()
            terminal = Terminal(folder)
            try:
                return _measured(terminal, folder, seconds, keys, lines) | {"engines": engines, "gpus": gpus, "looks_per_s": 2}
            finally:
                terminal.close()
        finally:
            node.kill()
            node.wait()
            node.stdout.close()


def _measured(terminal: Terminal, folder: Path, seconds: float, keys: int, lines: int) -> dict[str, Any]:
    rest_s = min(2.0, seconds)  # after each change of the screen, before it is measured
    found: dict[str, Any] = {"first_screen_s": round(terminal.until("model-00"), 3)}
    terminal.drain(rest_s + 1.0)
    drawn = terminal.bytes
    found["overview_core_share"] = round(terminal.busy(seconds), 4)
    found["overview_bytes_per_s"] = round((terminal.bytes - drawn) / seconds)
    answers = [terminal.answered_s("\x1b[B" if n % 2 == 0 else "\x1b[A") for n in range(keys)]
    found["key_to_screen_s"] = _spread(answers)
    terminal.press("2")
    terminal.drain(rest_s)
    found["worker_core_share"] = round(terminal.busy(seconds), 4)
    found["switch_s"] = _spread([terminal.answered_s(key) for key in "1212"])
    terminal.press("3")
    terminal.drain(rest_s)
    rss = terminal.process.memory_info().rss
    _write(folder, lines)
    terminal.until(f"{lines:,} of {lines:,} lines", 60.0)
    terminal.drain(rest_s)
    found |= {"log_lines": lines, "log_bytes_per_line": round((terminal.process.memory_info().rss - rss) / lines)}
    found["rss"] = terminal.process.memory_info().rss
    found["logs_core_share"] = round(terminal.busy(seconds / 2), 4)
    terminal.press("\x1b[5~")
    terminal.drain(rest_s / 2)
    found["log_scroll_s"] = _spread([terminal.answered_s(key) for key in ("\x1b[5~", "\x1b[6~") * (keys // 4)])
    terminal.press("/")
    terminal.drain(rest_s / 2)
    terminal.press("7777")
    terminal.drain(rest_s / 2)
    terminal.press("\r")
    found["filter_s"] = round(terminal.until("/7777/"), 3)
    return found


def _write(folder: Path, lines: int) -> None:
    with (folder / "logs" / "chat.log").open("a") as file:
        for n in range(lines):
            stamp = f"2023-11-14T22:{n // 60_000:02}:{n // 1000 % 60:02}.{n % 1000:03}Z"
            file.write(
                f"{stamp} model-{n % 32:02}.1 | INFO request {n}: 128 prompt tokens, 64 output tokens, prefix hit 96 of 128, 412 ms\n"
            )


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p95": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))], 4),
        "max": round(ordered[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each span")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    before = machine.load()
    text = json.dumps(machine.document("tui_load", before, measure(seconds=arguments.seconds)), indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
