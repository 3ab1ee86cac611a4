"""Checks of what is installed and configured: engines, models, the port, other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor import compat
from shadowsup.supervisor.compat import Standing, Tested
from shadowsup.supervisor.doctor.finding import Finding, Level, Wants
from shadowsup.supervisor.doctor.machine import Machine, Package
from shadowsup.supervisor.doctor.words import cuda_version, size

_MODELS_SHOWN = 6
_HUB_GOOD = 20 * 2**30


def engines(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """Each interpreter that a worker names, or this one, and what is in it."""
    wanted = {(worker.python, worker.engine) for worker in wants.workers} if wants.workers else {(None, "transformers"), (None, "vllm")}
    for python, engine in sorted(wanted, key=lambda each: (each[0] or "", each[1])):
        needs = compat.ENGINES.get(engine)
        if needs is None:
            continue
        found = machine.packages(python, [*(need.package for need in needs), *compat.SDK])
        where = f" in {python}" if python else ""
        if found is None:
            remedy = f"correct python: of the worker; {python or machine.python[1]} -c 'import sys' must run"
            yield Finding("engines", Level.FAILED, f"{python or machine.python[1]} cannot be asked what is in it", remedy)
            continue
        yield _engine(engine, needs, found, where, python or machine.python[1], wants)
    yield from _torch_build(machine, wants)


def _engine(engine: str, needs: tuple[Tested, ...], found: Mapping[str, Package], where: str, python: str, wants: Wants) -> Finding:
    missing = [need for need in needs if need.package not in found]
    if missing:
        names = " and ".join(need.name for need in missing)
        install = "'shadowsup[engine]'" if engine == "transformers" else " ".join(f"'{need.needs}'" for need in missing)
        level = Level.FAILED if any(worker.engine == engine for worker in wants.workers) else Level.NOTE
        # Without a config nobody asks for vLLM: that the transformers engine is not there either is worth more than a note.
        if wants.config is None and engine == "transformers":
            level = Level.WARNING
        return Finding("engines", level, f"engine: {engine} needs {names}{where}: not installed", f"{python} -m pip install {install}")
    lacking = [name for name in compat.SDK if name not in found]
    if lacking:
        evidence = f"engine: {engine}{where}: {', '.join(lacking)} is missing, which the engine side of shadowsup needs"
        return Finding("engines", Level.FAILED, evidence, f"{python} -m pip install {' '.join(lacking)}")
    have = ", ".join(f"{need.name} {found[need.package].version}" for need in needs)
    off = [need for need in needs if need.standing(found[need.package].version) is not Standing.TESTED]
    if off:
        tested = ", ".join(f"{need.name} {need.span}" for need in off)
        remedy = f"{python} -m pip install {' '.join(repr(need.needs) for need in off)}, or try it out before you rely on it"
        return Finding("engines", Level.WARNING, f"engine: {engine}{where}: {have}; tested with {tested}", remedy)
    return Finding("engines", Level.OK, f"engine: {engine}{where}: {have}, as tested")


def _torch_build(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """A PyTorch that cannot use the GPUs that are there."""
    try:
        nvml = machine.probe("nvml")
    except Unanswered:
        return
    if not nvml.get("gpus"):
        return
    for python in sorted({worker.python for worker in wants.workers if worker.gpus} or {None}, key=str):
        torch = (machine.packages(python, ["torch"]) or {}).get("torch")
        if torch is None or torch.cuda is None:
            continue
        certain = wants.gpus
        pip = f"{python or machine.python[1]} -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
        if not torch.cuda:
            evidence = f"PyTorch {torch.version} is a build for the CPU, and there are GPUs"
            yield Finding("engines", wants.severity(certain=certain), evidence, f"{pip}cu{nvml['cuda'] // 1000}0")
        elif compat.release(torch.cuda)[:1] > (nvml["cuda"] // 1000,):
            evidence = f"PyTorch {torch.version} is built for CUDA {torch.cuda}, the driver is for {cuda_version(nvml['cuda'])}"
            remedy = f"a newer driver, or {pip}cu{nvml['cuda'] // 1000}{nvml['cuda'] % 1000 // 10}"
            yield Finding("engines", wants.severity(certain=certain), evidence, remedy)


def hub_cache(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """Where models of the Hugging Face hub are, and what is there."""
    folder = hub_folder(machine.environ)
    models = [name.removeprefix("models--").replace("--", "/") for name in machine.names(folder) if name.startswith("models--")]
    space = machine.space(folder)
    free = f", {size(space.free)} free" if space is not None else ""
    token = "a token is set" if machine.environ.get("HF_TOKEN") or machine.read(f"{folder.rpartition('/')[0]}/token") else "no token"
    offline = ", HF_HUB_OFFLINE is set" if machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") else ""
    shown = ", ".join(models[:_MODELS_SHOWN]) + (f", {len(models) - _MODELS_SHOWN} more" if len(models) > _MODELS_SHOWN else "")
    evidence = f"{folder}{free}, {token}{offline}; {shown or 'no model yet'}"
    lacking = [worker.model for worker in wants.workers if worker.model and _is_hub_id(worker.model) and worker.model not in models]
    if lacking and offline:
        yield Finding("hub-cache", Level.FAILED, f"{evidence}; {', '.join(lacking)} is not here", "unset HF_HUB_OFFLINE, or copy it here")
    elif machine.names(folder) and not machine.writable(folder):
        remedy = f"sudo chown -R $USER {folder}, or set HF_HOME to a folder of yours"
        yield Finding("hub-cache", Level.WARNING, f"{evidence}; this user may not write there", remedy)
    elif lacking and space is not None and space.free < _HUB_GOOD:
        yield Finding(
            "hub-cache", Level.WARNING, f"{evidence}; {', '.join(lacking)} is not here yet", f"df {folder} and make room, or set HF_HOME"
        )
    else:
        yield Finding("hub-cache", Level.OK, evidence)


def hub_folder(environ: Mapping[str, str]) -> str:
    """Return the hub's cache folder, as huggingface_hub finds it (docs: Environment variables)."""
    if environ.get("HF_HUB_CACHE"):
        return environ["HF_HUB_CACHE"]
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return f"{home}/hub"


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith(("package:", "/", ".", "~")) and not model.endswith((".gguf", ".safetensors"))


def port(machine: Machine, wants: Wants) -> Iterator[Finding]:
    if not wants.listen:
        return
    if wants.running:
        yield Finding("port", Level.OK, f"{wants.listen} is served by this node, which runs")
        return
    error = machine.port_error(wants.listen)
    if error:
        remedy = "end who has it, or another gateway.listen in the config"
        yield Finding("port", wants.severity(certain=True), error, remedy)
    else:
        yield Finding("port", Level.OK, f"{wants.listen} is free")
