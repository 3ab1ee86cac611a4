"""`shadowsup doctor` on a real GPU: what it says of the device, and of memory there that belongs to no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gpu_rig import Child

SIZE = 1 << 30


def doctor() -> dict[str, list[dict[str, Any]]]:
    """Return its findings by check."""
    done = subprocess.run([sys.executable, "-m", "shadowsup.supervisor.cli", "doctor", "-o", "json"], capture_output=True, text=True)
    assert done.returncode in {0, 1}, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["checks"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.fixture
def orphan(exporter: Child) -> Iterator[int]:
    """A process that has never heard of CUDA and keeps device memory by a descriptor that it inherited; its maker is dead."""
    from gpu_rig import export

    (fd,), _ = export(exporter, SIZE)
    holder = subprocess.Popen(["sleep", "600"], pass_fds=[fd])
    os.close(fd)
    exporter.close()
    yield holder.pid
    holder.kill()
    holder.wait()


def test_every_check_of_the_gpu_is_made_and_fds_can_be_exported() -> None:
    found = doctor()
    assert {"driver", "fd-export", "persistence", "compute-mode", "mps", "mig", "gpu-memory"} <= set(found)
    assert found["driver"][0]["evidence"].startswith("driver ")
    assert found["fd-export"][0]["level"] == "ok"
    assert all(one["remedy"] for findings in found.values() for one in findings if one["level"] in {"warning", "failed"})


def test_memory_of_no_process_is_found_with_who_holds_it_and_how_to_free_it(orphan: int) -> None:
    finding = next(one for one in doctor()["gpu-memory"] if one["level"] != "ok")
    assert "by no process that NVML lists" in finding["evidence"]
    assert str(orphan) in finding["evidence"]
    assert str(orphan) in finding["remedy"]
    assert Path(f"/proc/{orphan}").exists(), "doctor looks and touches nothing"
