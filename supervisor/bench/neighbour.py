"""What the clients of one worker feel of another one's failover, on the same machine.

Two workers of one node, alike. The first one serves K streams all the time and is killed now and then; a client of the second one asks
short questions, one after the other. The time to its first token is compared: while both workers are well, and from a kill until the first
worker is healthy again (its shadow's takeover, the replay of its streams, and the loading of its next shadow).
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from shadowsup.supervisor.bench import failover, machine
from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.failover import Plan, Progress
from shadowsup.supervisor.bench.figures import difference, percentiles
from shadowsup.supervisor.bench.modes import describe
from shadowsup.supervisor.bench.node import START, Node, engine_of, running
from shadowsup.supervisor.bench.prompts import Chat, chats, payload
from shadowsup.supervisor.bench.setting import Mode, choose, for_mode
from shadowsup.supervisor.errors import SupervisorError

SUFFIX = "-neighbour"
ANSWER_TOKENS = 4
QUESTION_WORDS = 40
QUESTIONS = 5
"""Before each kill."""


async def measure(
    content: dict[str, Any], plan: Plan, progress: Progress = lambda _: None, *, start: Sequence[str] = START
) -> dict[str, Any]:
    """Run ``plan`` on the first worker; return the document. See `modes.measure` for the rest.

    Raises:
        SupervisorError: the node does not come up or back, or a stream or a question failed.
    """
    load = machine.load()
    worker = choose(content, plan.worker)
    plan = replace(plan, worker=worker.name, model=worker.public_name, block_tokens=worker.kv.block_tokens)
    changed = for_mode(content, worker.name, Mode.SHADOW)
    other = copy.deepcopy(changed["workers"][0]) | {"name": worker.name + SUFFIX, "served_name": plan.model + SUFFIX}
    changed["workers"].append(other)
    progress("starting a node with two workers")
    async with running(changed, start=start) as node, failover.client_session() as session:
        run = _Run(node, plan, session)
        await run.prepare()
        streaming = [asyncio.create_task(run.stream(number)) for number in range(plan.streams)]
        try:
            for number in range(plan.kills):
                await run.kill(streaming)
                progress(f"kill {number + 1}/{plan.kills}: {len(run.recovering)} questions while recovering, {len(run.well)} while well")
        finally:
            run.ending = True
            await asyncio.gather(*streaming, return_exceptions=True)
    result = {
        "plan": plan.as_dict(),
        "engine": describe(content, worker.name),
        "wrong": run.wrong,
        "first_token_ms": {"well": percentiles(run.well), "recovering": percentiles(run.recovering)},
    }
    return machine.document("neighbour", load, result)


class _Run:
    """``well``, ``recovering``: ms to the neighbour's first token, by what the first worker was doing when it was asked."""

    def __init__(self, node: Node, plan: Plan, session: aiohttp.ClientSession) -> None:
        self.well: list[float] = []
        self.recovering: list[float] = []
        self.wrong: list[str] = []
        self.ending = False
        self._node = node
        self._plan = plan
        self._session = session
        self._url = f"{node.url}/v1/chat/completions"
        self._prompts: list[Chat] = []
        self._references: list[Stream] = []
        self._asked = 0

    async def prepare(self) -> None:
        """Run everything once, undisturbed."""
        self._prompts = await failover.chats_of(self._session, self._url, self._plan)
        self._references = await failover.undisturbed(self._session, self._url, self._plan, self._prompts)
        await self._question()

    async def stream(self, number: int) -> None:
        """Be one client of the first worker until told to end."""
        request = payload(self._plan.model, self._prompts[number], self._plan.output_tokens)
        while not self.ending:
            problem = difference(self._references[number], await stream_chat(self._session, self._url, request))
            if problem:
                self.wrong.append(problem)

    async def kill(self, streaming: Sequence[asyncio.Task[None]]) -> None:
        """Ask while both are well, kill, and ask until they are again."""
        name = self._plan.worker
        await self._node.wait_for("healthy", name, timeout_s=self._plan.settle_timeout_s)
        for _ in range(QUESTIONS):
            self.well.append(await self._question())
        os.kill((await engine_of(self._node, "active", name))["pid"], signal.SIGKILL)
        deadline = time.monotonic() + self._plan.settle_timeout_s
        while True:
            self.recovering.append(await self._question())
            for task in streaming:
                if task.done():
                    task.result()
            if (await self._node.worker(name))["state"] == "healthy":
                return
            if time.monotonic() > deadline:
                raise SupervisorError(f"worker {name} did not recover: {self._node.tail()}")

    async def _question(self) -> float:
        """Ask the neighbour something that it has not been asked; return the ms to its first token."""
        self._asked += 1
        chat = chats(1, QUESTION_WORDS, self._plan.seed + 1000 + self._asked)[0]
        answer = await stream_chat(self._session, self._url, payload(self._plan.model + SUFFIX, chat, ANSWER_TOKENS))
        if answer.error or answer.first_s is None:
            raise SupervisorError(f"the neighbour did not answer: {answer.error or 'no token'}")
        return answer.first_s * 1e3
