"""What fits on a GPU, with the arithmetic, and what is learnt of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shadowsup.supervisor import model_facts
from shadowsup.supervisor.config import WorkerConfig, load
from shadowsup.supervisor.device_memory import ENGINE_OVERHEAD, GIB, VLLM_OVERHEAD, Overheads, judge, measured, shares
from shadowsup.supervisor.devices import Gpu
from shadowsup.supervisor.node_sensor import learn_overheads
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.wire.sensor import GpuReading

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
H200 = Gpu(uuid=A, index=0, name="NVIDIA H200", memory=140 * GIB)
FACTS = {"weights": 15 * GIB, "kv": 100 * GIB, "path": "/m", "revision": None, "dtype": "bfloat16"}


def config(tmp_path: Path, *workers: dict[str, Any]) -> list[WorkerConfig]:
    common = {"engine": "transformers", "model": "/m", "gpus": [0], "kv": {"size": "40GiB"}}
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "workers": [{**common, "name": f"w{n}", **w} for n, w in enumerate(workers)]}))
    return list(load(path).config.workers)


def book(tmp_path: Path) -> Overheads:
    return Overheads(tmp_path / "overheads.json")


def test_weights_kv_and_every_engine_are_added_up(tmp_path: Path) -> None:
    (worker,) = config(tmp_path, {"shadows": 2})
    (verdict,) = judge([H200], shares(worker, [H200], FACTS, book(tmp_path)))
    assert (verdict.fits, verdict.needed) == (True, 15 * GIB + 40 * GIB + 4 * ENGINE_OVERHEAD)
    assert verdict.arithmetic == ("w0: weights 15.0 GiB + KV 40.0 GiB + 4 engines × 1.5 GiB (estimate)",)


def test_the_first_vllm_engine_has_its_weights_twice_before_there_is_kv(tmp_path: Path) -> None:
    (worker,) = config(tmp_path, {"engine": "vllm", "kv": {"size": "2GiB"}})
    (verdict,) = judge([H200], shares(worker, [H200], {**FACTS, "weights": 60 * GIB}, book(tmp_path)))
    assert (verdict.fits, verdict.needed) == (True, 2 * 60 * GIB + VLLM_OVERHEAD)
    assert "(at its first start 2 × weights + 1 engine: 123.5 GiB)" in verdict.words()
    (verdict,) = judge([H200], shares(worker, [H200], {**FACTS, "weights": 70 * GIB}, book(tmp_path)))
    assert verdict.fits is False
    (worker,) = config(tmp_path, {"engine": "vllm"})
    (verdict,) = judge([H200], shares(worker, [H200], FACTS, book(tmp_path)))
    assert verdict.needed == 15 * GIB + 40 * GIB + 3 * VLLM_OVERHEAD
    assert "first start" not in verdict.words()


def test_workers_that_share_weights_hold_them_once_and_others_do_not(tmp_path: Path) -> None:
    one, two, three = config(tmp_path, {}, {}, {})
    known = book(tmp_path)
    found = [*shares(one, [H200], FACTS, known, "k"), *shares(two, [H200], FACTS, known, "k"), *shares(three, [H200], FACTS, known, "x")]
    (verdict,) = judge([H200], found)
    assert verdict.needed == 2 * 15 * GIB + 3 * 40 * GIB + 9 * ENGINE_OVERHEAD
    assert verdict.fits is False
    assert "w1: weights shared with w0" in verdict.words()


def test_what_others_use_is_not_ours_to_have(tmp_path: Path) -> None:
    (worker,) = config(tmp_path, {"kv": {"size": "auto"}})
    found = shares(worker, [H200], FACTS, book(tmp_path))
    assert judge([H200], found)[0].fits is True
    busy = Gpu(uuid=A, index=0, name="NVIDIA H200", memory=140 * GIB, used=30 * GIB)
    (verdict,) = judge([busy], found)
    assert (verdict.fits, verdict.usable) == (False, 110 * GIB)
    assert "30.0 GiB of 140.0 GiB in use now" in verdict.words()


def test_a_model_that_is_not_here_is_not_known_to_fit_but_may_be_known_not_to(tmp_path: Path) -> None:
    small, large = config(tmp_path, {}, {"kv": {"size": "139GiB"}})
    assert judge([H200], shares(small, [H200], {}, book(tmp_path)))[0].fits is None
    assert judge([H200], shares(large, [H200], {}, book(tmp_path)))[0].fits is False


def test_what_was_measured_once_counts_from_then_on_for_the_same_engine_on_the_same_kind_of_gpu(tmp_path: Path) -> None:
    worker, other = config(tmp_path, {}, {"dtype": "float32"})
    known = book(tmp_path)
    key = Overheads.key(worker, H200)
    assert known.learn({key: GIB}) is True
    assert known.learn({key: GIB + GIB // 50}) is False  # noise
    again = book(tmp_path)
    assert [share.overhead for share in shares(worker, [H200], FACTS, again)] == [GIB]
    assert [share.overhead for share in shares(other, [H200], FACTS, again)] == [ENGINE_OVERHEAD]
    assert "3 engines × 1.0 GiB" in judge([H200], shares(worker, [H200], FACTS, again))[0].words()


def test_a_book_that_cannot_be_read_or_written_costs_only_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "overheads.json").write_text("{nonsense")
    assert book(tmp_path).get("k") is None
    gone = Overheads(tmp_path / "nowhere" / "overheads.json")
    assert gone.learn({"k": GIB}) is True
    assert gone.get("k") == GIB


def test_figures_that_make_no_sense_measure_nothing() -> None:
    assert measured(used=50 * GIB, baseline=GIB, kept=47 * GIB, engines=2) == GIB
    assert measured(used=50 * GIB, baseline=GIB, kept=60 * GIB, engines=2) is None
    assert measured(used=50 * GIB, baseline=GIB, kept=GIB, engines=0) is None


def owner(state: WorkerState, engines: int, shadows: int = 1) -> Any:
    return SimpleNamespace(
        name="w", policy=SimpleNamespace(state=state, engines=dict.fromkeys(range(engines)), settings=SimpleNamespace(shadows=shadows))
    )


@pytest.mark.parametrize(
    ("who", "learnt"),
    [
        (owner(WorkerState.HEALTHY, 2), {A: GIB}),
        (owner(WorkerState.RECOVERING, 2), {}),
        (owner(WorkerState.HEALTHY, 3), {}),  # one more is on its way out
    ],
)
def test_an_engine_is_measured_only_while_nothing_comes_or_goes(tmp_path: Path, who: Any, learnt: dict[str, int]) -> None:
    sensor: Any = SimpleNamespace(readings=lambda: {A: GpuReading(uuid=A, memory_used=60 * GIB)})
    kept = {A: {"weights": 15 * GIB, "kv": 40 * GIB}}
    found = learn_overheads(sensor, {"w": who}, {"w": {A: "k"}}, {A: 3 * GIB}, kept, book(tmp_path))
    assert found == learnt
    assert book(tmp_path).get("k") == learnt.get(A)


def test_only_engines_with_model_files_are_asked(tmp_path: Path) -> None:
    asked, program = config(tmp_path, {}, {"engine": "loop", "command": ["x"], "model": "m"})
    assert model_facts.known(asked) and not model_facts.known(program)
    assert "--device" in model_facts.command(asked, "python", 1) and "--device" not in model_facts.command(asked, "python", None)
