"""Models from files: what save_pretrained writes is loaded, kept and attached; what cannot be kept is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import TINY, Host, Hosts, keeper_process, prompt_of, spec, submit
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shadowsup.wire.engine import EngineSpec
from shadowsup.workers.errors import WorkerError

keeper = pytest.fixture(scope="module")(keeper_process)


@pytest.fixture
def hosts(keeper: str, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(keeper, request.node.name)
    yield made
    made.close()


def save(folder: Path, *, shard: str = "1GB", seed: int = 0, **config: Any) -> Any:
    """Write a tiny random model with a byte-level tokenizer; returns the model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TINY, **config}), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = [2, 300]
    model.save_pretrained(folder, max_shard_size=shard)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def folder_spec(folder: Path, seq: int = 1) -> EngineSpec:
    return spec(seq, str(folder), size=1 << 20, reserve=None, args={"max_batch": 4})


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("shard", "tied"), [("1GB", False), ("100KB", True)])
def test_a_folder_is_loaded_once_and_attached_by_the_next_engine(hosts: Hosts, tmp_path: Path, shard: str, tied: bool) -> None:
    model = save(tmp_path, shard=shard, tie_word_embeddings=tied)
    expected = greedy(model, prompt_of(20), 12)
    for epoch in (1, 2):
        host = hosts.start(folder_spec(tmp_path, epoch))
        loaded = host.engine._loaded
        assert loaded is not None and loaded.kept.published is (epoch == 1)
        assert loaded.eos == {2, 300}
        host.promote(epoch)
        assert host.run(submit(f"r{epoch}", prompt_of(20), epoch=epoch, max_tokens=12))[0].ids == expected


def test_changed_files_are_other_weights(hosts: Hosts, tmp_path: Path) -> None:
    save(tmp_path)
    hosts.start(folder_spec(tmp_path))
    model = save(tmp_path, seed=1)
    host = hosts.start(folder_spec(tmp_path, 2))
    assert host.engine._loaded is not None and host.engine._loaded.kept.published
    assert host.promote(1) == (0, 0)
    assert host.run(submit("a", prompt_of(9), max_tokens=8))[0].ids == greedy(model, prompt_of(9), 8)


def test_dummy_weights_of_a_real_config(hosts: Hosts, tmp_path: Path) -> None:
    save(tmp_path)
    dummy = spec(1, str(tmp_path), size=1 << 20, reserve=None, args={"load_format": "dummy"})
    host = hosts.start(dummy)
    host.promote()
    assert len(host.run(submit("a", "text", max_tokens=5))[0].ids) == 5


def test_a_quantised_model_is_refused(keeper: str, tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkerError, match="quantised") as refused:
        Host(keeper, folder_spec(tmp_path))
    assert refused.value.fatal


def test_an_unknown_architecture_is_a_clear_error(keeper: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "from_the_future"}')
    with pytest.raises(WorkerError, match="config of model") as refused:
        Host(keeper, folder_spec(tmp_path))
    assert refused.value.fatal


def test_damaged_weights_are_a_clear_error_and_nothing_is_kept(keeper: str, hosts: Hosts, tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:2000])
    with pytest.raises(WorkerError, match="cannot be loaded") as refused:
        Host(keeper, folder_spec(tmp_path))
    assert refused.value.fatal
    weights.write_bytes(whole)
    host = hosts.start(folder_spec(tmp_path, 2))
    assert host.engine._loaded is not None and host.engine._loaded.kept.published


def test_the_context_of_scaled_rotary_embeddings_is_the_original_one(hosts: Hosts, tmp_path: Path) -> None:
    """Beyond it, the frequencies of all sequences in a batch would follow the longest one."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    save(tmp_path, rope_parameters=rope, max_position_embeddings=512)
    assert hosts.start(folder_spec(tmp_path)).engine.max_context == 128
