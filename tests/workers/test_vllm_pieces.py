"""What of the vLLM engine needs no vLLM: its command line, the names of blocks, the versions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shadowsup.workers.vllm import arguments, versions
from shadowsup.workers.vllm.hashing import SIZE, BlockHasher

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
