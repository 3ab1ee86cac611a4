"""How the engines of a worker are launched: spec, environment, interpreter, command line. One recipe for each kind of worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from shadowsup.supervisor.config.model import EngineKind, WorkerConfig
from shadowsup.supervisor.config.revision import revision_of
from shadowsup.supervisor.devices import environment as device_environment
from shadowsup.supervisor.engine_process import EngineProcess, Launch
from shadowsup.supervisor.environment import engine_environment
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.model import WorkerSettings
from shadowsup.supervisor.pypath import PYPATH, make_pypath
from shadowsup.supervisor.ready import ExecProbe, HttpProbe, LogProbe, NotifySocket, Probe, wait_ready
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.sockets import free_port
from shadowsup.wire.engine import EngineSpec, KvSpec
from shadowsup.workers.vllm import arguments as vllm_arguments

PROBE_S = 0.2
"""Between two looks at a command engine that is not ready."""


class Recipe(Protocol):
    """Makes launches. `watch` runs once for each engine, after its start, or after its adoption.

    ``settings_revision``: of all that an engine is started with, see `shadowsup.supervisor.config.revision`.
    """

    config: WorkerConfig
    settings_revision: str

    def launch(self, engine: str, seq: int, *, beside: bool = False) -> Launch:
        """``beside``: engines with other settings may serve from other KV, which must stay good."""
        ...

    def adopt(self, engine: str, seq: int, data: Mapping[str, str]) -> Launch:
        """Return the launch of an engine that runs. ``data``: what was noted of it."""
        ...

    async def watch(self, process: EngineProcess, tell: Callable[[m.WorkerEvent], None]) -> None: ...


def settings(config: WorkerConfig, gpus: tuple[str, ...] = (), spares: tuple[str, ...] = (), revision: str = "") -> WorkerSettings:
    """Return what the policy must know of a worker. ``revision``: that of its recipe; empty: it is looked up."""
    return WorkerSettings(
        name=config.name,
        shadows=config.shadows if config.engine.keeps_memory else 0,
        gpus=gpus,
        spares=spares,
        heartbeat_s=config.health.heartbeat,
        hang=HangLimits(floor_s=config.health.hang.floor, ceiling_s=config.health.hang.ceiling),
        startup_s=config.health.startup,
        backoff_s=config.restart.backoff,
        max_failures=config.restart.max.count,
        window_s=config.restart.max.window_s,
        healthy_after_s=config.restart.healthy_after,
        stop_signal=int(config.stop.signum),
        stop_timeout_s=config.stop.timeout,
        give_up_after_s=config.give_up_after,
        revision=revision or revision_of(config),
    )


def worker_environment(
    config: WorkerConfig, inherited: Mapping[str, str], gpus: tuple[str, ...], extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a worker's engines: allowed names, ``env_file``, ``env``, then what is ours.

    Raises:
        SupervisorError: ``env_file`` cannot be used.
    """
    ours = {"PYTHONUNBUFFERED": "1", **device_environment(gpus), **extra}
    return engine_environment(inherited, env=config.env, env_file=config.env_file, extra=ours)


def interpreter(config: WorkerConfig) -> str:
    """Return the Python that the engines of a worker run in."""
    return str(config.python or sys.executable)


def needs_pypath(config: WorkerConfig) -> bool:
    """Return whether a worker's engines run where our engine side must be put on the path: another interpreter, or a program of its own."""
    return config.python is not None or config.engine in (EngineKind.LOOP, EngineKind.VLLM)


def kept_environment(config: WorkerConfig, paths: NodePaths) -> dict[str, str]:
    """Return what engines with kept memory need in their environment: our engine side on their path, before whatever the worker adds, and
    nothing else of our own environment."""
    ours: dict[str, str] = {}
    if needs_pypath(config):
        pypath, theirs = str(paths.runtime / PYPATH), config.env.get("PYTHONPATH")
        ours["PYTHONPATH"] = f"{pypath}:{theirs}" if theirs else pypath
        if config.engine is not EngineKind.LOOP:
            ours["PYTHONSAFEPATH"] = "1"  # what lies in the working folder is anyone's; a user's script has a folder of its own
    return ours | (vllm_arguments.ENVIRONMENT if config.engine is EngineKind.VLLM else {})


