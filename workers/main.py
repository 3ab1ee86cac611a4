"""An engine process: ``python -m shadowsup.workers.main SPEC.json``.

A nursery's children come in by `start` instead.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from shadowsup.wire.engine import EngineSpec
from shadowsup.workers import process
from shadowsup.workers.errors import ExitCode


def start(spec: EngineSpec) -> NoReturn:
    """Be the engine of ``spec`` until its end, then exit.

    The interpreter is not torn down: threads of torch and its like have hung there, and the kernel frees everything faster.
    """
    code = ExitCode.FAILED
    try:
        process.settle()
        process.set_name(spec.engine)
        process.log_to_stderr(force=True)
        if spec.kind == "vllm":  # vLLM's own server is its first process
            from shadowsup.workers.vllm.server import forked

            forked(spec)
        from shadowsup.workers.runtime import run

        code = run(spec)
    except BaseException:
        logging.getLogger("shadowsup.engine").exception("engine %s failed outside its life", spec.engine)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)


def read_spec(path: str) -> EngineSpec:
    """Read a spec file.

    Raises:
        OSError: it cannot be read.
        msgspec.MsgspecError: it is no spec.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=EngineSpec)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m shadowsup.workers.main SPEC.json", file=sys.stderr)
        return ExitCode.FATAL
    try:
        spec = read_spec(arguments[0])
    except (OSError, msgspec.MsgspecError) as error:
        print(f"shadowsup engine: {arguments[0]} is no engine spec: {error}", file=sys.stderr)
        return ExitCode.FATAL
    start(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
