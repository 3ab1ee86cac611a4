"""What a node makes of ``gpus:`` before anything is started: UUIDs, environments, the keeper's backend, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shadowsup.supervisor import devices, node_setup
from shadowsup.supervisor.config import load
from shadowsup.supervisor.devices import Gpu
from shadowsup.supervisor.engine_process import placed
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.node_setup import Plan
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.supervisor.scribe_client import ScribeClient

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
DIVIDED = "GPU-cccccccc-0000-0000-0000-000000000003"
MIG_1 = "MIG-cccccccc-0000-0000-0000-000000000004"
MIG_2 = "MIG-cccccccd-0000-0000-0000-000000000005"
GPUS = (
    Gpu(uuid=A, index=0, name="H200", memory=1 << 37),
    Gpu(uuid=B, index=1, name="H200", memory=1 << 37),
    Gpu(uuid=DIVIDED, index=2, name="H200", memory=1 << 37, mig_enabled=True),
    Gpu(uuid=MIG_1, index=2, name="H200 MIG 1g.18gb", memory=1 << 34, parent=DIVIDED),
    Gpu(uuid=MIG_2, index=2, name="H200 MIG 1g.18gb", memory=1 << 34, parent=DIVIDED),
)


async def plan(tmp_path: Path, *workers: dict[str, Any], found: tuple[Gpu, ...] = GPUS, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(devices, "read_gpus", lambda: found)
    common = {"engine": "transformers", "model": str(tmp_path), "kv": {"size": "64MiB"}}
    content = {"version": 1, "workers": [{**common, "name": f"w{number}", **worker} for number, worker in enumerate(workers)]}
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump(content))
    paths = NodePaths(runtime=tmp_path / "run", state=tmp_path / "state")
    return await node_setup.plan(load(path).config, paths, ScribeClient(paths.scribe), {"transformers": "fake:create"}, lambda words: None)


async def test_engines_see_their_gpu_by_uuid_and_the_keeper_sees_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await plan(tmp_path, {"gpus": [1]}, {"gpus": [A[:12]], "spares": [1]}, {}, monkeypatch=monkeypatch)
    launches = [worker.recipe.launch(f"{worker.name}.1", 1) for worker in made.workers]
    assert [launch.spec.gpus for launch in launches if launch.spec is not None] == [(B,), (A,), ()]
    assert [launch.env["CUDA_VISIBLE_DEVICES"] for launch in launches] == [B, A, ""]
    assert {launch.env["CUDA_DEVICE_ORDER"] for launch in launches} == {"PCI_BUS_ID"}
    assert made.backend == "cuda"
    assert made.keeper_gpus == (B, A)


async def test_the_nursery_sees_no_gpu_and_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await plan(tmp_path, {"gpus": [0]}, {"gpus": [1]}, {}, monkeypatch=monkeypatch)
    (nursery,) = made.nurseries
    assert nursery.env["CUDA_VISIBLE_DEVICES"] == ""


async def test_workers_may_share_a_gpu_when_each_says_how_much_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await plan(tmp_path, {"gpus": [0]}, {"gpus": [0]}, monkeypatch=monkeypatch)
    assert [worker.gpus for worker in made.workers] == [(A,), (A,)]
    with pytest.raises(SupervisorError, match=r"w0, w1 share GPU .* and w1 would take all of it") as refused:
        await plan(tmp_path, {"gpus": [0]}, {"gpus": [0], "kv": {"size": "auto"}}, monkeypatch=monkeypatch)
    assert refused.value.exit_code == ExitCode.USAGE


async def test_a_machine_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SupervisorError, match="no GPU 0 here; there is no GPU"):
        await plan(tmp_path, {"gpus": [0]}, found=(), monkeypatch=monkeypatch)


async def test_one_mig_instance_is_all_that_a_node_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await plan(tmp_path, {"gpus": [MIG_1]}, monkeypatch=monkeypatch)
    assert made.keeper_gpus == (MIG_1,)
    with pytest.raises(SupervisorError, match="one MIG instance"):
        await plan(tmp_path, {"gpus": [MIG_1]}, {"gpus": [MIG_2]}, monkeypatch=monkeypatch)
    with pytest.raises(SupervisorError, match="is divided by MIG"):
        await plan(tmp_path, {"gpus": [2]}, monkeypatch=monkeypatch)


async def test_what_does_not_fit_on_its_gpu_is_refused_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SupervisorError, match=r"GPU 0 \(H200\): 259\.0 GiB of 128\.0 GiB needed, does not fit: .*w1: .*KV 100\.0 GiB"
    ) as refused:
        await plan(
            tmp_path,
            {"gpus": [0], "kv": {"size": "150GiB"}},
            {"gpus": [0], "kv": {"size": "100GiB"}},
            {"gpus": [1]},
            monkeypatch=monkeypatch,
        )
    assert "kv.size smaller" in refused.value.hint


async def test_a_worker_knows_its_spares_by_uuid_and_can_be_launched_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await plan(tmp_path, {"gpus": [0], "spares": [1]}, {"gpus": [0]}, monkeypatch=monkeypatch)
    first, second = (worker.policy(NurseryState.NONE).settings for worker in made.workers)
    assert (first.gpus, first.spares, second.spares) == ((A,), (B,), ())
    launch = made.workers[0].recipe.launch("w0.1", 1)
    there = placed(launch, (B,), verify=True)
    assert there.spec is not None and (there.spec.gpus, there.spec.verify) == ((B,), "full")
    assert there.env["CUDA_VISIBLE_DEVICES"] == B
    assert there.data["gpus"] == B
    assert launch.env["CUDA_VISIBLE_DEVICES"] == A, "only this engine's"
    same = placed(launch, None, verify=True)
    assert same.spec is not None and (same.spec.gpus, same.spec.verify, same.spec.hurry) == ((A,), "full", False)
    waited_for = placed(launch, None, verify=False, hurry=True)
    assert waited_for.spec is not None and (waited_for.spec.verify, waited_for.spec.hurry) == (launch.spec.verify, True)
