"""Seam: the API server's side of EngineCore's start (0.26, 0.32): `CoreEngineProcManager.__init__`, which forks it.

Until the fork the API server beats for the engine; from then on EngineCore does, which also is the one whose lifeline counts: it is who
writes the memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from shadowsup.wire.engine import EngineSpec, EngineState, Failed, Phase
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.heartbeat import Heart, Vitals
from shadowsup.workers.vllm import turns
from shadowsup.workers.vllm.arguments import ENVIRONMENT

log = logging.getLogger("shadowsup.engine")

_original: dict[str, Callable[..., Any]] = {}
_front: Front | None = None


class Front:
    """What the API server does for the engine before there is an EngineCore.

    Args:
        close_lifeline: closes this process's copy of it.
    """

    def __init__(self, spec: EngineSpec, close_lifeline: Callable[[], None]) -> None:
        self._spec = spec
        self._close_lifeline = close_lifeline
        self._turns = turns.share()
        self._heart: Heart | None = Heart(
            engine=spec.engine,
            endpoint=spec.beat_endpoint,
            interval_s=spec.heartbeat_s,
            vitals=Vitals(state=EngineState.LOADING, phase=Phase.LOADING, detail="starting vLLM"),
            on_order=lambda order: None,  # it cannot be interrupted; a signal follows
            log=log.warning,
        )
        self._heart.start()

    def failed(self, message: str, hint: str, *, fatal: bool) -> None:
        """Tell the supervisor why there will be no EngineCore."""
        if self._heart is not None:
            self._heart.report(Failed(engine=self._spec.engine, stage="load", message=message, hint=hint, fatal=fatal))

    def rest(self) -> None:
        """Stop beating: no thread of ours may run while EngineCore is forked. Idempotent."""
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.stop()

    def forked(self) -> None:
        """EngineCore has the lifeline; its end must be seen. From now on EngineCore's beats tell whether this process's loop turns."""
        self._close_lifeline()
        try:
            self._turns.begin(asyncio.get_running_loop())
        except RuntimeError:
            log.warning("vLLM does not start its EngineCore from its event loop: whether that turns is not watched")


def begin(front: Front) -> None:
    """Make ``front`` that of this process."""
    global _front
    _front = front


def install() -> None:
    """Put ours in vLLM's place. Idempotent."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    if _original:
        return
    _original["init"] = CoreEngineProcManager.__init__
    CoreEngineProcManager.__init__ = _start_core


def insist_on_fork() -> None:
    """EngineCore and its ranks inherit the lifeline, and what has been imported (a CPU build sets ``spawn`` whatever the environment says).

    Raises:
        WorkerError: (fatal) vLLM would spawn them all the same.
    """
    from vllm.utils.system_utils import get_mp_context

    os.environ.update(ENVIRONMENT)
    method = get_mp_context().get_start_method()
    if method != "fork":
        raise WorkerError(f"vLLM starts its processes by {method}, not by fork", "the engine's log says why", fatal=True)


def _start_core(manager: Any, *args: Any, **kwargs: Any) -> None:
    front = _front
    if front is not None:
        insist_on_fork()
        front.rest()
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        if names:
            log.info("EngineCore is forked beside these threads: %s", ", ".join(names))
    _original["init"](manager, *args, **kwargs)
    if front is not None:
        front.forked()
