"""What an engine that cannot go on says of it: class of the error, message, and, for want of memory, what that was for."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from shadowsup.errors import ShadowsupError
from shadowsup.wire.engine import Failed
from shadowsup.wire.faults import Fault, fault_of
from shadowsup.workers.errors import ExitCode, exit_code

log = logging.getLogger("shadowsup.engine")


def failed(engine: str, stage: str, error: BaseException, adapter: object) -> Failed:
    """Return the report of ``error``, and log it. ``adapter``: is asked for its ``account``, if it has one."""
    if isinstance(error, ShadowsupError):
        message, hint = error.message, error.hint
        log.error("cannot go on (%s): %s", stage, error)
    else:
        message, hint = f"{type(error).__name__}: {error}", "the engine's log has the traceback"
        log.error("cannot go on (%s): %s", stage, message, exc_info=error)
    code = exit_code(error)
    fault = Fault.LEDGER_LOST if code is ExitCode.LEDGER_LOST else fault_of(error)
    evidence: dict[str, object] = {"error": f"{type(error).__module__}.{type(error).__name__}"}
    if fault in (Fault.CUDA_OOM, Fault.HOST_OOM):
        evidence |= _account(adapter)
    return Failed(
        engine=engine, stage=stage, message=message, hint=hint, fatal=code is ExitCode.FATAL, fault=fault.value, evidence=evidence
    )


def _account(adapter: object) -> dict[str, object]:
    account = getattr(adapter, "account", None)
    try:
        found: dict[str, object] = account() if account is not None else {}
    except Exception as error:  # it is in trouble: what it cannot tell any more is left out
        log.warning("the engine cannot tell what its memory is for: %s", error)
        found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["process_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found
