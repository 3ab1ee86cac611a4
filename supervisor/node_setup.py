"""Before anything is started: claim the runtime directory, prepare this process, bind the port, and work out what will run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shadowsup.supervisor import adoption, device_memory, devices, fd_store, model_facts, node_record, runtime_dir, vllm_plain
from shadowsup.supervisor import sockets as tcp
from shadowsup.supervisor.adoption import Adoption
from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.listen import parse_listen
from shadowsup.supervisor.config.model import Backend, EngineKind
from shadowsup.supervisor.errors import AlreadyRunning, ExitCode, SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.recipe import CommandRecipe, KeptRecipe, settings, worker_environment
from shadowsup.supervisor.registry import Mark, Registry
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.subreaper import become_subreaper

FETCH_LINES = 20
NO_NURSERY = "SHADOWSUP_NO_NURSERY"
"""Environment of the supervisor: with 1 there is no nursery, every engine is spawned cold (``shadowsup bench`` measures that rung)."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``config``: what is to run: that of the node which is ``found`` running, otherwise the one that was asked for.

    ``marks``: how far its workers had come; ``index``: what a service manager may have kept of their memory; ``listened``: where the
    gateway was to listen, as the config had it.
    """

    paths: NodePaths
    config: NodeConfig
    found: Adoption | None = None
    marks: Mapping[str, Mark] = field(default_factory=dict)
    index: fd_store.Index | None = None
    listened: str = ""


@contextlib.contextmanager
def claimed(path: Path, config: NodeConfig) -> Iterator[Claim]:
    """Hold the runtime directory for as long as the node runs, and remove it afterwards.

    The lock is on the directory itself: it goes with this process, whatever becomes of it, and with the directory.

    Raises:
        AlreadyRunning: another supervisor holds it.
        SupervisorError: processes of a supervisor that died are alive and cannot be adopted; nothing was started twice.
    """
    path = runtime_dir.create(path, group=config.node.gid, longest_name=max(len(worker.name) for worker in config.workers))
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = runtime_dir.read_record(path).get("pid")
            by = f" by pid {pid}" if pid else ""
            raise AlreadyRunning(f"this node is supervised already{by}, in {path}", "shadowsup status shows it; or stop it first") from None
        if not path.exists() or os.fstat(lock).st_ino != path.stat().st_ino:
            raise SupervisorError(f"{path} was removed by a node that stopped just now", "start again")
        found = adoption.find(path)
        before = Registry(path / runtime_dir.PROCESSES)
        before.resume()
        index = fd_store.read_index(path)
        listened = ""
        with contextlib.suppress(SupervisorError):  # of a node that is not there any more
            if (record := node_record.read(path)) is not None:
                listened = str((record.config.get("gateway") or {}).get("listen", ""))
        if found is None:
            runtime_dir.clean(path, keep=("lock",))
        else:
            config = found.config
        paths = NodePaths(runtime=path, state=config.node.state_dir.expanduser().absolute())
        try:
            paths.prepare(config.node.gid)
        except OSError as error:
            words = f"cannot prepare {error.filename}: {error.strerror}"
            raise SupervisorError(words, "set node.state_dir to a folder of yours") from error
        try:
            yield Claim(paths=paths, config=config, found=found, marks=before.marks, index=index, listened=listened)
        finally:
            # Whatever could not be ended is still in the record: then the directory stays, for `shadowsup stop`.
            if not Registry(paths.processes).leftovers():
                runtime_dir.clean(path)
    finally:
        os.close(lock)


def prepare_process() -> None:
    """Orphans of our trees become our children; as many open files as allowed; warnings to stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    become_subreaper()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(config: NodeConfig) -> list[socket.socket]:
    """Bind the gateway's address. Raises SupervisorError: taken (names the holder), not ours."""
    return bind(config.gateway.listen)


