"""Every command line that README and docs show: it parses, with the commands as they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shadowsup.supervisor.cli.app import cli
from shadowsup.supervisor.cli.reference import EXAMPLES, reference
from shadowsup.supervisor.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"(?<![\w/.-])(?:\S*/bin/)?shadowsup[ \t]+([^\n|&;)#>]*)")


def shown(path: Path) -> Iterator[str]:
    """Yield the arguments of each command line in a document: in blocks of shell, in code in the text, and the synopses of tables."""
    text = path.read_text()
    for block in _FENCE.findall(text):
        yield from _CALL.findall(block.replace("\\\n", " "))
    for span in _INLINE.findall(_FENCE.sub("", text)):
        if (match := _CALL.match(span)) is not None:
            yield match[1]
        elif span.split()[0] in VERBS and len(span.split()) > 1:
            yield span


def parse(line: str) -> None:
    """Parse a command line without running it. Raises click.UsageError: it is none."""
    # [--option] and [ARGUMENT] may be left out, so they may be there.
    words = shlex.split(re.sub(r"[\[\]]", " ", line))
    if not words or set(words) & {"VERB", "…"}:
        return
    context = cli.make_context("shadowsup", list(words))
    command: click.Command = cli
    while isinstance(command, click.Group):
        arguments = [*getattr(context, "_protected_args", ()), *context.args]
        name, found, rest = command.resolve_command(context, arguments)
        assert found is not None
        if not rest and not isinstance(found, click.Group) and any(param.required for param in found.params):
            return  # only its name is mentioned
        command, context = found, found.make_context(name, rest, parent=context)


LINES = sorted({(path.name, line.strip()) for path in DOCUMENTS for line in shown(path)})


def test_there_are_command_lines_to_check() -> None:
    assert {name for name, _ in LINES} >= {"README.md", "cli.md"}
    assert len(LINES) > 15


@pytest.mark.parametrize(("name", "line"), LINES, ids=lambda value: value)
def test_every_command_line_in_the_documents_parses(name: str, line: str) -> None:
    try:
        parse(line)
    except click.exceptions.Exit as ended:  # --help, --version
        assert ended.exit_code == 0
    except click.UsageError as error:
        pytest.fail(f"{name}: shadowsup {line}: {error.format_message()}")


@pytest.mark.parametrize("wrong", ["statsu", "status --ouput json", "kill chat.1 --signl 9", "config shw", "logs -n many"])
def test_a_line_that_is_wrong_is_found(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        parse(wrong)


def test_the_manual_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run: python -m shadowsup.supervisor.cli.reference > docs/cli.md"


def test_the_manual_has_every_verb_and_the_session_every_usual_one() -> None:
    text = reference()
    assert all(f"### {verb}\n" in text for verb in VERBS)
    assert {line.split()[1] for line, _ in EXAMPLES} >= {"init", "start", "status", "failover", "restart", "stop"}
