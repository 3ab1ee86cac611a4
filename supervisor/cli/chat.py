"""``shadowsup chat``: a conversation in the terminal. What goes over the wire is in `chat_stream`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from shadowsup.supervisor.cli.complete import worker_argument
from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.errors import ExitCode, SupervisorError

HELP = "/new begins a new conversation, /exit or Ctrl-D ends; Ctrl-C cancels an answer"


@click.command()
@worker_argument(required=False)
@click.option("-m", "--message", metavar="TEXT", help="Ask this one question and end.")
@click.option("--system", metavar="TEXT", help="Instructions that come before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens of an answer at most.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="0: always the most likely token.")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same answer.")
@click.option("--stats", is_flag=True, help="After each answer: tokens, speed, first token, longest pause, failovers.")
@click.pass_context
def chat(
    ctx: click.Context,
    worker: str | None,
    message: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stats: bool,
) -> int:
    """Talk to the model of WORKER (by default the only one), through the gateway like any client.

    The answer is shown as it comes; where a failover falls into it there is a dim mark. When standard input is no terminal each of its
    lines is a question.
    """
    from shadowsup.supervisor.cli.chat_stream import Cancelled, Conversation, ask
    from shadowsup.supervisor.cli.gateway_address import address_of, key_of
    from shadowsup.supervisor.client import call
    from shadowsup.supervisor.runtime_dir import read_record

    runtime_dir = locate(ctx)
    status = call(runtime_dir, "status")
    chosen = _worker(status, worker)
    conversation = Conversation(
        runtime_dir=runtime_dir,
        address=address_of(status),
        key=key_of(read_record(runtime_dir)),
        worker=str(chosen["name"]),
        model=str(chosen["model"]),
        options={
            name: value for name, value in (("max_tokens", max_tokens), ("temperature", temperature), ("seed", seed)) if value is not None
        },
        system=system,
    )
    terminal = message is None and sys.stdin.isatty()
    if terminal:
        click.echo(f"{chosen['name']} ({chosen['engine']}, {chosen['model']}). {HELP}", err=True)
    for question in [message] if message is not None else _questions(terminal):
        if terminal and question.startswith("/"):
            if question in ("/exit", "/quit"):
                break
            if question == "/new":
                conversation.reset()
            else:
                click.echo(HELP, err=True)
            continue
        try:
            ask(conversation, question, show_stats=stats)
        except Cancelled:
            if not terminal:
                raise KeyboardInterrupt from None
            click.echo("(cancelled)", err=True)
        except SupervisorError as error:
            if not terminal:
                raise
            click.echo(f"shadowsup: {error}", err=True)
    return ExitCode.DONE


def _worker(status: dict[str, Any], name: str | None) -> dict[str, Any]:
    workers: list[dict[str, Any]] = status.get("workers") or []
    found = [worker for worker in workers if name in (None, worker.get("name"))]
    names = ", ".join(str(worker.get("name")) for worker in workers)
    if not found:
        raise SupervisorError(f"no worker {name!r}", f"there are: {names}", exit_code=ExitCode.USAGE)
    if len(found) > 1:
        raise SupervisorError("there are several workers; name one", f"there are: {names}", exit_code=ExitCode.USAGE)
    return found[0]


def _questions(terminal: bool) -> Iterator[str]:
    """Yield what is asked until the end of the input; on a terminal with line editing."""
    if terminal:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() uses it)
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            click.echo(err=True)
            return
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()
