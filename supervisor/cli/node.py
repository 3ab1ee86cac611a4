"""How a verb reaches its node: the runtime directory that is meant, and one request to who serves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from shadowsup.supervisor import runtime_dir


def locate(ctx: click.Context) -> Path:
    """Return the runtime directory; say on stderr which one when nobody named it.

    Raises:
        NotRunning: there is none.
        SupervisorError: several nodes.
    """
    found = runtime_dir.find(explicit=ctx.find_root().obj, environ=os.environ)
    if not found.explicit:
        more = f" (also there: {', '.join(str(path) for path in found.others)})" if found.others else ""
        click.echo(f"node {found.path.name} in {found.path}{more}", err=True)
    return found.path


def ask(ctx: click.Context, verb: str, /, **args: Any) -> Any:
    """Find the node, make one request and return its result. Raises as `locate` and `shadowsup.supervisor.client.ControlClient`."""
    from shadowsup.supervisor.client import call

    return call(locate(ctx), verb, **args)
