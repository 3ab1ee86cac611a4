"""``python -m shadowsup.supervisor.cli.reference``: the manual of the command line, made from the commands. docs/cli.md is its output.

A test compares the two; another parses every command line in it, and runs the examples against a node.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from shadowsup.supervisor.cli.app import cli
from shadowsup.supervisor.cli.verbs import VERBS
from shadowsup.supervisor.errors import ExitCode

EXAMPLES = (
    ("shadowsup init node.yaml --yes", "write a first config"),
    ("shadowsup validate node.yaml", "all that is wrong with it, at once"),
    ("shadowsup plan node.yaml", "what it runs, and whether it fits into memory"),
    ("shadowsup start node.yaml -d --wait", "run it in the background"),
    ("shadowsup status", "its parts, workers and engines"),
    ("shadowsup chat -m 'Tell me of the sea.' --max-tokens 40 --stats", "ask the model"),
    ("shadowsup failover chat", "the shadow takes over, as planned; no client notices"),
    ("shadowsup recoveries", "what that took"),
    ("shadowsup restart chat", "every engine is replaced, without a gap"),
    ("shadowsup memory", "the memory that they share"),
    ("shadowsup events --since 10m --grep recovery", "what happened"),
    ("shadowsup logs chat -n 20", "what the engines said"),
    ("shadowsup drain chat", "finish what it has, then stop it"),
    ("shadowsup stop", "stop everything, leave nothing behind"),
)
"""A session with one worker, ``chat``. Run in this order by a test."""

_EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "wrong usage or config",
    ExitCode.NOT_RUNNING: "no node is running",
    ExitCode.NO_ANSWER: "the supervisor does not answer",
    ExitCode.SUPERVISED_ALREADY: "this node is supervised already",
}

_INTRODUCTION = """\
`shadowsup [--runtime-dir D] VERB`. Every verb has `--help`. Verbs that read take `-o json`, whose objects have `"schema": 1`.
Tables fit the terminal, or 80 columns where there is none; colours are for terminals and obey `NO_COLOR`. Progress and notes go to
stderr, results to stdout.

The node that is meant is the one in `--runtime-dir`, else in `$SHADOWSUP_RUNTIME_DIR`, else the only one that runs: its runtime
directory is looked for in `/run/shadowsup` (root), `$XDG_RUNTIME_DIR/shadowsup` and `/tmp/shadowsup-UID`.""".splitlines()


def reference() -> str:
    """Return the manual as Markdown."""
    context = click.Context(cli, info_name="shadowsup", terminal_width=80)
    lines = [
        "<!-- Generated: python -m shadowsup.supervisor.cli.reference > docs/cli.md -->",
        "# The command line",
        "",
        *_INTRODUCTION,
        "",
        "| exit code | |",
        "|---|---|",
        *(f"| {int(code)} | {meaning} |" for code, meaning in _EXIT_CODES.items()),
        "",
        "## A session",
        "",
        "```sh",
        *(f"{line:<66}# {meaning}" for line, meaning in EXAMPLES),
        "```",
    ]
    section = ""
    for name, verb in VERBS.items():
        if verb.section != section:
            section = verb.section
            lines += ["", f"## {section}"]
        command = cli.get_command(context, name)
        assert command is not None
        for each, below in _with_children(command, click.Context(command, info_name=name, parent=context, terminal_width=80)):
            lines += ["", *_command(each, below)]
    return "\n".join(lines) + "\n"


def _with_children(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _with_children(child, click.Context(child, info_name=name, parent=context, terminal_width=80))


def _command(command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"### {context.command_path.removeprefix('shadowsup ')}", "", f"    {usage}", "", *_text(command.help or "")]
    options = [param for param in command.get_params(context) if isinstance(param, click.Option) and "--help" not in param.opts]
    if options:
        lines += ["", "| option | |", "|---|---|", *(_option(option, context) for option in options)]
    return lines


def _option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    form = record[0] if record is not None else option.opts[0]
    default = f" [default: {option.default}]" if option.show_default else ""
    cells = (f"`{form}`", " ".join(f"{option.help or ''}{default}".split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _text(help_text: str) -> list[str]:
    """Return a help text as Markdown: a paragraph that click leaves as it is (after a backspace mark) becomes code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(help_text))
    lines: list[str] = []
    for paragraph in paragraphs:
        if paragraph.startswith("\b"):
            lines += ["```sh", *paragraph.splitlines()[1:], "```", ""]
        else:
            lines += [" ".join(paragraph.split()).replace("<", "\\<"), ""]
    return lines[:-1]


if __name__ == "__main__":
    click.echo(reference(), nl=False)
