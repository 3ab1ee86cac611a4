"""The doctor on machines of every kind: what it says, and that it always says what to do."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_world import GIB, H200, FakeMachine, gpu, with_gpus

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor import compat
from shadowsup.supervisor.compat import Standing
from shadowsup.supervisor.doctor import probe
from shadowsup.supervisor.doctor.finding import Finding, Level, WantedWorker, Wants
from shadowsup.supervisor.doctor.machine import Package, Space, ThisMachine
from shadowsup.supervisor.doctor.registry import CHECKS, examine
from shadowsup.supervisor.holders import Holder
from shadowsup.workers.vllm import TESTED

CONFIG = Path("node.yaml")
ON_GPU_0 = Wants(config=CONFIG, workers=(WantedWorker(name="chat", engine="transformers", gpus=("0",), engines=2),))


def found(machine: Any, wants: Wants = Wants()) -> dict[str, list[Finding]]:  # noqa: B008 (frozen)
    """Return the findings by check. Whatever the machine: none broke, and each bad one has its remedy."""
    findings: dict[str, list[Finding]] = {}
    for finding in examine(machine, wants):
        assert "could not be checked" not in finding.evidence
        assert finding.evidence
        assert finding.remedy or finding.level in (Level.OK, Level.NOTE), finding
        findings.setdefault(finding.check, []).append(finding)
    return findings


def only(machine: Any, check: str, wants: Wants = Wants()) -> Finding:  # noqa: B008
    (finding,) = found(machine, wants)[check]
    return finding


def worst(machine: Any, wants: Wants = Wants()) -> Level:  # noqa: B008
    levels = [finding.level for findings in found(machine, wants).values() for finding in findings]
    return max(levels, key=list(Level).index)


def test_a_good_machine_without_a_gpu_has_nothing_that_fails() -> None:
    findings = found(FakeMachine())
    assert worst(FakeMachine()) is Level.NOTE
    assert findings["driver"][0].evidence.startswith("no NVIDIA driver and no GPU: engines run on the CPU")
    assert not {"fd-export", "mps", "mig", "gpu-memory"} & set(findings)


def test_a_good_h200_is_ok_in_every_respect() -> None:
    machine = FakeMachine(probes=with_gpus(gpu(0), gpu(1)), folders={"/dev": ("shm",), "/run": ("nvidia-persistenced",)})
    findings = found(machine, ON_GPU_0)
    checks = ("driver", "fd-export", "persistence", "compute-mode", "mps", "mig", "gpus", "gpu-memory", "engines", "port")
    assert {finding.level for check in checks for finding in findings[check]} == {Level.OK}
    assert findings["driver"][0].evidence == "driver 580.159.03, CUDA 13.0, 2 × NVIDIA H200"
    assert findings["persistence"][0].evidence == "on, nvidia-persistenced runs"
    assert findings["gpu-memory"][0].evidence == "GPU 0 NVIDIA H200: 0 B of 141.0 GiB used"


def test_gpus_in_the_config_without_a_driver_will_fail() -> None:
    finding = only(FakeMachine(), "driver", ON_GPU_0)
    assert (finding.level, "chat has GPUs in the config" in finding.evidence) == (Level.FAILED, True)
    assert "--gpus all" in finding.remedy


def test_a_card_without_a_driver_is_seen_on_the_bus() -> None:
    bus = "/sys/bus/pci/devices"
    files = {
        f"{bus}/0000:01:00.0/vendor": "0x10de\n",
        f"{bus}/0000:01:00.0/class": "0x030200\n",
        f"{bus}/0000:02:00.0/vendor": "0x10de\n",
        f"{bus}/0000:02:00.0/class": "0x068000\n",  # an NVSwitch
    }
    machine = FakeMachine(files=files, folders={"/dev": ("shm",), bus: ("0000:01:00.0", "0000:02:00.0")})
    finding = only(machine, "driver")
    assert finding.level is Level.WARNING
    assert "1 of its GPUs on the PCI bus" in finding.evidence


@pytest.mark.parametrize("seen", ["daemon", "socket", "client"])
def test_mps_is_found_however_it_shows(seen: str) -> None:
    machine = FakeMachine(probes=with_gpus(gpu(mps=seen == "client")))
    if seen == "daemon":
        machine.running = [(41, "bash"), (42, "nvidia-cuda-mps")]
    if seen == "socket":
        machine.folders |= {"/tmp/nvidia-mps": ("control", "log")}
    finding = only(machine, "mps", ON_GPU_0)
    assert finding.level is Level.FAILED
    assert "takes its shadows with it" in finding.evidence
    assert finding.remedy.startswith("echo quit | nvidia-cuda-mps-control")


def orphaned(*holders: Holder, **changes: Any) -> FakeMachine:
    return FakeMachine(probes=with_gpus(gpu(used=80 * GIB, processes=[{"pid": 7, "used": GIB}])), holding=holders, **changes)


def test_memory_that_a_forgotten_child_holds_is_told_with_who_to_end() -> None:
    machine = orphaned(
        Holder(pid=7, command="python serve.py", user="anna"), Holder(pid=99, command="python -c loader", user="ben"), root=True
    )
    finding = only(machine, "gpu-memory", ON_GPU_0)
    assert finding.level is Level.FAILED
    assert "80.0 GiB of 141.0 GiB used, 79.0 GiB by no process that NVML lists" in finding.evidence
    assert "pid 99 (python -c loader), user ben" in finding.evidence
    assert "pid 7 " not in finding.evidence.replace("pid 7)", "")  # NVML knows that one
    assert finding.remedy == "end who holds it: kill 99, and kill -9 99 if it stays"
    assert only(machine, "gpu-memory").level is Level.WARNING  # nobody asked for that GPU


def test_whoever_only_looks_at_a_gpu_is_not_to_be_ended() -> None:
    daemon = Holder(pid=30, command="/usr/bin/nvidia-persistenced --user nvidia", user="nvidia")
    exporter = Holder(pid=31, command="dcgm-exporter -f /etc/x.csv", user="root")
    finding = only(orphaned(daemon, exporter, Holder(pid=99, command="python -c loader", user="ben")), "gpu-memory")
    assert "kill 99," in finding.remedy
    assert "pid 30" not in finding.evidence and "pid 31" not in finding.evidence
    assert "kill" not in only(orphaned(daemon, exporter), "gpu-memory").remedy


def test_kept_memory_is_no_orphan() -> None:
    keeper = Holder(pid=50, command="python -m shadowsup.memkeeper --socket /run/x/keeper.sock", user="anna")
    assert only(orphaned(keeper), "gpu-memory").level is Level.NOTE
    assert "shadowsup --runtime-dir /run/x stop" in only(orphaned(keeper), "gpu-memory").remedy
    running = Wants(config=CONFIG, running=True, workers=ON_GPU_0.workers)
    assert only(orphaned(keeper), "gpu-memory", running).level is Level.OK


def test_memory_of_nobody_is_looked_for_elsewhere() -> None:
    assert only(orphaned(sees_all=False), "gpu-memory").remedy.startswith("sudo ")
    assert "--gpu-reset -i 0" in only(orphaned(), "gpu-memory").remedy


def test_memory_of_processes_that_nvml_lists_is_no_orphan() -> None:
    machine = FakeMachine(probes=with_gpus(gpu(used=40 * GIB, processes=[{"pid": 7, "used": 40 * GIB - 1}])))
    finding = only(machine, "gpu-memory")
    assert (finding.level, "by program-7 (pid 7)" in finding.evidence) == (Level.OK, True)
    unsaid = FakeMachine(probes=with_gpus(gpu(used=40 * GIB, processes=[{"pid": 7, "used": None}])))
    assert only(unsaid, "gpu-memory").level is Level.OK


def test_low_limits_each_name_how_to_raise_them() -> None:
    machine = FakeMachine(
        limits={
            resource.RLIMIT_NOFILE: (256, 512),
            resource.RLIMIT_MEMLOCK: (2**16, 2**16),
            resource.RLIMIT_AS: (2 * GIB, 2 * GIB),
            resource.RLIMIT_FSIZE: (GIB, GIB),
        },
        files={"/proc/sys/kernel/core_pattern": "|/usr/share/apport/apport %p\n", "/proc/swaps": "Filename\n/swap\n"},
        spaces={"/dev/shm": Space(total=64 * 2**20, free=64 * 2**20)},
    )
    findings = found(machine)
    assert findings["nofile"][0].level is Level.FAILED
    assert findings["nofile"][0].evidence == "at most 512 open files; with 256 requests at once 576 are needed"
    assert "LimitNOFILE=65536" in findings["nofile"][0].remedy
    assert (findings["memlock"][0].level, "LimitMEMLOCK=infinity" in findings["memlock"][0].remedy) == (Level.WARNING, True)
    assert (findings["core"][0].level, "kernel.core_pattern=core" in findings["core"][0].remedy) == (Level.WARNING, True)
    assert {finding.remedy for finding in findings["limits"]} == {"ulimit -v unlimited", "ulimit -f unlimited"}
    assert (findings["shm"][0].level, "--shm-size=8g" in findings["shm"][0].remedy) == (Level.WARNING, True)
    machine.limits[resource.RLIMIT_NOFILE] = (1024, 1024)
    assert only(machine, "nofile").level is Level.WARNING
    machine.files["/proc/sys/kernel/core_pattern"] = "|/lib/systemd/systemd-coredump %P\n"
    assert only(machine, "core").level is Level.OK


def test_the_driver_that_hangs_or_fails_is_one_line_and_the_rest_goes_on() -> None:
    hung = FakeMachine(probes={"nvml": Unanswered("no answer in 20 s")})
    assert only(hung, "driver").level is Level.FAILED
    assert "port" in found(hung)
    mismatch = FakeMachine(probes={"nvml": {"error": "Driver/library version mismatch"}})
    assert "reboot" in only(mismatch, "driver").remedy
    lost = FakeMachine(probes=with_gpus(gpu(0), {"index": 1, "lost": "GPU is lost"}))
    assert "nvidia-smi --gpu-reset -i 1" in found(lost, ON_GPU_0)["driver"][1].remedy


def test_export_is_judged_by_trying_it() -> None:
    machine = FakeMachine(probes=with_gpus(gpu()))
    machine.probes["cuda"]["devices"][0]["export"] = "cuMemCreate failed: CUDA_ERROR_NOT_SUPPORTED"
    finding = only(machine, "fd-export", ON_GPU_0)
    assert (finding.level, "engine: command" in finding.remedy) == (Level.FAILED, True)
    machine.probes["cuda"]["devices"][0]["export"] = "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"
    assert "free memory" in only(machine, "fd-export", ON_GPU_0).remedy
    machine.probes["cuda"] = {"error": "no CUDA driver: libcuda.so.1", "hint": "is it visible?"}
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in only(machine, "fd-export", ON_GPU_0).remedy
    machine.probes["cuda"] = Unanswered("ended with status -11")
    assert only(machine, "fd-export", ON_GPU_0).level is Level.FAILED


def test_modes_that_keep_two_engines_apart_are_found() -> None:
    exclusive = FakeMachine(probes=with_gpus(gpu(compute_mode=3), gpu(1)))
    finding = only(exclusive, "compute-mode", ON_GPU_0)
    assert (finding.level, finding.remedy) == (Level.FAILED, "nvidia-smi -i 0 -c DEFAULT")
    other = FakeMachine(probes=with_gpus(gpu(), gpu(1, compute_mode=3)))
    assert only(other, "compute-mode", ON_GPU_0).level is Level.WARNING
    sleepy = FakeMachine(probes=with_gpus(gpu(persistence=False)))
    assert "nvidia-smi -pm 1" in only(sleepy, "persistence").remedy


def test_a_divided_gpu_is_told_with_its_instances() -> None:
    part = {"uuid": "MIG-aaaa", "name": "NVIDIA H200 MIG 3g.71gb", "total": 70 * GIB}
    divided = FakeMachine(probes=with_gpus(gpu(mig=True, instances=[part])))
    assert only(divided, "mig").evidence == "GPU 0: MIG-aaaa (MIG 3g.71gb, 70.0 GiB)"
    assert "name an instance: MIG-aaaa" in only(divided, "mig", ON_GPU_0).remedy
    empty = FakeMachine(probes=with_gpus(gpu(mig=True)))
    assert "nvidia-smi mig -i 0 -cgi 0 -C" in only(empty, "mig").remedy


def test_ids_that_name_no_gpu_will_fail() -> None:
    wants = Wants(config=CONFIG, workers=(WantedWorker(name="chat", engine="loop", gpus=("4",)),))
    finding = only(FakeMachine(probes=with_gpus(gpu())), "gpus", wants)
    assert (finding.level, "no GPU 4 here" in finding.evidence) == (Level.FAILED, True)
    assert H200 in finding.evidence


def test_engines_are_compared_with_what_was_tested() -> None:
    machine = FakeMachine(installed={None: {"torch": Package(version="2.13.0"), "transformers": Package(version="5.31.0")}})
    transformers, vllm = found(machine)["engines"]
    assert transformers.level is Level.WARNING
    assert "tested with transformers 5.17 to 5.24" in transformers.evidence
    assert "'transformers>=5.17,<5.25'" in transformers.remedy
    assert (vllm.level, "/usr/bin/python3 -m pip install 'vllm>=0.26,<0.33'" in vllm.remedy) == (Level.NOTE, True)
    wants = Wants(config=CONFIG, workers=(WantedWorker(name="v", engine="vllm", python="/opt/v/bin/python", gpus=()),))
    machine.installed["/opt/v/bin/python"] = {}
    assert only(machine, "engines", wants).level is Level.FAILED
    machine.installed["/opt/v/bin/python"] = {"vllm": Package(version="0.28.1")}
    assert only(machine, "engines", wants).level is Level.OK
    machine.lacking = ("msgspec",)
    assert only(machine, "engines", wants).remedy == "/opt/v/bin/python -m pip install msgspec"
    machine.installed["/opt/v/bin/python"] = None
    assert "cannot be asked" in only(machine, "engines", wants).evidence


def test_a_torch_that_cannot_use_the_gpus_is_found() -> None:
    machine = FakeMachine(probes=with_gpus(gpu()), installed={None: {"torch": Package(version="2.13.0+cpu", cuda="")}})
    machine.installed[None] = {"torch": Package(version="2.13.0+cpu", cuda=""), "transformers": Package(version="5.20.0")}
    assert [f.level for f in found(machine, ON_GPU_0)["engines"]] == [Level.OK, Level.FAILED]
    machine.probes = with_gpus(gpu(), cuda=12080)
    machine.installed[None] = {"torch": Package(version="2.13.0", cuda="13.0"), "transformers": Package(version="5.20.0")}
    assert found(machine, ON_GPU_0)["engines"][1].remedy.endswith("/cu128")


def test_the_hub_cache_is_shown_and_never_a_token() -> None:
    machine = FakeMachine(
        environ={"HF_HOME": "/hf", "HF_TOKEN": "hf_secret"}, folders={"/dev": ("shm",), "/hf/hub": ("models--meta--small", "version.txt")}
    )
    machine.writes.add("/hf/hub")
    finding = only(machine, "hub-cache")
    assert finding.evidence == "/hf/hub, 400.0 GiB free, a token is set; meta/small"
    machine.writes.clear()
    assert only(machine, "hub-cache").level is Level.WARNING
    wants = Wants(config=CONFIG, workers=(WantedWorker(name="a", engine="transformers", model="other/model"),))
    machine.environ = {"HF_HOME": "/hf", "HF_HUB_OFFLINE": "1"}
    assert (only(machine, "hub-cache", wants).level, "other/model is not here" in only(machine, "hub-cache", wants).evidence) == (
        Level.FAILED,
        True,
    )


def test_a_taken_port_fails_only_for_a_config_that_wants_it() -> None:
    machine = FakeMachine(taken="127.0.0.1:8000: the port is taken by pid 5 (nginx), user root")
    assert only(machine, "port").level is Level.WARNING
    assert only(machine, "port", Wants(config=CONFIG)).level is Level.FAILED
    assert only(machine, "port", Wants(config=CONFIG, running=True)).level is Level.OK


def test_groups_and_the_service_manager() -> None:
    group = "/sys/fs/cgroup/user.slice/x.scope"
    machine = FakeMachine(
        environ={"FDSTORE": "512"},
        files={"/proc/self/cgroup": "0::/user.slice/x.scope\n", f"{group}/cgroup.controllers": "cpu memory\n"},
        folders={"/dev": ("shm",), "/run": ("systemd",)},
        commands={"systemctl": "systemd 255 (255.4)\n+PAM"},
    )
    assert "Delegate=yes" in only(machine, "cgroup").remedy
    machine.writes |= {f"{group}/cgroup.procs", f"{group}/cgroup.subtree_control"}
    assert only(machine, "cgroup").evidence == "/user.slice/x.scope is delegated to this user (controllers: cpu memory)"
    assert only(machine, "systemd").evidence == "systemd 255, this service may store 512 descriptors"
    machine.environ = {}
    assert only(machine, "systemd").remedy.startswith("shadowsup config example shadowsup@.service")


def test_an_old_python_and_a_kernel_that_refuses_will_fail() -> None:
    machine = FakeMachine(python=("3.10.1", "/usr/bin/python3"), refused=("pidfd_open (Function not implemented)",))
    assert only(machine, "python").level is Level.FAILED
    assert only(machine, "kernel").level is Level.FAILED
    assert only(FakeMachine(python=("3.14.0", "/p")), "python").level is Level.NOTE


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def broken(machine: Any, wants: Wants) -> list[Finding]:
        raise RuntimeError("oh")

    findings = examine(FakeMachine(), Wants(), [broken, *CHECKS])
    assert findings[0].evidence == "could not be checked: RuntimeError: oh"
    assert len(findings) > 10


def test_the_range_of_vllm_is_that_of_its_seams() -> None:
    assert (compat.release(compat.VLLM.low), compat.release(compat.VLLM.high)) == TESTED


def test_versions_are_compared_by_release() -> None:
    tested = compat.Tested(name="x", low="5.9", high="5.24", role="")
    given = {"5.8.9": Standing.OLDER, "5.9": Standing.TESTED, "5.24.3": Standing.TESTED, "5.25.0.dev1": Standing.NEWER, "6": Standing.NEWER}
    assert {version: tested.standing(version) for version in given} == given
    assert tested.standing("main") is Standing.UNKNOWN
    assert compat.release("2.13.0+cpu") == (2, 13, 0)


# --- the probe: NVML as it is, in a fake ------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class Missing(NvmlError):
    pass


class FakeNvml:
    """One GPU that does not know of MIG, and one that fell off the bus."""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = Missing
    NVMLError_DriverNotLoaded = Missing
    nvmlMemory_v2 = 2

    def __init__(self, error: NvmlError | None = None) -> None:
        self.error = error
        self.open = 0

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise self.error
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return H200

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 1) -> Any:
        return SimpleNamespace(total=100, used=10 if version == 2 else 16, reserved=6)

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        raise NvmlError("Not Supported")

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        return [SimpleNamespace(pid=5, usedGpuMemory=None)]


def test_what_nvml_says_is_taken_as_far_as_it_goes() -> None:
    nvml = FakeNvml()
    answer = probe.nvml(nvml)
    first, second = answer.pop("gpus")
    assert answer == {"driver": "580.1", "cuda": 13010}
    assert (first["used"], first["mig"], first["mps"], first["processes"]) == (10, False, False, [{"pid": 5, "used": None}])
    assert second == {"index": 1, "lost": "GPU is lost"}
    assert nvml.open == 0
    assert set(first) == set(gpu())


def test_no_driver_and_a_broken_one_are_told_apart() -> None:
    assert "absent" in probe.nvml(FakeNvml(Missing("no library")))
    assert probe.nvml(FakeNvml(NvmlError("mismatch"))) == {"error": "mismatch"}


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    """The real edge: every question is asked of the real system, the probes in real children."""
    machine = ThisMachine()
    findings = found(machine, Wants(state_dir=tmp_path / "not" / "there"))
    assert {"python", "kernel", "nofile", "shm", "disk", "driver", "engines", "port"} <= set(findings)
    assert machine.packages("/nonexistent/python", ["torch"]) is None
    assert machine.read("/nonexistent") is None and machine.names("/nonexistent") == ()
    assert machine.space(str(tmp_path / "not" / "there")) is not None
    assert machine.output(["/nonexistent"]) == ""
