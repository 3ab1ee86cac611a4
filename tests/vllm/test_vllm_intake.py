"""How EngineCore takes in what goes on after a failover: all of it before the next step, however much it is."""

from __future__ import annotations

import asyncio
import queue
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_world

from shadowsup.wire import staged
from shadowsup.wire.link import Sampling, Submit

pytestmark = pytest.mark.vllm
if not vllm_world.importable():
    pytest.skip("vLLM is not in this environment (make vllm)", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequestType

    from shadowsup.workers.vllm.replay import claim as claims
    from shadowsup.workers.vllm.replay import core as intake
    from shadowsup.workers.vllm.replay import front, stage
    from shadowsup.workers.vllm.scheduler import Kept

ADD, ABORT = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT


class Core:
    """Takes requests as vLLM's does, and notes them."""

    _handle_client_request = intake._handle_client_request

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.taken: list[Any] = []

    def original(self, request_type: Any, request: Any) -> None:
        self.taken.append(request[0].request_id if request_type == ADD else (request_type, request))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setitem(intake._original, "handle", Core.original)
    return Core()


def added(number: int, more: int | None) -> tuple[Any, Any]:
    extra = None if more is None else {claims.MORE: more}
    return ADD, (SimpleNamespace(request_id=str(number), sampling_params=SimpleNamespace(extra_args=extra)), 0)


def test_thousands_that_go_on_together_are_taken_in_order_at_once(core: Core) -> None:
    count = 2000
    for number in range(1, count):
        core.input_queue.put(added(number, count - 1 - number))
    core.input_queue.put(added(count, None))  # not of them
    core._handle_client_request(*added(0, count - 1))
    assert core.taken == [str(number) for number in range(count)]
    assert core.input_queue.qsize() == 1, "what is not of them is the busy loop's"


def test_what_comes_between_them_does_not_part_them_and_what_does_not_come_is_not_waited_for(core: Core) -> None:
    core.input_queue.put((ABORT, ["x"]))
    core.input_queue.put(added(1, 1))
    core._handle_client_request(*added(0, 2))
    assert core.taken == ["0", (ABORT, ["x"]), "1"]
    core._handle_client_request(*added(2, None))
    assert core.taken[-1] == "2"


def test_a_canary_that_is_there_already_is_not_taken_again() -> None:
    """A supervisor that took over may ask what the one before has asked. vLLM's own scheduler ends over a second of the same id."""

    class Taking:
        """As much of vLLM's scheduler as takes a request."""

        add_request, canary = Scheduler.add_request, Kept.canary
        connector, log_stats, spec_decode_metrics_level = None, False, "none"

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.waits: list[str] = []

        def _enqueue_waiting_request(self, request: Any) -> None:
            self.waits.append(request.request_id)

    scheduler: Any = Taking()
    for number in (1, 1, 2):
        scheduler.canary(Submit(rid=f"canary {number}", epoch=1, prompt_ids=(0,), sampling=Sampling(max_tokens=1, seed=0)))
    assert scheduler.waits == ["canary 1", "canary 2"]


def test_what_was_delivered_is_retold_before_anything_new_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore hears of a request that goes on before this is done, and may be faster."""
    order: list[Any] = []
    waiting = SimpleNamespace(state="its state", output=[], failed=False)
    collector = SimpleNamespace(waiting=waiting, tell=lambda retold: order.append(retold))
    gone = SimpleNamespace(waiting=SimpleNamespace(state=None, output=[], failed=False), tell=None)
    monkeypatch.setattr(front, "told", lambda state, output, pieces: (state, output, pieces))
    monkeypatch.setitem(stage._original, "process", lambda processor, outputs: order.append(outputs) or "done")
    stage._learn(gone, staged.Told(key="gone", output=packed(7), pieces=packed(1)))
    stage._learn(collector, staged.Told(key="k", output=packed(1, 2, 3), pieces=packed(2, 1)))
    stage._learn(collector, staged.Go(key="k", request="r", epoch=2, output=packed(4), pieces=packed(1)))
    assert (waiting.output, order) == ([1, 2, 3, 4], [])
    assert stage._process_outputs("a processor", "new") == "done"
    assert order == [("its state", [1, 2, 3], [2, 1]), ("its state", [4], [1]), "new"]
    assert stage._process_outputs("a processor", "newer") == "done"
    assert order[3:] == ["newer"]


@pytest.mark.parametrize(("output", "pieces", "why"), [((), (), "no output"), ((1, 2), (1,), "1 ids in pieces"), ((1, 2), (2,), "a stop")])
async def test_of_what_is_refused_nothing_is_left(
    output: tuple[int, ...], pieces: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself forgets to: it takes a refusal for one of a request that has not begun."""
    ended: list[Any] = []

    class Llm:
        async def abort(self, request_id: str, internal: bool) -> None:
            ended.append((request_id, internal))

    def told(state: Any, output: list[int], pieces: list[int]) -> Any:
        raise front.refusal("a stop string")

    params = SimpleNamespace(max_tokens=9)
    waiting = SimpleNamespace(
        state="its state", output=[], failed=False, llm=Llm(), request=SimpleNamespace(request_id="r-1", sampling_params=params)
    )
    said: list[Exception] = []
    collector = Collector(waiting, said.append)
    monkeypatch.setattr(front, "told", told)
    monkeypatch.setattr(front, "only_once", lambda request, epoch: None)
    monkeypatch.setitem(stage._waiting, "k", collector)
    go: list[Any] = []
    assert stage._take(staged.Go(key="k", request="r", epoch=2, output=packed(*output), pieces=packed(*pieces)), go)
    assert go == ([collector] if why == "a stop" else []), "what cannot be taken at all never reaches EngineCore"
    stage._retell()
    async with asyncio.timeout(10):
        while not ended:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert ended == [("r-1", True)] and why in str(said[0]) and "k" not in stage._waiting
    stage._untold.append(("k", collector, [5], [1]))
    stage._retell()
    assert len(said) == 1, "nothing is told of what comes after"


class Collector:
    """Can be referred to weakly."""

    def __init__(self, waiting: Any, put: Any) -> None:
        self.waiting = waiting
        self.put = put

    def tell(self, retold: Any) -> None:
        raise AssertionError("nothing is retold of it")


def packed(*ids: int) -> bytes:
    return array("I", ids).tobytes()
