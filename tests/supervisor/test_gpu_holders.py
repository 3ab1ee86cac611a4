"""Who holds a GPU, named before a node starts (P01, P05): real processes, real open files; device, driver and NVML are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from other_user import as_nobody, needs_root

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor.gpu_holders import look
from shadowsup.supervisor.tree import TAG_NAME

UUID, OTHER = "GPU-1111", "GPU-2222"
GPUS = [{"uuid": UUID, "index": 0, "name": "H200"}]
HOLD = "import sys\nfile = open(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The second GPU of this machine has the first device file: numbers of files and indices differ."""
    for number, (uuid, minor) in enumerate([(UUID, 1), (OTHER, 0)]):
        folder = tmp_path / "gpus" / f"0000:{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def holders(machine: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started = {}
    for name, environment in (("nvidia0", {}), ("nvidia1", {TAG_NAME: "demo/chat.3/ab12"}), ("nvidiactl", {})):
        started[name] = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(machine / name)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    for child in started.values():
        assert child.stdout is not None and child.stdout.readline()
    yield started
    for child in started.values():
        child.kill()
        child.communicate()


def nothing(command: Sequence[str], timeout_s: float) -> bytes:
    return b'{"absent": "no driver"}'


def find(machine: Path, run: object = nothing, ours: Sequence[int] = ()) -> list[str]:
    return look(GPUS, ours, run=run, device=f"{machine}/nvidia", driver=machine / "gpus").lines()  # type: ignore[arg-type]


def test_who_has_the_device_open_is_named_with_the_engine_it_was(machine: Path, holders: dict[str, subprocess.Popen[bytes]]) -> None:
    """P05: whoever has the file of *this* GPU open, which a forked child has without any context of its own."""
    (line,) = find(machine)
    pid = holders["nvidia1"].pid
    assert line.startswith(f"GPU 0 (H200) is held by engine chat.3 of node demo: pid {pid} (")
    assert f"kill {pid}" in line
    assert find(machine, ours=[pid]) == []


def test_whom_nvml_lists_is_named_with_what_it_uses(machine: Path, holders: dict[str, subprocess.Popen[bytes]]) -> None:
    users = [{"pid": os.getpid(), "used": 12_300_000_000}, {"pid": 2**22 - 1, "used": 5}]

    def nvml(command: Sequence[str], timeout_s: float) -> bytes:
        return json.dumps({"gpus": [{"uuid": UUID, "processes": users}, {"uuid": OTHER, "processes": users}, {"lost": "x"}]}).encode()

    lines = find(machine, nvml)
    assert len(lines) == 2
    (ours,) = [line for line in lines if f"pid {os.getpid()} " in line]
    assert ours.startswith("GPU 0 (H200) is held by pid") and "12.3 GB" in ours


@pytest.mark.parametrize("answer", [b"not json", b"[]", b'{"gpus": [7]}', None])
def test_an_nvml_that_hangs_or_talks_nonsense_is_said_and_the_files_still_tell(
    machine: Path, holders: dict[str, subprocess.Popen[bytes]], answer: bytes | None
) -> None:
    def broken(command: Sequence[str], timeout_s: float) -> bytes:
        if answer is None:
            raise Unanswered("no answer in 15 s")
        return answer

    lines = find(machine, broken)
    assert any("chat.3 of node demo" in line for line in lines)
    assert any("NVML does not say who uses the GPUs" in line for line in lines)


@needs_root
def test_what_an_ordinary_user_cannot_see_is_said_to_need_root(machine: Path, holders: dict[str, subprocess.Popen[bytes]]) -> None:
    for folder in (machine, *machine.parents[:3]):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)

    def ordinary() -> tuple[int, list[str]]:
        found = look(GPUS, run=nothing, device=f"{machine}/nvidia", driver=machine / "gpus")
        return found.unseen, found.lines()

    unseen, lines = as_nobody(ordinary)
    assert unseen >= 3
    assert len(lines) == 1 and lines[0].endswith("only root can see")


def test_a_machine_without_a_driver_has_no_holders(tmp_path: Path) -> None:
    assert look(GPUS, run=nothing, device=f"{tmp_path}/nvidia", driver=tmp_path / "none").held == []
