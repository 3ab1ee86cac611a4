"""What of the vLLM engine needs no vLLM: its command line, the names of blocks, the versions."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shadowsup.wire.engine import EngineState, Phase
from shadowsup.workers.heartbeat import Gap, Vitals
from shadowsup.workers.vllm import arguments, graphs, versions
from shadowsup.workers.vllm.hashing import SIZE, BlockHasher
from shadowsup.workers.vllm.life import EngineLife

ROOT = b"none"


def hasher(salt: bytes = b"salt", root: bytes = ROOT) -> BlockHasher:
    made = BlockHasher(lambda: root, lambda content: json.dumps(content, default=bytes.hex).encode())
    made.salt = salt
    return made


def test_a_block_is_named_by_its_tokens_and_all_before_it() -> None:
    name = hasher()
    first, other = name((ROOT, (1, 2), None)), name((ROOT, (1, 3), None))
    assert len(first) == SIZE
    assert len({first, other, name((first, (1, 2), None)), name((other, (1, 2), None)), name((ROOT, (2, 1), None))}) == 5


def test_the_name_does_not_depend_on_what_stands_for_no_parent() -> None:
    assert hasher(root=b"one")((b"one", (1, 2), None)) == hasher(root=b"two")((b"two", (1, 2), None))


def test_another_salt_or_extra_key_is_another_name() -> None:
    names = [hasher()((ROOT, (1,), None)), hasher(b"pepper")((ROOT, (1,), None))]
    names += [hasher()((ROOT, (1,), extra)) for extra in (("image",), ("tenant",))]
    assert len(set(names)) == 4


@dataclass
class Request:
    """What is looked at of vLLM's."""

    all_token_ids: list[int]
    block_hashes: list[bytes] = field(default_factory=list)
    mm_features: list[object] = field(default_factory=list)
    lora_request: object = None
    cache_salt: str | None = None
    prompt_embeds: object = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def test_all_blocks_of_a_request_are_named_as_one_by_one() -> None:
    name, tokens = hasher(), list(range(1000, 1000 + 70))
    one_by_one: list[bytes] = []
    for start in range(0, 64, 16):
        one_by_one.append(name((one_by_one[-1] if one_by_one else ROOT, tuple(tokens[start : start + 16]), None)))
    assert name.of_request(Request(tokens), 16) == one_by_one
    assert name.of_request(Request(tokens, one_by_one[:3]), 16) == one_by_one[3:]
    assert name.of_request(Request(tokens, one_by_one), 16) == []
    assert name.of_request(Request(tokens[:15]), 16) == []


def test_a_request_with_extra_keys_is_left_to_vllm() -> None:
    for more in ({"cache_salt": "tenant"}, {"lora_request": object()}, {"mm_features": [object()]}, {"prompt_embeds": object()}):
        assert hasher().of_request(Request([1] * 32, **more), 16) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_len": 4096}, ["--max-model-len", "4096"]),
        ({"--max-model-len": "4k"}, ["--max-model-len", "4k"]),
        ({"enforce_eager": True, "enable_log_requests": False}, ["--enforce-eager", "--no-enable-log-requests"]),
        ({"compilation_config": {"mode": 3}}, ["--compilation-config", '{"mode": 3}']),
        ({"allowed_origins": ["a", "b"]}, ["--allowed-origins", "a", "b"]),
        ({"chat_template": None}, []),
    ],
)
def test_options_are_written_as_vllm_takes_them(given: dict[str, Any], words: list[str]) -> None:
    assert arguments.words(given) == words


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1.post1", "0.32.0", "0.32.9+cpu"])
def test_memory_is_kept_for_tested_versions(version: str) -> None:
    assert versions.refusal(version) is None


@pytest.mark.parametrize(
    ("version", "why"), [("0.25.3", "outside"), ("0.33.0", "outside"), ("1.0", "outside"), ("dev", "no version"), (None, "no vLLM")]
)
def test_memory_is_kept_for_no_other(version: str | None, why: str) -> None:
    refused = versions.refusal(version)
    assert refused is not None
    assert why in refused


