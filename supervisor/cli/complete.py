"""Arguments that the shell can complete: workers and engines of the node that runs. Asks it briefly; no answer is no completion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_ASK_S = 0.5


def worker_argument(**options: Any) -> Callable[[Any], Any]:
    """Return the decorator of an argument ``WORKER``."""
    return click.argument("worker", shell_complete=_complete_workers, **options)


def workers_argument() -> Callable[[Any], Any]:
    """Return the decorator of an argument ``[WORKER]...``."""
    return click.argument("workers", metavar="[WORKER]...", nargs=-1, shell_complete=_complete_workers)


def engine_argument() -> Callable[[Any], Any]:
    """Return the decorator of an argument ``ENGINE``."""
    return click.argument("engine", shell_complete=_complete_engines)


def _complete_workers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _items(((str(worker["name"]), str(worker.get("state", ""))) for worker in _workers(ctx)), incomplete)


def _complete_engines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = [
        (str(engine["id"]), f"{engine.get('role', '')} {engine.get('state', '')}".strip())
        for worker in _workers(ctx)
        for engine in worker.get("engines") or []
    ]
    return _items(found, incomplete)


def _items(found: Any, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=text) for name, text in found if name.startswith(incomplete)]


def _workers(ctx: click.Context) -> list[dict[str, Any]]:
    import os

    from shadowsup.errors import ShadowsupError
    from shadowsup.supervisor import runtime_dir
    from shadowsup.supervisor.client import call

    # Completion must never print: whatever is wrong shows when the command is run.
    with contextlib.suppress(ShadowsupError, OSError):
        found = runtime_dir.find(explicit=ctx.find_root().params.get("runtime_dir"), environ=os.environ)
        workers: list[dict[str, Any]] = call(found.path, "status", _ASK_S).get("workers") or []
        return workers
    return []