def bind(listen: str) -> list[socket.socket]:
    """Bind ``HOST:PORT`` or ``unix:/path``. Raises as `listen`."""
    address = parse_listen(listen)
    if not address.is_unix:
        return tcp.listen(listen)
    path = Path(address.path)
    if path.is_socket():
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise SupervisorError(f"somebody listens on {path} already", "choose another gateway.listen")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        sock.listen(tcp.BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise SupervisorError(f"cannot listen on {path}: {error.strerror}", "choose another gateway.listen") from error
    return [sock]


# --- what will run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NurseryPlan:
    """One fork server; workers that share interpreter, engine and environment share it."""

    engine: str
    preload: str
    python: str
    env: dict[str, str]
    number: int | None = field(default=None, compare=False)
    """Of its socket and its log; None: its place in the plan."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    config: WorkerConfig
    recipe: KeptRecipe | CommandRecipe
    gpus: tuple[str, ...] = ()
    nursery: int | None = None
    spares: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.config.name

    def policy(self, nursery: NurseryState) -> WorkerPolicy | CommandPolicy:
        wanted = settings(self.config, self.gpus, self.spares)
        return WorkerPolicy(wanted, nursery=nursery) if self.keeps_memory else CommandPolicy(wanted)

    @property
    def keeps_memory(self) -> bool:
        """Not so for a vLLM whose version, options or model are not proven with it."""
        return isinstance(self.recipe, KeptRecipe)


@dataclass(kw_only=True)
class Plan:
    """``backend``: of the keeper, None when no worker keeps memory. ``keeper_gpus``: UUIDs of the devices that it makes memory on."""

    workers: list[WorkerPlan] = field(default_factory=list)
    nurseries: list[NurseryPlan] = field(default_factory=list)
    backend: str | None = None
    keeper_gpus: tuple[str, ...] = ()
    gpus: list[dict[str, Any]] = field(default_factory=list)
    baselines: dict[str, int] = field(default_factory=dict)
    """Device UUID → bytes that were in use before anything was started."""
    overhead_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Worker → device UUID → the key of what an engine of it costs there."""


async def plan(
    config: NodeConfig,
    paths: NodePaths,
    scribe: ScribeClient,
    adapters: Mapping[str, str],
    report: Callable[[str], None],
    *,
    room: bool = True,
) -> Plan:
    """Resolve GPUs and models, and say what will run. ``room``: see whether the devices have room for it.

    Raises:
        SupervisorError: a GPU, model, interpreter or env_file cannot be used; ``exit_code`` says whether the config is to blame.
    """
    made = Plan()
    inventory: tuple[devices.Gpu, ...] = ()
    if any(worker.gpus or worker.spares for worker in config.workers):
        inventory = await asyncio.to_thread(devices.read_gpus)
        made.gpus = [gpu_status(gpu) for gpu in inventory]
    fetched: dict[tuple[str, str | None, str], str | None] = {}
    for worker in config.workers:
        gpus = tuple(gpu.uuid for gpu in devices.resolve(worker.gpus, inventory)) if worker.gpus else ()
        if worker.engine is EngineKind.COMMAND:
            made.workers.append(WorkerPlan(config=worker, recipe=CommandRecipe(worker, paths, scribe, gpus), gpus=gpus))
            continue
        kind = adapters.get(worker.engine.value, worker.engine.value)
        recipe = KeptRecipe(worker, paths, node=config.node.name, kind=kind, model=worker.model or "", revision=worker.revision, gpus=gpus)
        if kind == EngineKind.VLLM.value and (why := await asyncio.to_thread(vllm_plain.why_not, worker, recipe.env)) is not None:
            report(f"worker {worker.name}: {why}; vLLM runs without kept memory and without shadows, and is restarted when it dies")
            plain = vllm_plain.PlainVllmRecipe(worker, paths, scribe, gpus, why=why)
            made.workers.append(WorkerPlan(config=worker, recipe=plain, gpus=gpus))
            continue
        if kind == EngineKind.TRANSFORMERS.value:
            key = (recipe.model, worker.revision, recipe.python)
            if key not in fetched:
                fetched[key] = await fetch(recipe.model, worker.revision, recipe.python, recipe.env, report)
            recipe.revision = fetched[key] or worker.revision
        # A loop is a program of its own: there is nothing to import for it beforehand.
        if worker.engine is EngineKind.LOOP or os.environ.get(NO_NURSERY) == "1":
            made.workers.append(WorkerPlan(config=worker, recipe=recipe, gpus=gpus))
            continue
        nursery = NurseryPlan(
            engine=worker.engine.value, preload=_preload(kind, gpus), python=recipe.python, env=nursery_env(worker, recipe)
        )
        if nursery not in made.nurseries:
            made.nurseries.append(nursery)
        made.workers.append(WorkerPlan(config=worker, recipe=recipe, gpus=gpus, nursery=made.nurseries.index(nursery)))
    kept = [plan.config for plan in made.workers if plan.keeps_memory]
    if kept:
        made.backend = config.memkeeper.backend.value
        if config.memkeeper.backend is Backend.AUTO:
            made.backend = (Backend.CUDA if any(worker.gpus for worker in kept) else Backend.HOST).value
        sharing = [plan for plan in made.workers if plan.keeps_memory and plan.gpus]
        made.workers = [
            dataclasses.replace(plan, spares=tuple(gpu.uuid for gpu in devices.resolve(plan.config.spares, inventory)))
            if plan.config.spares and plan.gpus
            else plan
            for plan in made.workers
        ]
        spares = [gpu.uuid for plan in sharing for gpu in devices.resolve(plan.config.spares, inventory)]
        made.keeper_gpus = tuple(dict.fromkeys([*(uuid for plan in sharing for uuid in plan.gpus), *spares]))
        _check_sharing(sharing, made.keeper_gpus)
        made.baselines = {gpu.uuid: gpu.used for gpu in inventory}
        made.overhead_keys = {
            plan.name: {gpu.uuid: device_memory.Overheads.key(plan.config, gpu) for gpu in inventory if gpu.uuid in plan.gpus}
            for plan in sharing
        }
        if room:
            await _refuse_what_does_not_fit(sharing, inventory, paths, report)
    return made


async def _refuse_what_does_not_fit(
    plans: Sequence[WorkerPlan], inventory: Sequence[devices.Gpu], paths: NodePaths, report: Callable[[str], None]
) -> None:
    """Raises SupervisorError: the devices have no room for what is planned; the message has the arithmetic."""
    overheads = device_memory.Overheads(paths.overheads)
    shares: list[device_memory.Share] = []
    for plan in plans:
        mine = [gpu for gpu in inventory if gpu.uuid in plan.gpus]
        facts: dict[str, Any] = {}
        if model_facts.known(plan.config) and isinstance(plan.recipe, KeptRecipe):
            facts = await model_facts.ask(plan.config, plan.recipe.python, plan.recipe.env, min(gpu.memory for gpu in mine))
        key = model_facts.weights_key(facts, plan.config) if facts else ""
        shares += device_memory.shares(plan.config, mine, facts, overheads, key)
    verdicts = device_memory.judge(inventory, shares)
    full = [verdict.words() for verdict in verdicts if verdict.fits is False]
    if full:
        raise SupervisorError("\n".join(full), "make kv.size smaller, run fewer shadows, or end what else is on the GPU (shadowsup doctor)")
    for verdict in verdicts:
        report(verdict.words())


def _check_sharing(plans: Sequence[WorkerPlan], gpus: Sequence[str]) -> None:
    """Raises SupervisorError: (usage) workers that cannot be on these devices together."""
    for uuid in gpus:
        together = [plan for plan in plans if uuid in plan.gpus]
        greedy = [plan.name for plan in together if plan.config.kv.size is None]
        if len(together) > 1 and greedy:
            raise SupervisorError(
                f"workers {', '.join(plan.name for plan in together)} share GPU {uuid}, and {greedy[0]} would take all of it",
                "set kv.size of each worker that shares a GPU",
                exit_code=ExitCode.USAGE,
            )
    if len(gpus) > 1 and any(uuid.startswith("MIG-") for uuid in gpus):
        raise SupervisorError(
            "a process can use one MIG instance and no other device beside it, and the memkeeper is one process",
            "run a node for each MIG instance",
            exit_code=ExitCode.USAGE,
        )


def _preload(kind: str, gpus: Sequence[str]) -> str:
    """An adapter given as ``module:attribute`` is preloaded as its module. On the CPU more of vLLM can be imported beforehand."""
    return "vllm-cpu" if kind == EngineKind.VLLM.value and not gpus else kind.partition(":")[0]


def nursery_env(worker: WorkerConfig, recipe: KeptRecipe) -> dict[str, str]:
    """A nursery sees no GPU: it must not touch one. What its engines may see comes with each fork.

    vLLM's does: what vLLM finds out about the device when it is imported (by NVML) stays with its engines.
    """
    seen = devices.VARIABLES if worker.engine is EngineKind.VLLM else ()
    extra = {name: recipe.env[name] for name in (*recipe.ours, *seen)}
    return worker_environment(worker, os.environ, (), extra)


def gpu_status(gpu: devices.Gpu) -> dict[str, Any]:
    """Return a GPU as `status` shows it; what only a sensor knows is None."""
    known = dataclasses.asdict(gpu)
    return {
        **{name: known[name] for name in ("uuid", "index", "name")},
        "memory_used": None,
        "memory_total": gpu.memory,
        "util": None,
        "state": "ok",
    }


async def fetch(model: str, revision: str | None, python: str, env: Mapping[str, str], report: Callable[[str], None]) -> str | None:
    """Make the model's files be here, once, before any engine starts. Returns the revision to pin, None for local files.

    Raises:
        SupervisorError: there is no such model (exit code 2), or it cannot be fetched now (exit code 1).
    """
    command = [python, "-m", "shadowsup.workers.transformers.fetch", model]
    if revision is not None:
        command += ["--revision", revision]
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(env), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []

    async def read_progress(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            said.append(text)
            del said[:-FETCH_LINES]
            report(f"model {model}: {text}")

    try:
        out, _ = await asyncio.gather(process.stdout.read(), read_progress(process.stderr))
        status = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if status != 0:
        code = ExitCode.USAGE if status == ExitCode.USAGE else ExitCode.FAILED
        words = "\n".join(said[-FETCH_LINES if status not in (1, 2) else -1 :]) or f"exit status {status}"
        raise SupervisorError(f"model {model} cannot be used: {words}", exit_code=code)
    found = json.loads(out)["revision"]
    return str(found) if found is not None else None