def test_a_parked_engine_that_follows_fresh_blocks_says_so_in_its_beats() -> None:
    """A supervisor that adopts it would take it for one that holds other blocks, and give up those that both hold."""
    told: list[Vitals] = []
    life: Any = object.__new__(EngineLife)
    life.writer, life.device = None, "host"
    life._heart = SimpleNamespace(vitals=Vitals(state=EngineState.PARKED, phase=Phase.PARKED, kv_set="set-1"), update=told.append)
    life._kv = SimpleNamespace(set_id="set-2", reader="the ledger of set-2")
    life._watch = SimpleNamespace(catch_up=lambda: True)
    followed: list[str] = []
    life._engine = SimpleNamespace(follow=followed.append)
    life._tock()
    assert [vitals.kv_set for vitals in told] == ["set-2"]
    assert followed == ["the ledger of set-2"]


def test_the_beat_shows_the_oldest_of_the_steps_in_flight_and_a_gap_is_that_steps() -> None:
    """A step of one token that waits behind a prefill has not the time of its own kind, but the prefill's."""
    gaps: list[Gap] = []
    life: Any = object.__new__(EngineLife)
    heart = SimpleNamespace(vitals=Vitals(state=EngineState.ACTIVE, phase=Phase.IDLE), step_ended=gaps.append)
    heart.update = lambda vitals: setattr(heart, "vitals", vitals)
    life._heart, life._canary, life._told_first, life._flying = heart, None, True, deque()
    life.writer = SimpleNamespace(check=lambda: None)
    life._engine = SimpleNamespace(inflight=1, queued=0, kv_counts=lambda: None)
    life._kv_counted_s = 0.0

    def shown() -> tuple[Phase, int]:
        return heart.vitals.phase, heart.vitals.step_tokens

    life.step_begins(Phase.PREFILL, 8192)
    since_s = heart.vitals.since_s
    life.step_begins(Phase.DECODE, 1)
    assert shown() == (Phase.PREFILL, 8192) and heart.vitals.since_s == since_s
    life.step_ended(1, Phase.DECODE, progressed=True)
    assert shown() == (Phase.DECODE, 1)
    life.step_ended(0, Phase.DECODE, progressed=False)  # an empty one: nothing was begun for it
    assert shown() == (Phase.DECODE, 1)
    life.step_ended(1, Phase.DECODE, progressed=True)
    assert shown() == (Phase.DECODE, 0)
    assert [(gap.phase, gap.tokens) for gap in gaps] == [(Phase.PREFILL, 8192), (Phase.DECODE, 1)]


DEFAULT_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""What vLLM captures (0.26, 0.32)."""


def vllm_config(sizes: list[int] | None, *, compile_sizes: list[str] | None = None, max_num_seqs: int = 1) -> SimpleNamespace:
    compilation = SimpleNamespace(cudagraph_capture_sizes=sizes, compile_sizes=compile_sizes)
    return SimpleNamespace(compilation_config=compilation, scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))


def padded(batch: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= batch)


def test_an_engine_in_a_hurry_captures_fewer_graphs_and_pads_a_batch_by_half_at_most() -> None:
    kept = graphs.thinned(DEFAULT_SIZES)
    assert len(kept) <= 15 < 51 == len(DEFAULT_SIZES)
    assert set(kept) <= set(DEFAULT_SIZES)
    assert (kept[0], kept[-1]) == (1, 512)
    for batch in range(1, 513):
        assert padded(batch, kept) <= max(padded(batch, DEFAULT_SIZES), graphs.PADDED * batch)


@pytest.mark.parametrize("sizes", [[], [1], [7], [1, 2], [3, 500], [8, 16, 24]])
def test_few_graphs_are_captured_as_they_are(sizes: list[int]) -> None:
    assert graphs.thinned(sizes) == sizes


def test_sizes_that_are_compiled_for_are_captured() -> None:
    kept = graphs.thinned(DEFAULT_SIZES, keep=[40, 240])
    assert {40, 240} <= set(kept)
    config = vllm_config([1, 2, 3, 4, 5], compile_sizes=["4"])
    graphs.hurry(config)
    assert config.compilation_config.cudagraph_capture_sizes == [1, 3, 4, 5]


def test_all_sequences_that_may_decode_at_once_keep_a_graph() -> None:
    config = vllm_config([size for size in DEFAULT_SIZES if size <= 128], max_num_seqs=64)
    graphs.hurry(config)
    assert 64 in config.compilation_config.cudagraph_capture_sizes


def test_nothing_is_changed_where_no_graph_is_captured() -> None:
    config = vllm_config(None)
    graphs.hurry(config)
    assert config.compilation_config.cudagraph_capture_sizes is None
