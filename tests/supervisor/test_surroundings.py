"""What is found on a machine for a first config."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from doctor_world import GIB, FakeMachine, gpu, with_gpus

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor.surroundings import Environment, Surroundings, environments, hub_models, look

SDK = {"pyzmq": "27.0", "msgspec": "0.19", "numpy": "2.0"}


def environment(prefix: Path, **versions: str) -> Path:
    """Make a folder that looks like a virtual environment; names with a dash as ``cuda_bindings``."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").touch()
    for name, version in versions.items():
        (prefix / "lib/python3.12/site-packages" / f"{name}-{version}.dist-info").mkdir(parents=True)
    return prefix


def cached(hub: Path, repository: str, *, size: int = 10, age_s: float = 0.0, **config: object) -> None:
    """Put a model into a hub cache."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    weights = snapshot / "model.safetensors"
    weights.write_bytes(b"\0" * size)
    os.utime(weights, (1e9 - age_s, 1e9 - age_s))


def test_environments_are_found_where_people_have_them_and_once(tmp_path: Path) -> None:
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    environment(home / "miniconda3/envs/llm", transformers="5.20.0", torch="2.12.0", cuda_bindings="13.0")
    environment(home / ".local/share/uv/tools/vllm", vllm="0.28.1", torch="2.11.0")
    environment(home / "plain", requests="2.0")
    active = environment(cwd / ".venv", transformers="5.24.1")
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{home}/.local/share/uv/tools/vllm/bin/python\nimport vllm\n")
    ours, *others = environments({"VIRTUAL_ENV": str(active), "PATH": f"{tmp_path}/bin:/nowhere"}, home, cwd)
    assert ours.ours
    assert [(each.python.relative_to(tmp_path).parts[-3], dict(each.versions)) for each in others] == [
        (".venv", {"transformers": "5.24.1"}),
        ("vllm", {"vllm": "0.28.1", "torch": "2.11.0"}),
        ("llm", {"transformers": "5.20.0", "torch": "2.12.0", "cuda-bindings": "13.0"}),
    ]


@pytest.mark.parametrize(
    ("versions", "runs", "on_gpu"),
    [
        ({"torch": "2.13.0", "transformers": "5.24.0", "cuda-bindings": "13.0"}, True, True),
        ({"torch": "2.13.0+cpu", "transformers": "5.24.0", "cuda-bindings": "13.0"}, True, False),
        ({"torch": "2.13.0+cu130", "transformers": "5.24.0"}, True, False),
        ({"torch": "2.13.0", "transformers": "4.55.0"}, False, False),
        ({"transformers": "5.24.0"}, False, False),
    ],
)
def test_what_an_environment_is_good_for(versions: dict[str, str], runs: bool, on_gpu: bool) -> None:
    found = Environment(python=Path("/e/bin/python"), versions=SDK | versions)
    assert (found.runs_transformers, found.on_gpu) == (runs, on_gpu)


def test_models_in_the_cache_are_those_that_can_be_served(tmp_path: Path) -> None:
    cached(tmp_path, "a/good", size=100)
    cached(tmp_path, "a/older", size=50, age_s=100)
    cached(tmp_path, "a/quantised", quantization_config={"bits": 4})
    cached(tmp_path, "a/encoder", architectures=["BertModel"])
    cached(tmp_path, "a/halfway")
    (tmp_path / "models--a--halfway/snapshots/abc/model.safetensors").unlink()
    cached(tmp_path, "a/broken")
    (tmp_path / "models--a--broken/snapshots/abc/config.json").write_text("{")
    (tmp_path / "datasets--a--b").mkdir()
    models = tuple(hub_models(tmp_path))
    assert [(model.repository, model.size) for model in models] == [("a/good", 100), ("a/older", 50)]
    around = Surroundings(models=models)
    assert [around.model(room) and around.model(room).repository for room in (1000, 60, 10)] == ["a/good", "a/older", None]  # type: ignore[union-attr]
    assert tuple(hub_models(tmp_path / "nowhere")) == ()


def test_gpus_are_seen_with_what_is_free_and_what_is_in_the_way(tmp_path: Path) -> None:
    part = {"uuid": "MIG-1", "name": "NVIDIA H200 MIG 1g.18gb", "total": 16 * GIB}
    machine = FakeMachine(
        environ={"HF_HOME": str(tmp_path)},
        probes=with_gpus(gpu(0, used=100 * GIB), gpu(1, compute_mode=3), gpu(2, mig=True, instances=[part]), {"index": 3, "lost": "x"}),
    )
    around = look(machine, home=tmp_path, cwd=tmp_path)
    assert [(each.id, each.free // GIB, bool(each.problem)) for each in around.gpus] == [
        ("0", 40, False),
        ("1", 140, True),
        ("MIG-1", 16, False),
    ]
    assert around.freest() == around.gpus[0]
    assert around.memory == 64 * GIB
    machine.probes["nvml"] = Unanswered("no answer in 20 s")
    assert "see shadowsup doctor" in look(machine, home=tmp_path, cwd=tmp_path).notes[0]


def test_the_newest_vllm_is_taken() -> None:
    old, new = (Environment(python=Path(f"/{v}/bin/python"), versions=SDK | {"vllm": v}) for v in ("0.26.2", "0.28.0"))
    assert Surroundings(environments=(old, new)).vllm() is new
