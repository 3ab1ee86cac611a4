"""The engine's answers: equal to transformers' own, whatever else runs; and what it refuses. On a tiny random llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_world import TINY, Host, Hosts, keeper_process, prompt_of, submit, tiny_spec
from transformers import AutoConfig, AutoModelForCausalLM

from shadowsup.wire.engine import Phase
from shadowsup.wire.link import Replay, Sampling, Submit
from shadowsup.workers.errors import WorkerError

keeper = pytest.fixture(scope="module")(keeper_process)


@pytest.fixture
def hosts(keeper: str, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(keeper, request.node.name)
    yield made
    made.close()


@pytest.fixture
def active(hosts: Hosts) -> Host:
    host = hosts.start(tiny_spec())
    host.promote()
    return host


def reference(host: Host, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of transformers' generate with the same weights."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY), dtype=torch.float32)
    loaded = host.engine._loaded
    assert loaded is not None
    model.load_state_dict({name: value.clone() for name, value in loaded.model.state_dict().items()})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def test_greedy_output_equals_transformers_generate(active: Host) -> None:
    prompts = [prompt_of(length, length) for length in (1, 15, 16, 17, 70)]
    streams = active.run(*[submit(f"r{at}", prompt, max_tokens=40) for at, prompt in enumerate(prompts)])
    for stream, prompt in zip(streams, prompts, strict=True):
        assert stream.prompt_ids == prompt and stream.finish_reason == "length"
        assert stream.ids == reference(active, prompt, 40)


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(active: Host) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12, "frequency_penalty": 0.3},
        {"temperature": 1.2, "top_k": 20, "seed": 13, "stop": (" 3",)},
        {"temperature": 1.0, "seed": 14, "ignore_eos": False, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 11, "min_tokens": 10, "ignore_eos": False},
    ]
    made = [(prompt_of(9 + 11 * at, at), option) for at, option in enumerate(options)]
    together = active.run(*[submit(f"t{at}", prompt, **option) for at, (prompt, option) in enumerate(made)])
    alone = [active.run(submit(f"s{at}", prompt, **option))[0] for at, (prompt, option) in enumerate(made)]
    for one, other in zip(together, alone, strict=True):
        assert (one.ids, one.text, one.finish_reason) == (other.ids, other.text, other.finish_reason)
    assert len({tuple(stream.ids) for stream in together}) == len(made)


def test_the_weights_are_one_copy_that_nobody_can_write(active: Host) -> None:
    loaded = active.engine._loaded
    assert loaded is not None
    addresses = {kept.address for name, kept in loaded.kept.tensors.items() if ":" not in name}
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    assert {parameter.data_ptr() for parameter in parameters.values()} <= addresses
    for name, buffer in loaded.model.named_buffers():
        assert buffer.data_ptr() not in {kept.address for kept in loaded.kept.tensors.values()}, f"buffer {name} is shared"


def test_a_second_engine_attaches_and_answers_the_same(hosts: Hosts, active: Host) -> None:
    expected = active.run(submit("a", prompt_of(20), temperature=1.0))[0]
    other = hosts.start(tiny_spec(2))
    assert other.engine._loaded is not None and not other.engine._loaded.kept.published
    other.promote(2)
    assert other.run(submit("b", prompt_of(20), epoch=2, temperature=1.0))[0].ids == expected.ids


def test_tied_weights_stay_tied_and_are_kept_once(hosts: Hosts) -> None:
    for seq in (1, 2):
        host = hosts.start(tiny_spec(seq, config={**TINY, "tie_word_embeddings": True}))
        loaded = host.engine._loaded
        assert loaded is not None and "lm_head.weight" not in loaded.kept.tensors
        assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    host.promote()
    assert len(host.run(submit("a", prompt_of(5), max_tokens=4))[0].ids) == 4


def test_bfloat16_runs_too(hosts: Hosts) -> None:
    import msgspec

    host = hosts.start(msgspec.structs.replace(tiny_spec(), dtype="bfloat16"))
    assert host.engine.geometry().blocks == 128
    host.promote()
    assert len(host.run(submit("a", prompt_of(40), max_tokens=20))[0].ids) == 20


def test_progress_and_phases_are_told(hosts: Hosts) -> None:
    host = hosts.start(tiny_spec())
    assert host.engine.phase is Phase.PARKED and host.engine.kv_counts() is None
    host.promote()
    assert host.engine.phase is Phase.IDLE and not host.step()
    host.submit(submit("a", prompt_of(80), max_tokens=3))
    assert host.engine.phase is Phase.PREFILL
    host.step(2)
    assert host.engine.phase is Phase.DECODE
    host.finish()
    assert host.engine.phase is Phase.IDLE


# --- refused requests -----------------------------------------------------------------------------------------------------------


def rejected(host: Host, request: Submit) -> tuple[int, str, str | None]:
    stream = host.run(request)[0]
    assert stream.rejected is not None
    return stream.rejected.status, stream.rejected.message, stream.rejected.param


def test_a_request_longer_than_the_context_is_told_the_figures(active: Host) -> None:
    status, message, param = rejected(active, submit("a", prompt_of(600)))
    assert status == 400 and "512" in message and "600" in message and param == "prompt"
    status, message, param = rejected(active, submit("b", prompt_of(500), max_tokens=100))
    assert status == 400 and "600" in message and "100 of max_tokens" in message and param == "max_tokens"


def test_a_prompt_that_never_fits_the_pool_is_told_so(hosts: Hosts) -> None:
    host = hosts.start(tiny_spec(blocks=12, reserve=2))
    host.promote()
    assert host.engine.max_context == 160
    status, message, _ = rejected(host, submit("a", prompt_of(161), max_tokens=None))
    assert status == 400 and "KV cache holds 160" in message
    stream = host.run(submit("b", prompt_of(100), max_tokens=None))[0]
    assert (stream.finish_reason, len(stream.ids)) == ("length", 60), "one that fits runs until the pool is full"


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (Submit(rid="a", epoch=1, prompt="", sampling=Sampling(seed=1)), "prompt", "no tokens"),
        (Submit(rid="a", epoch=1, prompt_ids=(5, 400), sampling=Sampling(seed=1)), "prompt", "token id 400"),
        (Submit(rid="a", epoch=1, messages=({"content": "x"},), sampling=Sampling(seed=1)), "messages[0].role", "no role"),
        (
            Submit(rid="a", epoch=1, messages=({"role": "user", "content": [{"type": "image_url"}]},), sampling=Sampling(seed=1)),
            "messages[0].content",
            "image_url",
        ),
    ],
)
def test_a_prompt_that_is_none_is_the_clients_error(active: Host, request_: Submit, param: str, words: str) -> None:
    status, message, named = rejected(active, request_)
    assert status == 400 and words in message and named == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_number_that_would_spoil_a_step_is_refused(active: Host, options: dict[str, Any], param: str) -> None:
    """A step that raises ends the engine, and the replay would end the next one."""
    assert rejected(active, submit("a", prompt_of(5), **options))[::2] == (400, param)


def test_a_request_for_another_epoch_is_sent_back(active: Host) -> None:
    stream = active.run(submit("a", prompt_of(5), epoch=9))[0]
    assert stream.rejected is not None and stream.rejected.status == 409 and stream.rejected.retryable


def test_a_duplicate_does_not_disturb_the_request_that_runs(active: Host) -> None:
    request = submit("a", prompt_of(5), max_tokens=10)
    active.submit(request)
    active.step(3)
    active.engine.submit(request)
    stream = active.finish()["a"]
    assert len(stream.ids) == 10 and len(stream.cached) == 1


def test_a_cancelled_request_says_nothing_more(active: Host) -> None:
    active.submit(submit("a", prompt_of(20)), submit("b", prompt_of(20, 1)))
    active.step(3)
    active.engine.cancel("a")
    active.engine.cancel("nobody")
    got = len(active.streams["a"].ids)
    active.finish()
    assert len(active.streams["a"].ids) == got and len(active.streams["b"].ids) == 32
    # The same id may come again, with what its client has.
    replay = active.streams["a"].replay(1)
    active.submit(replay, streams={"a": active.streams["a"]})
    assert len(active.finish()["a"].ids) == 32


def test_messages_and_plain_prompts_are_read(active: Host) -> None:
    chat = Submit(
        rid="a",
        epoch=1,
        messages=({"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},),
        sampling=Sampling(seed=1, max_tokens=2),
    )
    stream = active.run(chat)[0]
    assert bytes(stream.prompt_ids) == b"user: Hi!\nassistant: "
    assert bytes(active.run(submit("b", "abc", max_tokens=1))[0].prompt_ids) == b"abc"


def test_a_replay_longer_than_the_context_just_ends(active: Host) -> None:
    replay = Replay(prompt_ids=prompt_of(500), output_ids=(5,) * 12, delivered_chars=0)
    stream = active.run(Submit(rid="a", epoch=1, replay=replay, sampling=Sampling(seed=1)))[0]
    assert stream.finish_reason == "length" and stream.ids == []


# --- refused engines --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"config": {**TINY, "model_type": "nonsense"}}, "nonsense"),
        ({"config": {"vocab_size": 300}}, "model_type"),
        ({"config": {**TINY, "vocab_size": 100}}, "256"),
        ({"max_context": 4096}, "beyond the model's 512"),
        ({"max_bach": 4}, "did you mean max_batch"),
    ],
)
def test_an_engine_that_can_never_run_says_so_at_once(keeper: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkerError, match=words) as refused:
        Host(keeper, tiny_spec(**args))
    assert refused.value.fatal


def test_too_little_memory_for_kv_is_told_with_figures(keeper: str) -> None:
    with pytest.raises(WorkerError, match="holds 4 blocks") as refused:
        Host(keeper, tiny_spec(blocks=4, reserve=4))
    assert refused.value.fatal and "or more" in refused.value.hint
