"""`args:` of a transformers worker: strict, all that is wrong at once, with a suggestion."""

from __future__ import annotations

from typing import Any

import pytest

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.arguments import parse


def test_defaults_and_values() -> None:
    assert parse({}).max_batch == 16 and parse({}).max_batch_tokens == 512
    given = parse({"max_batch": 4, "max_context": None, "threads": 3, "load_format": "dummy", "config": {"model_type": "llama"}})
    assert (given.max_batch, given.max_context, given.threads) == (4, None, 3)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_bach": 3}, "did you mean max_batch"),
        ({"zzz": 3}, "there are max_batch"),
        ({"trust_remote_code": True}, "code that comes with a model is not run"),
        ({"dtype": "float16"}, "set dtype"),
        ({"max_batch": 0}, "above 0, not 0"),
        ({"max_batch": True}, "above 0"),
        ({"max_batch": "4"}, "above 0, not '4'"),
        ({"max_batch": 600}, r"max_batch_tokens \(512\) is less"),
        ({"load_format": "gguf"}, "auto or dummy"),
        ({"config": {}}, "load_format: dummy only"),
        ({"config": 3}, "keys of a config.json"),
        ({"chat_template": 3}, "wants text"),
    ],
)
def test_what_is_wrong_is_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkerError, match=words) as refused:
        parse(args)
    assert refused.value.fatal


def test_all_errors_come_at_once() -> None:
    with pytest.raises(WorkerError) as refused:
        parse({"max_bach": 3, "threads": -1, "trust_remote_code": True})
    assert refused.value.message.count(";") == 2


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert parse({}).thread_count() == 3 and parse({"threads": 5}).thread_count() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert parse({}).thread_count() is None
