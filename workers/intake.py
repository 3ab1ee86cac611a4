"""What the gateway asks for, between the link thread that receives it and the step thread that does it.

The rules that keep a request's identity clean are here: a request is (rid, epoch); a duplicate is ignored, because an answer to it would
be taken for the running request's; events of a request that was cancelled or whose gateway is gone are dropped; a request that comes
again after such an end waits until the adapter has passed a step boundary and forgotten the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from shadowsup.wire.engine import EngineState
from shadowsup.wire.link import Accepted, Cancel, Rejected, Stage, Submit, Token, Unstage
from shadowsup.workers.link import Incoming

_REMEMBERED = 4096
"""Finished requests whose duplicates are still known."""


class Receiver(Protocol):
    """Who does it; see `shadowsup.workers.api.Engine`."""

    def submit(self, request: Submit) -> None: ...
    def cancel(self, rid: str) -> None: ...
    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None: ...
    def forget(self, rid: str) -> None: ...


class Intake:
    """``wake``: rings the step loop. `deliver` is for the link thread, everything else for the step thread."""

    def __init__(self, engine: Receiver, wake: Callable[[], None], log: Callable[[str], None] = lambda line: None) -> None:
        self._engine = engine
        self._wake = wake
        self._log = log
        self._inbox: deque[Sequence[Incoming]] = deque()
        self._live: dict[str, int] = {}
        self._finished: dict[str, None] = {}
        self._leaving: set[str] = set()
        self._again: dict[str, Submit] = {}
        self._staged: dict[str, tuple[int, ...]] = {}
        self.connection = 0
        """Whose requests these are; answers go to no other (`LinkServer.send`)."""
        self.resumed = 0
        """Replayed requests taken since `begin`."""

    def deliver(self, messages: Sequence[Incoming]) -> None:
        """Hand over what came in together, so that it is taken together (all replays of a failover in one step); any thread."""
        self._inbox.append(messages)
        self._wake()

    @property
    def live(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._live)

    @property
    def waiting(self) -> bool:
        """Whether there is something to take or a step boundary to pass."""
        return bool(self._inbox or self._leaving or self._again)

    def weight(self) -> int:
        """Return at most how many tokens the requests that lie here to be taken have; 0: there are none."""
        if not self._inbox:
            return 0
        return sum(_weight(message) for messages in list(self._inbox) for message in messages if isinstance(message, Submit))

    def begin(self) -> None:
        """A new epoch: nothing has been resumed in it."""
        self.resumed = 0

    def take(self, state: EngineState, epoch: int) -> list[Rejected]:
        """Give what came in to the engine. Returns the answers to what it must not see."""
        rejected: list[Rejected] = []
        while self._inbox:
            for message in self._inbox.popleft():
                if isinstance(message, Submit):
                    refusal = self._submit(message, state, epoch)
                    if refusal is not None:
                        rejected.append(refusal)
                elif isinstance(message, Cancel):
                    self._cancel(message.rid)
                elif isinstance(message, Stage):
                    self._staged[message.rid] = message.prompt_ids
                    self._engine.foresee(message.rid, message.prompt_ids)
                elif isinstance(message, Unstage):
                    self._unstage(message.rids)
                else:
                    for rid in list(self._live):
                        self._cancel(rid)
                    self._unstage(tuple(self._staged))
                    self._again.clear()
                    self._finished.clear()
                    rejected.clear()
                    self.connection = message.number
        return rejected

    def passing(self, events: Iterable[Accepted | Token | Rejected]) -> list[Accepted | Token | Rejected]:
        """Return the events of one step that somebody waits for, in order. To be called once after every step."""
        passed = []
        for event in events:
            if event.rid not in self._live:
                continue
            passed.append(event)
            if isinstance(event, Rejected) or (isinstance(event, Token) and event.finish_reason is not None):
                del self._live[event.rid]
                self._remember(event.rid)
        if self._leaving:
            self._leaving.clear()
            again, self._again = self._again, {}
            for submit in again.values():
                self._start(submit)
        return passed

    def _submit(self, submit: Submit, state: EngineState, epoch: int) -> Rejected | None:
        rid = submit.rid
        named = submit.replay.staged if submit.replay is not None else ""
        if state is not EngineState.ACTIVE or submit.epoch != epoch:
            self._unstage((named,))  # whoever sent it counts it as used
            words = f"engine is {state.value} in epoch {epoch}, the request is for epoch {submit.epoch}"
            return Rejected(rid=rid, epoch=submit.epoch, status=503, message=words, retryable=True)
        if rid in self._live or rid in self._again or rid in self._finished:
            self._unstage((named,))
            self._log(f"duplicate request {rid} ignored")
            return None
        if submit.replay is not None and named:
            prompt = self._staged.pop(named, None)
            if prompt is None:
                return Rejected(rid=rid, epoch=submit.epoch, status=503, message="its prompt is not staged here", retryable=True)
            replay = msgspec.structs.replace(submit.replay, prompt_ids=prompt)
            submit = msgspec.structs.replace(submit, prompt_ids=prompt, replay=replay)
        if rid in self._leaving:
            self._again[rid] = submit
        else:
            self._start(submit)
        return None

    def _start(self, submit: Submit) -> None:
        self._live[submit.rid] = submit.epoch
        self.resumed += submit.replay is not None
        self._engine.submit(submit)

    def _unstage(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if self._staged.pop(rid, None) is not None:
                self._engine.forget(rid)

    def _cancel(self, rid: str) -> None:
        self._again.pop(rid, None)
        if self._live.pop(rid, None) is not None:
            self._leaving.add(rid)
            self._engine.cancel(rid)

    def _remember(self, rid: str) -> None:
        self._finished[rid] = None
        if len(self._finished) > _REMEMBERED:
            del self._finished[next(iter(self._finished))]


def _weight(request: Submit) -> int:
    """A character is at most a token or so; what a template adds is small."""
    if request.replay is not None:
        return len(request.replay.prompt_ids) + len(request.replay.output_ids)
    if request.messages is not None:
        return sum(len(str(message.get("content", ""))) + 16 for message in request.messages)
    return len(request.prompt or request.prompt_ids or ()) + 1
