"""Seams: `AsyncLLM.__init__` and `_add_request`, `OutputProcessor.process_outputs` (read in and run with 0.26.0 and 0.32.0): requests
that come ahead of a failover.

The gateway sends a parked engine every request that may be replayed to it, when its stream has begun, as it would replay it. Such a request
goes vLLM's own way, from the parsing of its body to the making of its parameters and the start of its answer, and stops where it would be
handed to EngineCore: EngineCore is given it to hold back (`shadowsup.workers.vllm.replay.core`), and the output that its stream gets
meanwhile is retold as it comes. In the failover `Go` names it and brings the last few tokens; what is left to do does not depend on how
long the prompt is. EngineCore hears of it first; while it computes, this process retells those tokens (detokenizer and parsers take
0.1 ms each), at the latest before the first new one is given to the request (`OutputProcessor.process_outputs`).

It is the same code in the same order as a replay's, so what is said of a replay holds for it. What waits belongs to the connection that
brought it: when that is closed vLLM aborts it like any request, and nothing of it is left. A `Go` for something that is not there is
answered with `Unknown`, and the gateway replays.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from shadowsup.wire import staged
from shadowsup.wire.framing import FrameError, Unpacker, pack
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm import current
from shadowsup.workers.vllm.replay import claim as claims
from shadowsup.workers.vllm.replay import front

log = logging.getLogger("shadowsup.engine")

READ_BYTES = 1 << 20

_original: dict[str, Callable[..., Any]] = {}
_waiting: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""By key: the collectors of requests that wait. vLLM keeps them as long as the request."""
_untold: deque[tuple[str, Any, list[int], list[int]]] = deque()
"""What is still to be retold: key, collector, output, its pieces."""
_tasks: set[asyncio.Task[Any]] = set()


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    if _original:
        return
    _original["process"] = OutputProcessor.process_outputs
    OutputProcessor.process_outputs = _process_outputs
    _original["init"] = AsyncLLM.__init__
    _original["add"] = AsyncLLM._add_request
    AsyncLLM.__init__ = _init
    AsyncLLM._add_request = _add_request


def _init(llm: Any, *args: Any, **kwargs: Any) -> None:
    _original["init"](llm, *args, **kwargs)
    try:
        loop, spec = asyncio.get_running_loop(), current.read_spec()
    except (RuntimeError, WorkerError):
        return  # not the API server of an engine of ours
    task = loop.create_task(_listen(staged.socket_of(spec.link_socket)), name="staged")
    _tasks.add(task)


async def _listen(path: str) -> None:
    try:
        server = await asyncio.start_unix_server(_serve, path, limit=READ_BYTES)
    except OSError as error:
        log.warning("requests cannot be sent ahead, %s cannot be listened on: %s", path, error)
        return
    await server.serve_forever()


# --- a request comes ahead --------------------------------------------------------------------------------------------------------


class _Waiting:
    """What is known of a request that waits; hangs on its collector, and refers to nothing that refers to that: it goes when vLLM drops
    the request, not when the garbage is collected."""

    __slots__ = ("failed", "held", "llm", "output", "request")

    def __init__(self, llm: Any, request: Any, held: bool) -> None:
        self.llm = llm
        self.request = request
        self.held = held
        self.failed = False
        self.output: list[int] = []

    @property
    def state(self) -> Any:
        """Of the request in the output processor; None: it was aborted."""
        return self.llm.output_processor.request_states.get(self.request.request_id)


async def _add_request(llm: Any, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
    claim = front.taken(request) if claims.STAGE in (getattr(request.sampling_params, "extra_args", None) or {}) else None
    if claim is None or not claim.stage:  # not for waiting, or not the gateway's: what it says has been dropped
        await _original["add"](llm, request, prompt, parent_req, index, queue)
        return
    front.check(request, claim, parent_req)
    llm.output_processor.add_request(request, prompt, parent_req, index, queue)
    try:
        # A grammar must be brought to where the output has brought it when it is made: EngineCore hears of such a request at its turn.
        held = request.sampling_params.structured_outputs is None
        queue = front.retelling(queue)
        queue.waiting = _Waiting(llm, request, held)
        if held:
            await llm.engine_core.add_request_async(_marked(request, {claims.HELD: True}))
        queue.tell(front.told(queue.waiting.state, [], []))  # begins the answer
        _waiting[claim.stage] = queue
    except BaseException:
        await llm.abort(request.request_id, internal=True)
        raise


def _marked(request: Any, marks: dict[str, Any]) -> Any:
    """Return a copy of ``request`` with these extra arguments, too."""
    made = copy.copy(request)
    made.sampling_params = copy.copy(request.sampling_params)
    made.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), **marks}
    return made


