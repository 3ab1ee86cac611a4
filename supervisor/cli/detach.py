"""``shadowsup start -d``: the supervisor in the background, and the process that waits until it is up.

The supervisor is a grandchild in a session of its own. It tells its steps and its failure through a pipe; that it serves is seen at the
control socket. Forked before anything that has threads is imported.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor import runtime_dir as runtime_dirs
from shadowsup.supervisor.cli.reporter import JsonLines, Report
from shadowsup.supervisor.errors import ExitCode, NoAnswer, SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.config import LoadedConfig

_LOOK_S = 0.1
"""How often the control socket is looked at."""


def start_detached(loaded: LoadedConfig, runtime_dir: Path, *, wait: bool, json_log: bool = False) -> int:
    """Start the node in the background; return 0 when it is up (``wait``: when every worker is healthy).

    Raises:
        SupervisorError: it failed to start; message, hint and exit code are what it said, or the signal that ended it.
    """
    log = _open_log(loaded.config.node.state_dir)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become_daemon(loaded, runtime_dir, writing, log, json_log)
    os.close(writing)
    os.close(log[0])
    os.waitpid(child, 0)  # the first fork has done its work when the second is made
    try:
        return _watch(reading, runtime_dir, log[1], wait=wait)
    except KeyboardInterrupt:
        click.echo(f"the node goes on in the background; shadowsup --runtime-dir {runtime_dir} stop ends it", err=True)
        raise
    finally:
        os.close(reading)


def _open_log(state_dir: Path) -> tuple[int, Path]:
    path = state_dir / "logs" / "supervisor.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), path
    except OSError as error:
        raise SupervisorError(f"cannot write {path}: {error.strerror}", "set node.state_dir to a folder of yours") from None


def _become_daemon(loaded: LoadedConfig, runtime_dir: Path, pipe: int, log: tuple[int, Path], json_log: bool) -> NoReturn:
    """The first child: a new session, a second fork, then the supervisor. Never returns."""
    os.setsid()
    if os.fork():
        os._exit(0)
    code = int(ExitCode.FAILED)
    report = Report(pipe)
    try:
        if json_log:
            report = Report(pipe, JsonLines())
        os.chdir("/")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(log[0], 1)
        os.dup2(log[0], 2)
        os.close(null)
        os.close(log[0])
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.default_int_handler)
        from shadowsup.supervisor import node_run

        code = int(node_run.run(loaded, runtime_dir, reporter=report))
    except ShadowsupError as error:
        code = int(getattr(error, "exit_code", ExitCode.FAILED))
        report.failed(error.message, error.hint, code)
        click.echo(f"shadowsup: {error}", err=True)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        report.failed(f"the supervisor failed: {type(error).__name__}: {error}", f"the full trace is in {log[1]}", code)
    finally:
        report.ended(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# --- the side that waits ----------------------------------------------------------------------------------------------------


def _watch(pipe: int, runtime_dir: Path, log: Path, *, wait: bool) -> int:
    began_s = time.monotonic()
    messages = _messages(pipe)
    shown = ""
    while True:
        for message in next(messages):
            shown = _take(message, began_s, log) or shown
        if not runtime_dirs.serving(runtime_dir):
            continue
        found = _status(runtime_dir)
        if found is None:
            continue
        node = found.get("node") or {}
        pid = node.get("pid")
        states = {str(worker.get("name")): str(worker.get("state")) for worker in found.get("workers") or []}
        up = node.get("state") != "starting"
        while up and select.select([pipe], [], [], 0)[0]:  # what it said before it was up is told before that it is up
            for message in next(messages):
                shown = _take(message, began_s, log) or shown
        if up and not wait:
            click.echo(f"started: pid {pid}, in {runtime_dir}")
            return ExitCode.DONE
        if up and states and all(state == "healthy" for state in states.values()):
            click.echo(f"healthy after {time.monotonic() - began_s:.1f} s: pid {pid}, in {runtime_dir}")
            return ExitCode.DONE
        for worker in (found.get("workers") or []) if wait else ():
            if worker.get("state") in ("down", "stopped"):
                reason = f": {worker['reason']}" if worker.get("reason") else ""
                raise SupervisorError(
                    f"worker {worker.get('name')} is {worker['state']}{reason}",
                    f"shadowsup --runtime-dir {runtime_dir} logs {worker.get('name')}; the node goes on (pid {pid})",
                )


def _take(message: dict[str, Any], began_s: float, log: Path) -> str:
    """Show a step; turn a failure into the error it is."""
    if "step" in message:
        click.echo(f"[{time.monotonic() - began_s:6.2f}] {message['step']}", err=True)
        return str(message["step"])
    if "error" in message:
        raise SupervisorError(str(message["error"]), str(message.get("hint") or f"its output is in {log}"), exit_code=int(message["code"]))
    code = message.get("exit")
    ended = f"ended with status {code}" if code is not None else "was killed"
    raise SupervisorError(
        f"the supervisor {ended} before the node was up", f"its output is in {log}", exit_code=int(code or ExitCode.FAILED)
    )


def _messages(pipe: int) -> Iterator[list[dict[str, Any]]]:
    """Yield what has come, at the latest after `_LOOK_S`. The end of the pipe without a word is the message ``{}``."""
    rest = b""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while True:
        if not poller.poll(round(_LOOK_S * 1000)):
            yield []
            continue
        data = os.read(pipe, 65536)
        *lines, rest = (rest + data).split(b"\n")
        yield [json.loads(line) for line in lines] + ([] if data else [{}])


def _status(runtime_dir: Path) -> dict[str, Any] | None:
    from shadowsup.supervisor.client import call

    try:
        found = call(runtime_dir, "status", 2.0)
    except (NoAnswer, SupervisorError):
        return None
    return found if isinstance(found, dict) else None
