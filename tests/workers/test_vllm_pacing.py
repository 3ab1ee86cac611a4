"""How a starting shadow cuts its passes, with a clock that only the GPU and the rests move."""

from __future__ import annotations

import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from shadowsup.wire.engine import Fence, Hurry
from shadowsup.workers.vllm.life import EngineLife
from shadowsup.workers.vllm.pacing import BURST_S, MAX_REST_S, REST, Beside, Pace, Seam


@dataclass
class Gpu:
    """Works through what it was given when somebody waits for it."""

    layer_s: float
    now_s: float = 100.0
    given_s: float = 0.0
    rests: list[float] = field(default_factory=list)

    def finish(self) -> None:
        self.now_s += self.given_s
        self.given_s = 0.0

    def rest(self, seconds: float) -> None:
        assert self.given_s == 0.0, "the GPU works on while it should rest"
        self.rests.append(seconds)
        self.now_s += seconds


class Attention:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def forward(self, query: int, *, output: int = 0) -> int:
        self.gpu.given_s += self.gpu.layer_s
        return query + output


class Cross:
    """Has its passes elsewhere."""

    forward = None


def layers(gpu: Gpu, count: int = 32) -> list[Attention]:
    return [Attention(gpu) for _ in range(count)]


def paced(gpu: Gpu, impls: list[Attention], wanted: bool = True) -> Pace:
    return pace_of(gpu, [*impls, Cross()], lambda: wanted)


def pace_of(gpu: Gpu, impls: Sequence[object], wanted: Callable[[], bool]) -> Pace:
    return Pace([Seam(impl, "forward", wanted) for impl in impls], gpu.finish, clock=lambda: gpu.now_s, rest=gpu.rest)


@pytest.mark.parametrize("layer_s", [0.00005, 0.00025, 0.0009])
def test_a_pass_is_cut_into_bursts_with_four_times_as_long_a_rest_after_each(layer_s: float) -> None:
    gpu = Gpu(layer_s)
    impls = layers(gpu)
    with paced(gpu, impls).kept():
        for _ in range(3):
            for impl in impls:
                assert impl.forward(1, output=2) == 3
    worked_s = 3 * 32 * layer_s
    assert sum(gpu.rests) == pytest.approx(REST * worked_s, abs=REST * 2 * (BURST_S + layer_s))
    assert max(gpu.rests) <= REST * (BURST_S + layer_s)
    assert len(gpu.rests) >= worked_s / (BURST_S + 2 * layer_s) - 1


def test_a_long_layer_is_followed_by_a_rest_that_has_a_bound() -> None:
    gpu = Gpu(0.004)
    impls = layers(gpu)
    with paced(gpu, impls).kept():
        for impl in impls:
            impl.forward(0)
    assert gpu.rests == [MAX_REST_S] * 31, "the first layer begins the burst"


def test_nothing_rests_when_it_is_not_wanted_or_over() -> None:
    gpu = Gpu(0.01)
    impls = layers(gpu)
    with paced(gpu, impls, wanted=False).kept():
        for impl in impls:
            impl.forward(0)
    before = [impl.forward for impl in impls]
    for impl in impls:
        impl.forward(0)
    assert gpu.rests == []
    assert before == [impl.forward for impl in impls] and not any("forward" in vars(impl) for impl in impls)


def test_what_an_object_had_itself_is_given_back() -> None:
    gpu = Gpu(0.01)
    (impl,) = layers(gpu, 1)
    own = impl.forward = lambda query, output=0: 7  # type: ignore[method-assign]
    with paced(gpu, [impl]).kept():
        assert impl.forward(1) == 7
    assert impl.forward is own


def test_it_ends_with_the_block_even_when_that_fails() -> None:
    gpu = Gpu(0.01)
    impls = layers(gpu)
    with pytest.raises(ZeroDivisionError), paced(gpu, impls).kept():
        raise ZeroDivisionError
    assert not any("forward" in vars(impl) for impl in impls)


def test_who_is_waited_for_from_now_on_rests_no_more() -> None:
    gpu, hurried = Gpu(0.002), False
    impls = layers(gpu)
    with pace_of(gpu, impls, lambda: not hurried).kept():
        for number, impl in enumerate(impls):
            hurried = number >= 10
            impl.forward(0)
    assert len(gpu.rests) == 9


def test_sampling_is_cut_after_each_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0.002)

    def work(*args: object) -> None:
        gpu.given_s += gpu.layer_s

    module = types.ModuleType("a_sampler_of_vllms")
    module.gumbel_sample = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    states = type("States", (), {"apply_temperature": work, "apply_min_p": work, "apply_staged_writes": work})
    sampler = type("Sampler", (), {"__module__": module.__name__})()
    sampler.sampling_states, sampler.logprobs_mode = states(), "raw_logprobs"
    model = type("Model", (), {"compute_logits": work})()
    worker = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(sampler=sampler, model=model),
        vllm_config=types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context={})),
    )
    beside = Beside(worker, lambda: False)
    monkeypatch.setattr(beside, "_allowed", lambda: True)
    with Pace([*beside._layers(), *beside._sampling()], gpu.finish, clock=lambda: gpu.now_s, rest=gpu.rest).kept():
        model.compute_logits()
        sampler.sampling_states.apply_staged_writes()  # is next to nothing
        sampler.sampling_states.apply_temperature()
        sampler.sampling_states.apply_min_p()
        module.gumbel_sample()
    assert len(gpu.rests) == 3, "the first begins the burst"
    assert module.gumbel_sample is work and not vars(model)
    assert list(Beside(types.SimpleNamespace(model_runner=types.SimpleNamespace(sampler=None)), lambda: False)._sampling()) == []


def test_an_order_to_hurry_counts_at_once_though_nobody_takes_orders_yet() -> None:
    """Its step loop is in the middle of vLLM's start, and hands nothing over before that is done."""
    life = EngineLife.__new__(EngineLife)
    life.hurried, life._orders, life._post = threading.Event(), deque(), None
    life._on_order(Fence(epoch=1))
    assert not life.hurried.is_set()
    life._on_order(Hurry())
    assert life.hurried.is_set() and list(life._orders) == [Fence(epoch=1)]