class KeptRecipe:
    """Engines with kept memory: our SDK in the configured interpreter, or in a program of the user's own (``engine: loop``).

    Args:
        kind: adapter (a key of the registry, or ``module:attribute``).
        model, revision: resolved.
        gpus: device UUIDs.

    Raises:
        SupervisorError: ``env_file`` or ``python`` cannot be used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        paths: NodePaths,
        *,
        node: str,
        kind: str,
        model: str,
        revision: str | None,
        gpus: tuple[str, ...],
        inherited: Mapping[str, str] = os.environ,
    ) -> None:
        self.config = config
        self.kind = kind
        self.model = model
        if needs_pypath(config):
            make_pypath(paths.runtime)
        extra = kept_environment(config, paths)
        self.ours = tuple(extra)
        """Names of the variables that are neither the user's nor the machine's."""
        self.python = interpreter(config)
        self.env = worker_environment(config, inherited, gpus, extra)
        self._paths = paths
        self._node = node
        self.revision = revision
        self.settings_revision = revision_of(config)
        self._gpus = gpus

    def launch(self, engine: str, seq: int, *, beside: bool = False) -> Launch:
        config, paths, kv = self.config, self._paths, self.config.kv
        ranks = config.tensor_parallel if config.engine is EngineKind.VLLM else 1
        spec = EngineSpec(
            node=self._node,
            worker=config.name,
            engine=engine,
            seq=seq,
            kind=self.kind,
            model=self.model,
            revision=self.revision,
            served_name=config.public_name,
            dtype=config.dtype.value,
            args=dict(config.args),
            gpus=self._gpus,
            world=ranks,
            shadows=config.shadows,
            kv=KvSpec(size=kv.size or 0, block_tokens=kv.block_tokens, reserve=kv.reserve, beside=beside),
            verify=config.verify.value,
            heartbeat_s=config.health.heartbeat,
            runtime_dir=str(paths.runtime),
            keeper_socket=str(paths.keeper),
            beat_endpoint=f"ipc://{paths.beats}",
            link_socket=str(paths.link(engine)),
        )
        argv = [word.replace("{python}", self.python) for word in config.command or ()]
        if config.engine is EngineKind.VLLM:
            argv = [self.python, "-m", vllm_arguments.SERVER, *vllm_arguments.of_spec(spec)]
        return Launch(
            worker=config.name,
            env=self.env,
            spec=spec,
            python=self.python,
            argv=argv,
            front=config.engine is EngineKind.VLLM,
            ranks=ranks if ranks > 1 else 0,
            cwd=config.cwd,
            log_max_size=config.logs.max_size,
            log_keep=config.logs.keep,
            data={"revision": self.settings_revision},
        )

    def adopt(self, engine: str, seq: int, data: Mapping[str, str]) -> Launch:
        return self.launch(engine, seq)

    async def watch(self, process: EngineProcess, tell: Callable[[m.WorkerEvent], None]) -> None:
        """Nothing to do: these engines speak for themselves."""


class CommandRecipe:
    """Any server: its command line with ``{port}`` filled in, ready by its probe, served over HTTP.

    Raises:
        SupervisorError: ``env_file`` cannot be used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        paths: NodePaths,
        scribe: ScribeClient,
        gpus: tuple[str, ...] = (),
        inherited: Mapping[str, str] = os.environ,
    ) -> None:
        self.config = config
        self.env = (
            worker_environment(config, inherited, gpus, {})
            if gpus
            else engine_environment(inherited, env=config.env, env_file=config.env_file, extra={})
        )
        self.settings_revision = revision_of(config)
        self._paths = paths
        self._scribe = scribe
        self._ports: dict[str, int] = {}
        self._notify: dict[str, NotifySocket] = {}
        self._ready: set[str] = set()
        """Of those that were adopted."""

    def launch(self, engine: str, seq: int, *, beside: bool = False) -> Launch:
        return self._launch(engine, self.config.port or free_port())

    def adopt(self, engine: str, seq: int, data: Mapping[str, str]) -> Launch:
        if "upstream" in data:
            self._ready.add(engine)
        return self._launch(engine, int(data.get("port", "0")))

    def _launch(self, engine: str, port: int) -> Launch:
        config = self.config
        self._ports[engine] = port
        env = {**self.env, "PORT": str(port)}
        if config.ready is not None and config.ready.notify:
            notify = self._notify[engine] = NotifySocket(self._paths.notify(engine))
            env["NOTIFY_SOCKET"] = str(notify.path)
        return Launch(
            worker=config.name,
            env=env,
            argv=[word.replace("{port}", str(port)) for word in config.command or ()],
            cwd=config.cwd,
            log_max_size=config.logs.max_size,
            log_keep=config.logs.keep,
            data={"port": str(port), "revision": self.settings_revision},
        )

    async def watch(self, process: EngineProcess, tell: Callable[[m.WorkerEvent], None]) -> None:
        """Probe until ready. A start that takes too long is the policy's to end: this one only looks."""
        port = self._ports.pop(process.id)
        notify = self._notify.pop(process.id, None)
        try:
            if process.pid is None:
                return
            if process.id in self._ready:
                self._ready.discard(process.id)
                await process.gone()
                return
            probe = notify or self._probe(process.id, port)
            waiting = asyncio.ensure_future(wait_ready(probe, interval_s=PROBE_S, timeout_s=self.config.health.startup))
            gone = asyncio.ensure_future(process.gone())
            try:
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done() and waiting.exception() is None:
                    upstream = self._upstream(process.id, port)
                    with contextlib.suppress(SupervisorError):  # an adopting supervisor will ask the probe again
                        process.note(upstream=upstream)
                    tell(m.Ready(process.id, upstream))
                    if notify is not None:  # it may say more, and must not find the socket gone
                        await gone
            finally:
                for task in (waiting, gone):
                    task.cancel()
                await asyncio.gather(waiting, gone, return_exceptions=True)
                if isinstance(probe, LogProbe):
                    await probe.close()
        finally:
            if notify is not None:
                notify.close()

    def _upstream(self, engine: str, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def _probe(self, engine: str, port: int) -> Probe:
        config, ready = self.config, self.config.ready
        if ready is not None and ready.exec is not None:
            argv = [word.replace("{port}", str(port)) for word in ready.exec]
            return ExecProbe(argv, env={**self.env, "PORT": str(port)}, cwd=config.cwd)
        if ready is not None and ready.log is not None:
            return LogProbe(self._scribe.watch(engine, ready.log))
        path = ready.http if ready is not None and ready.http is not None else "/"
        return HttpProbe(f"http://127.0.0.1:{port}{path}")
