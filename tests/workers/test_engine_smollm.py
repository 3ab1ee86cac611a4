"""The real small model: equal to transformers' generate, alone, in a batch and across deaths."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import BLOCK, Host, keeper_process, resume, smol_spec, submit
from transformers import AutoModelForCausalLM

from shadowsup.wire.link import Sampling, Submit

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969, the first",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\n",
    "1, 1, 2, 3, 5, 8,",
]
keeper = pytest.fixture(scope="module")(keeper_process)


WEIGHTS = 540e6
"""Bytes, in float32."""
took: list[int] = []
"""Bytes of memory of its own that this process has since the publisher loaded the model."""


def own_memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.fixture(scope="module")
def publisher(keeper: str) -> Iterator[Host]:
    """Keeps the weights leased while the tests' engines come and go."""
    before = own_memory()
    host = Host(keeper, smol_spec(90), worker="publisher")
    took.append(own_memory() - before)
    yield host
    host.close()


@pytest.fixture
def hosts(keeper: str, publisher: Host, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Host] = []

    def start(seq: int, **options: Any) -> Host:
        made.append(Host(keeper, smol_spec(seq, **options), worker=request.node.name))
        return made[-1]

    yield start
    for host in made:
        host.close()


@pytest.fixture(scope="module")
def generated(publisher: Host) -> list[list[int]]:
    """64 greedy tokens a prompt by transformers' own generate over the same weights."""
    loaded = publisher.engine._loaded
    assert loaded is not None
    model = AutoModelForCausalLM.from_config(copy.deepcopy(loaded.model.config), attn_implementation="sdpa", dtype=torch.float32)
    model.load_state_dict({name: value.clone() for name, value in loaded.model.state_dict().items()})
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([loaded.codec.encode(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        found.append([int(token) for token in out[0, ids.shape[1] :]])
    return found


def test_greedy_output_equals_generate_alone_and_in_a_batch_of_8(hosts: Any, generated: list[list[int]]) -> None:
    host: Host = hosts(1)
    host.promote()
    together = host.run(*[submit(f"t{at}", prompt, max_tokens=64) for at, prompt in enumerate(PROMPTS)])
    assert [stream.ids for stream in together] == generated
    for at in (0, 2, 5):
        assert host.run(submit(f"s{at}", PROMPTS[at], max_tokens=64))[0].ids == generated[at]
    assert " Paris" in together[0].text


def test_eight_streams_survive_a_death_with_all_full_blocks(hosts: Any, generated: list[list[int]]) -> None:
    first, shadow = hosts(1), hosts(2)
    first.promote(1)
    sampled = submit("sampled", PROMPTS[1], max_tokens=64, temperature=1.0, top_p=0.95, seed=3)
    expected = first.run(sampled)[0]
    first.streams.clear()
    first.submit(*[submit(f"t{at}", prompt, max_tokens=64) for at, prompt in enumerate(PROMPTS)], sampled)
    first.step(40)
    shadow.follow()
    totals = {rid: len(stream.prompt_ids) + len(stream.ids) for rid, stream in first.streams.items()}
    died = first.die()
    started = time.perf_counter()
    kept, dropped = shadow.promote(2, fenced=False)
    promoted_s = time.perf_counter() - started
    assert dropped == 0 and kept > 16
    resume(shadow, died, 2)
    shadow.step(3)
    shadow.engine.fence()
    shadow.finish()
    for at, ids in enumerate(generated):
        stream = shadow.streams[f"t{at}"]
        assert stream.ids == ids
        assert stream.cached[-1] == (totals[f"t{at}"] - 1) // BLOCK * BLOCK
    assert (shadow.streams["sampled"].ids, shadow.streams["sampled"].text) == (expected.ids, expected.text)
    assert promoted_s < 3.0, "a few ms; the benchmarks have the figures"


def test_attaching_takes_no_time_beside_loading(hosts: Any) -> None:
    started = time.perf_counter()
    host = hosts(1)
    assert time.perf_counter() - started < 6.0, "0.4 s on an idle machine"
    assert host.engine._loaded is not None and not host.engine._loaded.kept.published


def test_the_process_holds_its_weights_once(publisher: Host) -> None:
    """What the publisher had loaded is gone: its memory is the kept set, libraries, and little else."""
    assert took[0] < WEIGHTS / 2


def test_a_conversation_ends_with_the_models_own_end(hosts: Any) -> None:
    host: Host = hosts(1)
    host.promote()
    chat = Submit(
        rid="a",
        epoch=1,
        messages=({"role": "user", "content": "Say hello."},),
        sampling=Sampling(seed=1, temperature=0.0, max_tokens=200),
    )
    stream = host.run(chat)[0]
    assert stream.finish_reason == "stop" and stream.text and "<|im_end|>" not in stream.text and stream.ids[-1] == 2
