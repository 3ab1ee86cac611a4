"""What a vLLM engine rehearses before it parks, and how the second model runner is given token ids. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shadowsup.workers.vllm import rehearsal, token_ids
from shadowsup.workers.vllm.rehearsal import FEW_REQUESTS, LONG_TOKENS, MOST_REQUESTS, SHORT_TOKENS, Scene, scenes


def of(**changed: Any) -> list[Scene]:
    usual: dict[str, Any] = {"requests": 1024, "batch_tokens": 8192, "model_len": 40_000, "block_tokens": 16}
    return list(scenes(**usual | changed))


def test_batches_double_until_the_most_that_run_and_small_ones_have_long_contexts_too() -> None:
    found: dict[int, list[int]] = {}
    for scene in of():
        found.setdefault(scene.requests, []).append(scene.context)
    assert list(found) == [1, 2, 4, 8, 16, 32, MOST_REQUESTS]
    for requests, contexts in found.items():
        assert contexts == ([SHORT_TOKENS, LONG_TOKENS] if requests <= FEW_REQUESTS else [SHORT_TOKENS])
    assert {scene.context for scene in of(long=False)} == {SHORT_TOKENS}


@pytest.mark.parametrize(
    "setting",
    [
        {"requests": 1},
        {"requests": 3},
        {"requests": 100},
        {"batch_tokens": 8},
        {"batch_tokens": 1},
        {"model_len": 2},
        {"model_len": 1},
        {"model_len": 300},
        {"model_len": 1_000_000},
        {"block_tokens": 4096},
        {"long": False},
        {"on_cpu": True},
        {"on_cpu": True, "requests": 1, "model_len": 20},
    ],
    ids=str,
)
def test_no_step_is_more_than_an_engine_takes(setting: dict[str, Any]) -> None:
    limits = {"requests": 1024, "batch_tokens": 8192, "model_len": 40_000, "block_tokens": 16} | setting
    found = of(**setting)
    assert found or limits["model_len"] < 2
    for scene in found:
        assert 1 <= scene.requests <= limits["requests"]
        assert 1 <= scene.computed <= min(limits["block_tokens"], scene.context)
        assert scene.computed * scene.requests <= limits["batch_tokens"]
        assert scene.context + 1 <= limits["model_len"]  # a token is sampled


def test_random_numbers_are_those_of_an_engine_that_has_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives requests without a seed one from there."""

    def drawing(*args: Any) -> None:
        np.random.randint(1000, size=158)
        torch.rand(7)
        raise ZeroDivisionError

    monkeypatch.setattr(rehearsal, "_rehearse", drawing)
    worker = SimpleNamespace(device=torch.device("cpu"))
    np.random.seed(0)
    torch.manual_seed(0)
    expected = (np.random.randint(1000, size=9).tolist(), torch.rand(9).tolist())
    np.random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(ZeroDivisionError):
        rehearsal.rehearse(worker, lambda: False)
    assert (np.random.randint(1000, size=9).tolist(), torch.rand(9).tolist()) == expected


class Staged:
    """What `StagedWriteTensor` does with what is written, as far as that matters here."""

    def __init__(self) -> None:
        self._staged_write_contents: list[int] = []
        self.copied: list[tuple[type, list[int]]] = []

    def apply_write(self) -> None:
        contents: Any = self._staged_write_contents
        if len(contents) == 13:
            raise RuntimeError("a device that is gone")
        self.copied.append((type(contents), list(contents)))
        contents.clear()


class Runner:
    def __init__(self, all_token_ids: Any) -> None:
        self.req_states = type("States", (), {"all_token_ids": all_token_ids})()


def test_many_ids_are_copied_by_way_of_an_array_and_few_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "WORTHWHILE", 10)
    staged = Staged()
    token_ids.hasten(Runner(staged))
    for count in (3, 10, 12, 0, 9):
        staged._staged_write_contents.extend(range(count))
        staged.apply_write()
        assert staged._staged_write_contents == [] and type(staged._staged_write_contents) is list
    assert [(issubclass(kind, np.ndarray), ids) for kind, ids in staged.copied] == [
        (count >= 10, list(range(count))) for count in (3, 10, 12, 0, 9)
    ]
    staged._staged_write_contents.extend(range(13))
    with pytest.raises(RuntimeError, match="gone"):
        staged.apply_write()
    assert type(staged._staged_write_contents) is list


@pytest.mark.parametrize("other", [None, object(), Runner(None), Runner(object())], ids=["no runner", "first runner", "none", "another"])
def test_a_model_runner_that_does_it_otherwise_is_left_alone(other: Any) -> None:
    token_ids.hasten(other)
