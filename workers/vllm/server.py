"""The first process of a vLLM engine: ``python -m shadowsup.workers.vllm.server ARGUMENTS``, where `SPEC_VARIABLE` names the spec.

It is vLLM's own OpenAI server, run as ``python -m vllm.entrypoints.openai.api_server ARGUMENTS`` would run it, with the seams in place. A
nursery's child comes in by `serve`.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from shadowsup.wire.engine import SPEC_VARIABLE, EngineSpec
from shadowsup.workers import process, tether
from shadowsup.workers.errors import ExitCode, WorkerError
from shadowsup.workers.vllm import arguments, current, front, plugin, versions

log = logging.getLogger("shadowsup.engine")

RPC_FOLDER = "VLLM_RPC_BASE_PATH"
"""Where vLLM makes the sockets between API server and EngineCore (0.26, 0.32)."""
UUID_CHARS = 36
"""Of such a socket's name."""
MAX_SOCKET_PATH = 107
"""Bytes (unix(7))."""

_lifeline = -1
"""This process's end, before EngineCore takes it."""


def serve(spec: EngineSpec, argv: Sequence[str]) -> NoReturn:
    """Be the API server of the engine ``spec`` until its end, then exit."""
    global _lifeline
    process.settle()
    process.set_name(spec.engine)
    process.log_to_stderr(force=True)
    process.log_apart()
    _lifeline = spec.lifeline_fd
    tether.hold(spec.front_tether)
    os.environ.update(arguments.ENVIRONMENT)
    _keep_together(spec)
    begun = front.Front(spec, _close_lifeline)
    front.begin(begun)
    code: int = ExitCode.FAILED
    try:
        log.info("starting vLLM %s", versions.require())
        plugin.register()
        sys.argv = [arguments.PLAIN_SERVER, *argv]
        runpy.run_module(arguments.PLAIN_SERVER, run_name="__main__", alter_sys=True)
        code = ExitCode.STOPPED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else ExitCode.STOPPED if end.code is None else ExitCode.FAILED
        if code == ExitCode.FATAL:
            begun.failed("vLLM does not take its arguments", "the engine's log says which", fatal=True)
    except WorkerError as error:
        code = ExitCode.FATAL if error.fatal else ExitCode.FAILED
        log.error("%s", error)
        begun.failed(error.message, error.hint, fatal=error.fatal)
    except BaseException as error:
        log.exception("the API server of %s has ended", spec.engine)
        begun.failed(f"{type(error).__name__}: {error}", "the engine's log has the traceback", fatal=False)
    finally:
        begun.rest()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _keep_together(spec: EngineSpec) -> None:
    """Have vLLM make its sockets where the supervisor removes them: those in /tmp would stay there after each kill."""
    if RPC_FOLDER in os.environ:
        return
    folder = current.files(spec)
    if len(os.fsencode(folder)) + 1 + UUID_CHARS > MAX_SOCKET_PATH:
        log.warning("%s is too long a path for vLLM's sockets: they are made in the temporary folder, and stay there after a kill", folder)
        return
    os.environ[RPC_FOLDER] = str(folder)


def forked(spec: EngineSpec) -> NoReturn:
    """Be the API server of ``spec`` in a nursery's child, which was given no file: EngineCore, and what it starts, read one."""
    path = Path(spec.runtime_dir) / "engines" / f"{spec.engine}.json"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(spec))
    os.environ[SPEC_VARIABLE] = str(path)
    serve(spec, arguments.of_spec(spec))


def take_lifeline(spec: EngineSpec) -> EngineSpec:
    """EngineCore: take over the lifeline that the fork has copied."""
    return msgspec.structs.replace(spec, lifeline_fd=_lifeline)


def _close_lifeline() -> None:
    global _lifeline
    if _lifeline >= 0:
        fd, _lifeline = _lifeline, -1
        os.close(fd)


def main(argv: Sequence[str]) -> int:
    try:
        spec = current.read_spec()
    except WorkerError as error:
        print(f"shadowsup engine: {error}", file=sys.stderr)
        return ExitCode.FATAL
    serve(spec, argv)


if __name__ == "__main__":
    # Under its own name: what is pickled by reference, and what holds the lifeline, must be one module.
    from shadowsup.workers.vllm.server import main as run

    sys.exit(run(sys.argv[1:]))