# --- what the gateway says of it --------------------------------------------------------------------------------------------------


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    unpacker = Unpacker()
    try:
        while data := await reader.read(READ_BYTES):
            unknown: list[staged.Unknown] = []
            for frame in unpacker.feed(data):
                go: list[Any] = []
                for message in staged.decode_for_server(frame):
                    if not _take(message, go):
                        unknown.append(staged.Unknown(key=message.key))
                await _hand_on(go)
                _retell()
            if unknown:
                writer.write(pack(staged.encode(unknown)))
    except (FrameError, msgspec.MsgspecError, OSError) as error:
        log.warning("what the gateway says of requests that wait cannot be read: %s", error)
    finally:
        writer.close()


def _take(message: staged.ToServer, go: list[Any]) -> bool:
    """Returns whether anything waits under its key; what is to go on is put into ``go``."""
    queue = _waiting.get(message.key)
    if queue is None or queue.waiting.state is None:
        return False
    try:
        if isinstance(message, staged.Go):
            del _waiting[message.key]
            front.only_once(message.request, message.epoch)
        _learn(queue, message)
        if isinstance(message, staged.Go):
            _check(queue.waiting)
            go.append(queue)
    except Exception as error:
        _fail(message.key, queue, error)
    return True


def _learn(queue: Any, message: staged.ToServer) -> None:
    output, pieces = claims.ids_of(message.output), claims.ids_of(message.pieces)
    if sum(pieces) != len(output):
        raise front.refusal(f"{sum(pieces)} ids in pieces, but {len(output)} in all")
    if output:
        queue.waiting.output += output
        _untold.append((message.key, queue, output, pieces))


def _retell() -> None:
    """Put what was generated elsewhere through the requests' detokenizers, in order, and have it given out."""
    while _untold:
        key, queue, output, pieces = _untold.popleft()
        state = queue.waiting.state
        if state is None or queue.waiting.failed:
            continue  # its connection was closed meanwhile, or what came before cannot be
        try:
            queue.tell(front.told(state, output, pieces))
        except Exception as error:
            _fail(key, queue, error)


def _fail(key: str, queue: Any, error: Exception) -> None:
    """Have ``error`` be the answer, and leave nothing of the request: vLLM takes one that is refused for one that has not begun."""
    _waiting.pop(key, None)
    queue.put(error)
    waiting: _Waiting = queue.waiting
    waiting.failed = True
    if waiting.state is not None:
        task = asyncio.get_running_loop().create_task(waiting.llm.abort(waiting.request.request_id, internal=True))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)


def _process_outputs(processor: Any, *args: Any, **kwargs: Any) -> Any:
    _retell()  # what was delivered comes before what EngineCore says now
    return _original["process"](processor, *args, **kwargs)


def _check(waiting: _Waiting) -> None:
    if not waiting.output:
        raise front.refusal("there is no output to go on from")
    most = waiting.request.sampling_params.max_tokens
    if most is not None and len(waiting.output) >= most:
        raise front.refusal("an answer that has all its tokens cannot be continued")


async def _hand_on(go: list[Any]) -> None:
    """Give EngineCore what goes on, all at once, and let it know how many there are: they are to be one step."""
    for number, queue in enumerate(go):
        waiting: _Waiting = queue.waiting
        request, state = waiting.request, waiting.state
        if state is None or waiting.failed:
            continue  # its connection was closed just now
        # Its time in the queue begins now, for vLLM's metrics and its order of priorities.
        request.arrival_time = time.time()
        if state.stats is not None:
            state.stats.arrival_time = request.arrival_time
        marks: dict[str, Any] = {claims.OUTPUT: claims.packed(waiting.output), claims.MORE: len(go) - 1 - number}
        made = _marked(request, marks | {claims.HELD_BEFORE: True} if waiting.held else marks)
        if waiting.held:
            made.prompt_token_ids = []  # EngineCore has them
        try:
            await waiting.llm.engine_core.add_request_async(made)
        except Exception as error:
            _fail("", queue, error)
