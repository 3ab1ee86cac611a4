"""``shadowsup plan``."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.cli.output import Column, bold, colored, cut, echo_json, output_option, size, table, width
from shadowsup.supervisor.errors import ExitCode

if TYPE_CHECKING:
    from shadowsup.supervisor.cli.plan_memory import Model, Verdict
    from shadowsup.supervisor.cli.plan_processes import Process
    from shadowsup.supervisor.config import LoadedConfig, NodeConfig
    from shadowsup.supervisor.device_memory import DeviceVerdict
    from shadowsup.supervisor.devices import Gpu
    from shadowsup.supervisor.paths import NodePaths


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@output_option
@click.pass_context
def plan(ctx: click.Context, config: Path, output: str) -> int:
    """Show what CONFIG would run, with which command lines, and whether it fits into this machine's memory now. Nothing is started.

    Weights and KV are worked out from the headers of the model's files; what is an estimate is marked with ~. What an engine takes of
    its GPU besides is an estimate until this node has run once, and measured from then on.

    Exit code 0: it fits. 1: it does not, or that cannot be told. 2: the config, or a model that it names, cannot be used.
    """
    from shadowsup.supervisor.config import load

    loaded = load(config)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    made = make(loaded, explicit=ctx.find_root().obj)
    if output == "json":
        echo_json(made.as_dict())
    else:
        click.echo(render(made))
    return ExitCode.DONE if made.verdict.fits else ExitCode.FAILED


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a config would run. ``running``: a supervisor serves this node now, so its own memory is in use already.

    ``models``: worker → what the files of its model say.
    """

    loaded: LoadedConfig
    runtime: Path
    running: bool
    processes: list[Process]
    models: dict[str, dict[str, Any]]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        config = self.loaded.config
        return {
            "config": str(self.loaded.path),
            "node": {
                "name": config.node.name,
                "runtime_dir": str(self.runtime),
                "state_dir": str(config.node.state_dir),
                "running": self.running,
            },
            "gateway": {"listen": config.gateway.listen},
            "processes": [process.as_dict() for process in self.processes],
            "models": self.models,
            "memory": self.verdict.as_dict(),
        }


def make(loaded: LoadedConfig, *, explicit: Path | None = None) -> Plan:
    """Work out the plan of a config that is right.

    Raises:
        SupervisorError: (exit code 2) a model or an interpreter cannot be used.
    """
    from shadowsup.supervisor import devices, model_facts, runtime_dir
    from shadowsup.supervisor.cli import plan_memory, plan_processes
    from shadowsup.supervisor.paths import NodePaths

    config = loaded.config
    runtime = runtime_dir.for_start(config.node.name, explicit=explicit, configured=config.node.runtime_dir, environ=os.environ)
    paths = NodePaths(runtime=runtime, state=config.node.state_dir)
    found, why = _gpus(config)
    resolved, reasons = {}, [why] if why else []
    for worker in config.workers:
        try:
            resolved[worker.name] = devices.resolve(worker.gpus, found) if worker.gpus and not why else ()
        except devices.DeviceError as error:
            reasons.append(f"{worker.name}: {error.message}")
            resolved[worker.name] = ()
    models = [
        plan_memory.read_model(worker, paths, min((gpu.memory for gpu in resolved[worker.name]), default=None))
        for worker in config.workers
        if model_facts.known(worker)
    ]
    processes = plan_processes.parts(config, paths)
    for worker in config.workers:
        processes += plan_processes.engines(config, worker, paths)
    return Plan(
        loaded=loaded,
        runtime=runtime,
        running=runtime_dir.serving(runtime),
        processes=processes,
        models={model.worker: model.facts for model in models},
        verdict=plan_memory.judge(
            config, models, devices=_device_verdicts(config, paths, models, found, resolved), unknown_devices="; ".join(reasons)
        ),
    )


def _gpus(config: NodeConfig) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs of this machine, and why they are not known. Nobody is asked when no worker wants one."""
    from shadowsup.supervisor import devices

    if not any(worker.gpus for worker in config.workers):
        return (), ""
    try:
        found = devices.read_gpus()
    except devices.DeviceError as error:
        return (), error.message
    return found, "" if found else "there is no GPU on this machine"


def _device_verdicts(
    config: NodeConfig, paths: NodePaths, models: list[Model], gpus: tuple[Gpu, ...], resolved: dict[str, tuple[Gpu, ...]]
) -> tuple[DeviceVerdict, ...]:
    from shadowsup.supervisor import device_memory, model_facts

    facts = {model.worker: model.facts for model in models}
    overheads = device_memory.Overheads(paths.overheads)
    shares = []
    for worker in config.workers:
        mine = facts.get(worker.name, {})
        key = model_facts.weights_key(mine, worker) if mine else ""
        shares += device_memory.shares(worker, resolved[worker.name], mine, overheads, key)
    return device_memory.judge(gpus, shares)


def render(plan: Plan) -> str:
    """Return the plan for people."""
    config = plan.loaded.config
    lines = [
        f"{bold('node')} {config.node.name}  in {plan.runtime}" + ("  (running now)" if plan.running else ""),
        f"  gateway on {config.gateway.listen}; logs in {config.node.state_dir / 'logs'}",
        "",
    ]
    for process in plan.processes:
        lines += _process(process)
    lines += ["", *verdict_lines(plan.verdict)]
    if plan.running:
        lines.append("  this node is running: what it uses is counted as used, and again as needed")
    return "\n".join(lines)


def _process(process: Process) -> list[str]:
    head = f"{bold(process.name)}  {process.role + ', ' if process.role else ''}{process.how}"
    # Command lines are not cut: they are what one came for.
    lines = [head, f"  {shlex.join(process.command)}"]
    if process.cwd is not None:
        lines.append(f"  in {process.cwd}")
    lines.append(f"  socket {', '.join(process.sockets)}")
    if process.env is not None:
        lines += _wrapped("env ", process.env)
    return lines


def _wrapped(title: str, words: list[str]) -> list[str]:
    import textwrap

    indent = " " * (2 + len(title))
    return textwrap.wrap(" ".join(words), width(), initial_indent=f"  {title}", subsequent_indent=indent, break_long_words=False)


_COLUMNS = (Column("MEMORY"), Column("WORKER", shrink=True), Column("SIZE", right=True), Column("HOW", shrink=True))


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the arithmetic and the verdict for people."""
    rows: list[tuple[object, ...]] = [
        (
            need.what,
            need.worker,
            None if need.size is None else f"{'~' if need.estimate else ''}{size(need.size)}",
            need.how,
        )
        for need in verdict.needs
    ]
    rows.append(("needed", None, size(verdict.needed), "at most at once"))
    found = "fits" if verdict.fits else "fit is not known" if verdict.fits is None else "does not fit"
    state = {True: "ok", None: "warning", False: "failed"}[verdict.fits]
    return [
        *table(_COLUMNS, rows).splitlines(),
        "",
        cut(f"can be had: {verdict.available}", width()),
        *(device.words() for device in verdict.devices),
        f"{colored(found, state)}: {verdict.reason}",
    ]
