"""``shadowsup version``."""

from __future__ import annotations

import platform

import click

from shadowsup import __version__
from shadowsup.supervisor.cli.output import echo_json, output_option


@click.command()
@output_option
def version(output: str) -> None:
    """Show the version of shadowsup, of Python and of the system."""
    if output == "json":
        echo_json({"version": __version__, "python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"})
    else:
        click.echo(f"shadowsup {__version__} (Python {platform.python_version()}, {platform.system()} {platform.release()})")
