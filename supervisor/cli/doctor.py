"""``shadowsup doctor``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadowsup.supervisor.cli.output import colored, dim, echo_json, output_option, plural
from shadowsup.supervisor.errors import ExitCode

if TYPE_CHECKING:
    from shadowsup.supervisor.doctor.finding import Finding, Wants


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("-q", "--quiet", is_flag=True, help="Only what is not ok.")
@output_option
@click.pass_context
def doctor(ctx: click.Context, config: Path | None, quiet: bool, output: str) -> int:
    """Tell whether this machine is fit for a node, a line a check, and what to do about what is not. Changes nothing.

    With CONFIG: for that node, its port, GPUs, interpreters and models. As root it sees every user's processes.

    Exit code 0: nothing will fail. 1: something will. 2: CONFIG cannot be used.
    """
    from shadowsup.supervisor.doctor.finding import Level
    from shadowsup.supervisor.doctor.machine import ThisMachine
    from shadowsup.supervisor.doctor.registry import examine

    findings = examine(ThisMachine(), wants(config, ctx.find_root().obj))
    failed = any(finding.level is Level.FAILED for finding in findings)
    shown = [finding for finding in findings if not quiet or finding.level is not Level.OK]
    if output == "json":
        echo_json({"ok": not failed, "checks": [finding.as_dict() for finding in shown]})
    else:
        click.echo("\n".join(lines(shown, findings)))
    return ExitCode.FAILED if failed else ExitCode.DONE


def wants(config: Path | None, explicit: Path | None = None) -> Wants:
    """Return what the config asks of the machine.

    Raises:
        ConfigError: it cannot be used.
    """
    from shadowsup.supervisor import runtime_dir
    from shadowsup.supervisor.config import load
    from shadowsup.supervisor.doctor.finding import WantedWorker, Wants

    if config is None:
        return Wants()
    loaded = load(config)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    node = loaded.config.node
    path = runtime_dir.for_start(node.name, explicit=explicit, configured=node.runtime_dir, environ=os.environ)
    gateway = loaded.config.gateway
    return Wants(
        config=config,
        listen="" if gateway.address.is_unix else gateway.listen,
        running=runtime_dir.serving(path),
        max_inflight=gateway.max_inflight,
        state_dir=node.state_dir,
        workers=tuple(
            WantedWorker(
                name=worker.name,
                engine=worker.engine.value,
                python=None if worker.python is None else str(worker.python),
                gpus=(*worker.gpus, *worker.spares),
                model=worker.model,
                engines=1 + worker.shadows,
            )
            for worker in loaded.config.workers
        ),
    )


def lines(shown: Sequence[Finding], all_findings: Sequence[Finding]) -> list[str]:
    """Return the findings for people. Nothing is cut: a remedy is to be typed."""
    wide = max((len(finding.check) for finding in shown), default=0)
    text = []
    for finding in shown:
        text.append(f"{colored(f'{finding.level.value:<7}', finding.level.value)}  {finding.check:<{wide}}  {finding.evidence}")
        if finding.remedy:
            text.append(f"{'':<{wide + 9}}  {dim('→')} {finding.remedy}")
    counts = Counter(finding.level.value for finding in all_findings)
    total = [f"{counts['ok']} ok", plural(counts["note"], "note"), plural(counts["warning"], "warning"), f"{counts['failed']} failed"]
    return [*text, "", ", ".join(total)]
