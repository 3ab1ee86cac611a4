"""The end of an engine, step by step: order, stop signal, SIGKILL, quarantine. Every step has a bound and is announced (P06, P22)."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from shadowsup.supervisor.policy.messages import Announce, KillTree, Quarantine, Send, Signal, WorkerAction
from shadowsup.supervisor.policy.model import KILL_AGAIN_S, KILL_BOUND_S, ORDER_GRACE_S, EngineRecord, StopLadder, WorkerSettings
from shadowsup.wire.engine import EngineState, Release, Role, Stop


def begin(engine: EngineRecord, now_s: float, *, release: bool = False) -> StopLadder:
    """Start the end of ``engine`` by order. ``release``: planned hand-over."""
    if engine.stop is None or (engine.stop.release and not release):
        engine.stop = StopLadder(began_s=now_s, release=release)
        engine.role = Role.RETIRING
        engine.excused = True
        if engine.state is not EngineState.QUARANTINED:
            engine.state = EngineState.STOPPING
    return engine.stop


def skip(engines: Iterable[EngineRecord], settings: WorkerSettings, now_s: float) -> None:
    """Go to the last step at once, for every engine."""
    for engine in engines:
        if not engine.dying:
            begin(engine, now_s).began_s = now_s - settings.stop_timeout_s


def push(engine: EngineRecord, settings: WorkerSettings, now_s: float) -> tuple[list[WorkerAction], float]:
    """Return what is due for an engine that is ending, and when to ask again (``inf``: when something happens)."""
    if engine.dying:
        return _bury(engine, settings, now_s)
    ladder = engine.stop
    if ladder is None:
        return [], float("inf")
    actions: list[WorkerAction] = []
    grace_s = min(ORDER_GRACE_S, settings.stop_timeout_s / 2)
    listens = engine.vitals.beat is not None
    if not ladder.ordered:
        ladder.ordered = True
        if listens:
            actions.append(Send(engine.id, Release() if ladder.release else Stop()))
    signal_s = ladder.began_s + (grace_s if listens else 0.0)
    kill_s = ladder.began_s + settings.stop_timeout_s
    if not ladder.signalled and now_s >= signal_s and engine.pid is not None:
        ladder.signalled = True
        name = signal.Signals(settings.stop_signal).name
        actions.append(Signal(engine.id, settings.stop_signal))
        if listens:
            text = f"{engine.id} did not exit within {grace_s:g} s of the order to stop: {name} sent"
            actions.append(Announce("engine.stop_signal", text, "warning", engine.id, data={"signal": name}))
    if now_s >= kill_s:
        text = f"{engine.id} did not exit within {settings.stop_timeout_s:g} s of the order to stop: SIGKILL sent"
        actions.append(Announce("engine.killed", text, "warning", engine.id))
        engine.verdict_s, engine.cause = now_s, "did not stop in time"
        more, again_s = _bury(engine, settings, now_s)
        return actions + more, again_s
    return actions, kill_s if ladder.signalled else min(kill_s, max(signal_s, now_s) if engine.pid is not None else kill_s)


def _bury(engine: EngineRecord, settings: WorkerSettings, now_s: float) -> tuple[list[WorkerAction], float]:
    """SIGKILL and again until the tree is gone: a fork can slip through one sweep. After the bound it is quarantined, once."""
    actions: list[WorkerAction] = []
    if engine.killed_s is None:
        engine.killed_s = now_s
        engine.kill_again_s = now_s + KILL_AGAIN_S
        actions.append(KillTree(engine.id))
    elif now_s >= engine.kill_again_s:
        engine.kill_again_s = now_s + KILL_AGAIN_S
        actions.append(KillTree(engine.id))
    if now_s >= engine.killed_s + KILL_BOUND_S and engine.state is not EngineState.QUARANTINED:
        engine.state = EngineState.QUARANTINED
        text = f"{engine.id} is still there {KILL_BOUND_S:g} s after SIGKILL (stuck in the kernel)"
        actions.append(Announce("engine.quarantined", text, "error", engine.id))
        why = f"{engine.id}, a process that cannot be killed, holds it"
        actions.append(Quarantine(engine.id, settings.gpus if engine.gpus is None else engine.gpus, why))
    return actions, engine.kill_again_s
