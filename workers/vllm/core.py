"""Seam: the EngineCore process (0.26, 0.32): `EngineCoreProc.run_engine_core`, its busy loop, and what comes into its input queue.

`install` runs in the API server, before it forks EngineCore. vLLM starts EngineCore by naming ``EngineCoreProc.run_engine_core``, so that
what stands there is run; as a function of a module of ours it reaches a spawned child too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shadowsup.workers import process
from shadowsup.workers.leaving import Leave
from shadowsup.workers.vllm import current
from shadowsup.workers.vllm.life import EngineLife, Errand

log = logging.getLogger("shadowsup.engine")

_original: dict[str, Callable[..., Any]] = {}


def install() -> None:
    """Put ours in vLLM's place. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    if _original:
        return
    _original["run"] = EngineCoreProc.run_engine_core
    _original["loop"] = EngineCoreProc.run_busy_loop
    _original["handle"] = EngineCoreProc._handle_client_request
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
    EngineCoreProc.run_busy_loop = _run_busy_loop
    EngineCoreProc._handle_client_request = _handle_client_request


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Be an EngineCore under our care. Does not return: however it ends, the process does."""
    from shadowsup.workers.vllm import plugin, server

    process.log_apart()
    plugin.register()  # a spawned child comes here first
    life = EngineLife(server.take_lifeline(current.read_spec()))
    current.begin(life)
    try:
        life.start()
        log.info("EngineCore is starting")
        _original["run"](*args, **kwargs)
    except BaseException as error:
        life.leave(Leave() if isinstance(error, SystemExit) and not error.code else error)
    life.leave(Leave())


def _run_busy_loop(core: Any) -> None:
    """Runs in vLLM's place. What ends it ends the process at once: the API server is told by the supervisor, which ends the whole tree."""
    from vllm.v1.engine import EngineCoreRequestType

    from shadowsup.workers.vllm.scheduler import served

    process.log_apart()
    life = current.life()
    _name_blocks(core)
    life.attend(served(core.scheduler), lambda errand: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, errand)))
    try:
        _original["loop"](core)
    except SystemExit as end:
        life.leave(end if end.code else Leave())
    except BaseException as error:
        life.leave(error)
    life.leave(Leave())


def _handle_client_request(core: Any, request_type: Any, request: Any) -> None:
    if isinstance(request, Errand):
        try:
            request.run()
        except BaseException as error:
            current.life().leave(error)
        return
    _original["handle"](core, request_type, request)


def _name_blocks(core: Any) -> None:
    """Have blocks named by hashes that fit a ledger entry."""
    import cbor2
    from vllm.v1.core import kv_cache_utils

    from shadowsup.workers.vllm.hashing import BlockHasher

    hasher = BlockHasher(lambda: kv_cache_utils.NONE_HASH, lambda content: cbor2.dumps(content, canonical=True))
    scheduler = core.scheduler
    scheduler.hasher = hasher
    size = int(scheduler.hash_block_size)
    by_block = kv_cache_utils.get_request_block_hasher(size, hasher)

    def hashes(request: Any) -> list[bytes]:
        found = hasher.of_request(request, size)
        return found if found is not None else by_block(request)

    core.request_block_hasher = hashes
