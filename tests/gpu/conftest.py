"""GPU tests run where there is a GPU and are deselected where there is none. They share processes with the benchmark of the GPU facts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shadowsup.memkeeper.client import KeeperClient

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

if TYPE_CHECKING:
    from gpu_child import Engine
    from gpu_rig import Child, KeeperProcess


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in this folder, unless the driver's control device is there."""
    if Path("/dev/nvidiactl").exists():
        return
    here = Path(__file__).parent
    gone = [item for item in items if here in item.path.parents]
    if gone:
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)


@pytest.fixture(scope="session")
def device() -> str:
    """UUID of the device that the tests use, the first one."""
    from shadowsup.supervisor.devices import read_gpus

    return next(gpu.uuid for gpu in read_gpus() if not gpu.mig_enabled)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    from gpu_rig import KeeperProcess

    started = KeeperProcess(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def client(keeper: KeeperProcess) -> Iterator[KeeperClient]:
    connected = KeeperClient(keeper.socket, "test.1")
    yield connected
    connected.close()


@pytest.fixture
def exporter() -> Iterator[Child]:
    """A process that makes device memory without a context, as the keeper does."""
    from gpu_rig import start_exporter

    child, _ = start_exporter()
    yield child
    child.close()


@pytest.fixture(scope="session")
def engine(device: str) -> Engine:
    """A context in this process, until it ends."""
    from gpu_child import Engine

    made = Engine(device)
    made.prepare()
    return made
