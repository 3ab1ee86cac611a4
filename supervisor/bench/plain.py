"""The plain server under kills: restarted at once by a service manager, prompted again from the start by its clients.

What a machine does today with ``Restart=always`` and ``RestartSec=0``, and clients that notice a broken stream and ask again as soon as
somebody answers. Both are as good as they can be: no restart limit, no backoff, no proxy in between that would time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import yaml

from shadowsup.supervisor import node_setup
from shadowsup.supervisor.bench.client import Stream, longest_gap_s, resumed_after, stream_chat
from shadowsup.supervisor.bench.failover import Kill, Plan, Progress, chats_of, client_session, ended, moment, summary, undisturbed
from shadowsup.supervisor.bench.figures import cached_share, difference, partial_difference, percentiles
from shadowsup.supervisor.bench.node import free_port
from shadowsup.supervisor.bench.prompts import Chat, payload
from shadowsup.supervisor.config import load
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.recipe import Recipe, interpreter, worker_environment
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.shm import ShmFile, shm_of, unlink_shm
from shadowsup.workers.vllm import arguments

LEAVE_S = 5.0
"""How long killed processes may take to let go of their files in /dev/shm."""

AGAIN_S = 0.02
"""Between two tries of a client whose server does not answer."""


@dataclass(kw_only=True)
class PlainServer:
    """A plain server and its service manager, which starts it anew whenever it ends."""

    port: int
    argv: Sequence[str]
    env: Mapping[str, str]
    output: Path
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    _task: asyncio.Task[None] | None = None
    _stopping: bool = False
    _shm: set[ShmFile] = field(default_factory=set)
    """Of processes that were killed: nobody else removes them."""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base}/v1/chat/completions"

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while not self._stopping:
            with self.output.open("ab") as sink:
                self.process = subprocess.Popen(
                    list(self.argv), env=dict(self.env), stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True
                )
            self.starts += 1
            status = await asyncio.to_thread(self.process.wait)
            if status not in (-signal.SIGKILL, -signal.SIGTERM):
                raise SupervisorError(f"the plain server exited with {status}: {self.tail()}")

    async def ready(self, timeout_s: float = 180.0) -> None:
        """Wait until it answers.

        Raises:
            SupervisorError: it ended, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                self.check()
                if time.monotonic() > deadline:
                    raise SupervisorError(f"the plain server does not answer after {timeout_s:.0f} s: {self.tail()}") from None
                await asyncio.sleep(AGAIN_S)
                continue
            writer.close()
            return

    def check(self) -> None:
        """Raises SupervisorError when it ended by itself: starting it again would not help."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def kill(self) -> None:
        """SIGKILL to all of it, as a service manager does; return when the process is gone."""
        assert self.process is not None
        await asyncio.to_thread(self._note_shm)
        self._signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)

    def _note_shm(self) -> None:
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(self.process.pid)
            self._shm |= shm_of([leader.pid, *(child.pid for child in leader.children(recursive=True))])

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # it leads its session, and is reaped only by `_keep`

    async def stop(self) -> None:
        self._stopping = True
        if self.process is not None and self.process.poll() is None:
            await asyncio.to_thread(self._note_shm)
            self._signal(signal.SIGTERM)
        if self._task is not None:
            with contextlib.suppress(SupervisorError):
                await self._task
        if self.process is not None:
            self._signal(signal.SIGKILL)  # what it has left behind in its group
        deadline = time.monotonic() + LEAVE_S
        while self._shm and time.monotonic() < deadline:  # files of a process that is still ending stay
            removed = set(await asyncio.to_thread(unlink_shm, self._shm))
            self._shm = {file for file in self._shm if file.path not in removed and file.path.exists()}
            await asyncio.sleep(AGAIN_S)

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


@contextlib.asynccontextmanager
async def running(content: dict[str, Any], worker: str, adapters: Mapping[str, str] | None = None) -> AsyncIterator[PlainServer]:
    """Start the plain server of one worker of a config's ``content``, wait until it answers, and end it at the end.

    Args:
        adapters: engine name of the config → adapter that is run instead (tests).

    Raises:
        SupervisorError: it cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="shadowsup-plain-"))
    try:
        recipe = await _recipe(content, worker, folder, adapters or {})
        port = free_port()
        if recipe.config.engine is EngineKind.VLLM:
            argv, env = _vllm(recipe, port)
            env = {**env, "TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder)}  # what each kill leaves there goes with the folder
        else:
            argv, env = _of_ours(recipe, folder / "spec.json", port)
        server = PlainServer(port=port, argv=argv, env=env, output=folder / "output")
        server.start()
        try:
            await server.ready()
            yield server
        finally:
            await server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _recipe(content: dict[str, Any], worker: str, folder: Path, adapters: Mapping[str, str]) -> Recipe:
    """Return how the node would start the worker's engines."""
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(content))
    paths = NodePaths(runtime=folder, state=folder)
    plan = await node_setup.plan(load(path).config, paths, ScribeClient(paths.scribe), adapters, lambda _: None)
    (recipe,) = (one.recipe for one in plan.workers if one.name == worker)
    return recipe


