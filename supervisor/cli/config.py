"""``shadowsup config show``, ``schema``, ``example`` and ``edit``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shadowsup.supervisor.errors import ConfigError, NotRunning


@click.group()
def config() -> None:
    """Show the effective config, the schema of config files or examples; edit a config."""


@config.command()
@click.argument("path", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="Form of the output.")
@click.pass_context
def show(ctx: click.Context, path: Path | None, output: str) -> None:
    """Show CONFIG with every default filled in, variables replaced and secrets hidden.

    Without CONFIG: the file that the running node was started with.
    """
    from shadowsup.supervisor.config import load
    from shadowsup.supervisor.config.show import as_dict, as_yaml

    loaded = load(path if path is not None else _of_node(ctx))
    click.echo(json.dumps(as_dict(loaded), indent=2, ensure_ascii=False) if output == "json" else as_yaml(loaded), nl=output == "json")


@config.command()
def schema() -> None:
    """Show the JSON Schema of config files, for editors."""
    from shadowsup.supervisor.config.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@config.command()
@click.argument("name", required=False)
def example(name: str | None) -> None:
    """Print the example NAME, or the names of all: configs, Grafana dashboard, Prometheus alerts, completions, systemd unit.

    \b
    shadowsup config example node.yaml > node.yaml
    shadowsup config example prometheus/alerts.yaml > alerts.yaml
    """
    from shadowsup.supervisor import examples

    click.echo("\n".join(examples.names()) if name is None else examples.read(name), nl=name is None)


@config.command()
@click.argument("path", metavar="[CONFIG]", required=False, type=click.Path(path_type=Path))
@click.pass_context
def edit(ctx: click.Context, path: Path | None) -> int:
    """Edit CONFIG with $VISUAL or $EDITOR. It is checked before it is saved; what is wrong stands on top of it when you edit again.

    Without CONFIG: the file that the running node was started with. The old file is kept as CONFIG~. A node that runs is left as it
    is: shadowsup reload applies the change.
    """
    from shadowsup.supervisor.cli.edit import edit_config

    return edit_config(path if path is not None else _of_node(ctx))


def _of_node(ctx: click.Context) -> Path:
    from shadowsup.supervisor.cli.node import locate
    from shadowsup.supervisor.runtime_dir import read_record

    try:
        runtime_dir = locate(ctx)
    except NotRunning as error:
        raise ConfigError("no CONFIG is given and no node is running", error.hint) from None
    found = read_record(runtime_dir).get("config")
    if not isinstance(found, str):
        raise ConfigError(
            f"the node in {runtime_dir} does not say which config it was started with", f"name the file: {ctx.command_path} CONFIG"
        )
    return Path(found)
