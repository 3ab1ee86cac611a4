"""How EngineCore takes in what goes on after a failover: all of it before the next step, however much it is."""

from __future__ import annotations

import queue
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_world

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
