"""Drives an adapter through the life of an engine process: load, warm up, park, be promoted, serve, leave.

One thread (the step thread) does all of it, in order. What the supervisor, the keeper and the gateway see is `shadowsup.workers.life`.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from shadowsup.wire.engine import EngineSpec
from shadowsup.workers import registry
from shadowsup.workers.api import AdapterFactory, Engine
from shadowsup.workers.errors import ExitCode
from shadowsup.workers.life import Life

log = logging.getLogger("shadowsup.engine")


def run(spec: EngineSpec, factory: AdapterFactory | None = None) -> ExitCode:
    """Live the life of the engine ``spec`` and return its exit status; everything that goes wrong is reported and logged, not raised.

    Args:
        factory: makes the adapter; None: the registry's for ``spec.kind``.
    """
    return EngineProcess(spec, factory).run()


class EngineProcess:
    """One engine. `run` is called once, on the process's main thread (elsewhere signals are left alone)."""

    def __init__(self, spec: EngineSpec, factory: AdapterFactory | None = None) -> None:
        self._spec = spec
        self._factory = factory
        self._life = Life(spec)

    def run(self) -> ExitCode:
        with self._life.leaving.signals():
            try:
                self._life.start()
                self._live()
            except BaseException as error:
                return self._life.over(error)

    def _live(self) -> NoReturn:
        life = self._life
        with life.leaving.interruptible():
            engine = self._load()
            self._warm(engine)
        life.park(engine)
        life.wait_for_promotion()
        while True:
            if life.arrivals():
                self._step(engine)
            life.obey()

    def _load(self) -> Engine:
        spec, life = self._spec, self._life
        log.info("loading %s (%s)", spec.model, spec.kind)
        store = life.connect()
        engine = (self._factory or registry.factory(spec.kind))()
        life.open["engine"] = engine.close
        life.loading = engine
        engine.load(spec, store, life.progress)
        life.hold(engine.geometry(), store.fingerprint)
        return engine

    def _warm(self, engine: Engine) -> None:
        arena = self._life.reserve()
        self._life.open["arena"] = arena.close
        engine.warm(arena)
        self._life.warmed()

    def _step(self, engine: Engine) -> None:
        life = self._life
        life.stepping(engine.phase, getattr(engine, "upcoming", 0))
        result = engine.step()
        life.stepped(result.events, engine.phase, progressed=result.progressed)
        if not result.progressed:
            life.stalled()