def _of_ours(recipe: Recipe, path: Path, port: int) -> tuple[list[str], Mapping[str, str]]:
    """Return command line and environment of the engine that the node would start, in a server of its own."""
    name = recipe.config.name
    launch = recipe.launch(f"{name}.1", 1)
    if launch.spec is None or launch.argv:
        raise SupervisorError(f"worker {name} runs a program of its own: there is no plain server of it", "leave out --plain")
    path.write_bytes(msgspec.json.encode(launch.spec))
    return [launch.python, "-m", "shadowsup.supervisor.bench.plain_server", str(path), "--port", str(port)], launch.env


def _vllm(recipe: Recipe, port: int) -> tuple[list[str], Mapping[str, str]]:
    """Return those of vLLM's own server, with nothing of shadowsup."""
    config, spec = recipe.config, recipe.launch(f"{recipe.config.name}.1", 1).spec
    words = arguments.plain_command_line(
        model=config.model or "",
        served_name=config.public_name,
        revision=config.revision,
        uds=None,
        port=port,
        dtype=config.dtype.value,
        kv_size=config.kv.size or 0,
        tensor_parallel=config.tensor_parallel,
        args={"block_size": config.kv.block_tokens} | config.args,
    )
    return [interpreter(config), "-m", arguments.PLAIN_SERVER, *words], worker_environment(
        config, os.environ, spec.gpus if spec is not None else (), {}
    )


@dataclass(kw_only=True)
class Conversation:
    """What one client did: a stream, and where it broke, the same question once more."""

    first: Stream
    second: Stream | None = None

    @property
    def arrivals(self) -> list[float]:
        return [self.first.sent_s, *self.first.arrivals, *(self.second.arrivals if self.second is not None else ())]

    def caught_up_s(self) -> float | None:
        """Return when the client got the first token that it did not have before the break (monotonic); None: never."""
        if self.second is None:
            return None
        had, count = sum(self.first.counts), 0
        for at, tokens in zip(self.second.arrivals, self.second.counts, strict=True):
            count += tokens
            if count > had:
                return at
        return None


async def converse(session: aiohttp.ClientSession, server: PlainServer, request: dict[str, Any], talk: Conversation) -> None:
    """Stream an answer; when the stream breaks, ask again until somebody answers.

    Raises:
        SupervisorError: the server ended by itself.
    """
    await stream_chat(session, server.url, request, talk.first)
    while not talk.first.done and (talk.second is None or talk.second.error is not None):
        server.check()
        talk.second = await stream_chat(session, server.url, request)
        if talk.second.error is not None:
            if talk.second.arrivals or talk.second.error.startswith("HTTP"):
                return  # it was answered and broke again, or was refused: that is told
            await asyncio.sleep(AGAIN_S)


async def measure(server: PlainServer, plan: Plan, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run ``plan`` against ``server``; figures as of `failover.measure`, and when clients were back where they had been (``caught_up_ms``).

    Raises:
        SupervisorError: the undisturbed run failed, or the server does not come up.
    """
    rng = random.Random(plan.seed + 1)
    kills: list[Kill] = []
    caught_up_ms: list[float] = []
    broken = 0
    async with client_session() as session:
        prompts = await chats_of(session, server.url, plan)
        progress(f"undisturbed run of {plan.streams} streams")
        references = await undisturbed(session, server.url, plan, prompts)
        for number in range(plan.kills):
            kill = Kill(number=number, at_token=moment(plan, rng))
            talks, killed_s = await _one(session, server, plan, prompts, kill)
            kills.append(kill)
            for talk, reference in zip(talks, references, strict=True):
                broken += talk.second is not None
                _judge(talk, reference, kill, killed_s, plan)
                caught_up_s = talk.caught_up_s()
                if caught_up_s is not None:
                    caught_up_ms.append((caught_up_s - killed_s) * 1e3)
            progress(f"kill {number + 1}/{plan.kills}: first token after {kill.first_ms or -1:.0f} ms, {len(kill.wrong)} wrong")
    result = summary(plan, references, kills)
    result["client"]["caught_up_ms"] = percentiles(caught_up_ms)
    return {**result, "streams_broken": broken}


async def _one(
    session: aiohttp.ClientSession, server: PlainServer, plan: Plan, prompts: Sequence[Chat], kill: Kill
) -> tuple[list[Conversation], float]:
    talks = [Conversation(first=Stream(sent_s=time.monotonic())) for _ in prompts]
    requests = [payload(plan.model, chat, plan.output_tokens) for chat in prompts]
    talking = [asyncio.create_task(converse(session, server, one, talk)) for one, talk in zip(requests, talks, strict=True)]
    async with ended(talking):
        await asyncio.gather(*(talk.first.reached(kill.at_token) for talk in talks))
        killed_s = time.monotonic()
        await server.kill()
        await server.ready()
        kill.settled_ms = (time.monotonic() - killed_s) * 1e3
        await asyncio.gather(*talking)
    kill.kind = "restart"
    return talks, killed_s


def _judge(talk: Conversation, reference: Stream, kill: Kill, killed_s: float, plan: Plan) -> None:
    last = talk.second if talk.second is not None else talk.first
    problem = difference(reference, last) or (partial_difference(reference, talk.first) if talk.second is not None else None)
    if problem:
        kill.wrong.append(problem)
    resumed = resumed_after(talk.arrivals, killed_s)
    if resumed is not None:
        kill.resumed_ms.append(resumed * 1e3)
    kill.longest_gap_ms.append(longest_gap_s(talk.arrivals[1:]) * 1e3)
    if talk.second is not None and (share := cached_share(talk.second.usage, plan.block_tokens)) is not None:
        kill.cached_share.append(share)
