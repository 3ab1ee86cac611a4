"""``shadowsup validate``."""

from __future__ import annotations

from pathlib import Path

import click

from shadowsup.supervisor.cli.output import echo_json, output_option, plural


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@output_option
def validate(config: Path, output: str) -> int:
    """Check CONFIG and tell everything that is wrong at once, each with file:line:column. Nothing is started.

    Exit code 0: it can be used. 2: it cannot.
    """
    from shadowsup.supervisor.config import ConfigError, load

    try:
        loaded = load(config)
    except ConfigError as error:
        if output == "json":
            problems = [problem.as_dict() for problem in error.problems]
            echo_json(
                {"ok": False, "problems": problems or [{"file": str(config), "message": error.message, "hint": error.hint}], "warnings": []}
            )
            return error.exit_code
        raise
    if output == "json":
        echo_json({"ok": True, "problems": [], "warnings": [warning.as_dict() for warning in loaded.warnings]})
        return 0
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    names = ", ".join(worker.name for worker in loaded.config.workers)
    click.echo(f"{config}: ok (node {loaded.config.node.name}, {plural(len(loaded.config.workers), 'worker')}: {names})")
    return 0
