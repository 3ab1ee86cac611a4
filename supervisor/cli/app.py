"""The command group: finds verbs, and turns everything that goes wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadowsup import __version__
from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.cli.verbs import VERBS
from shadowsup.supervisor.errors import ExitCode

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

INTERRUPTED = 130
"""128 + SIGINT, what shells expect."""


class OutputClosed(Exception):
    """Raised when whoever read our output has enough (``| head``)."""


class LazyGroup(click.Group):
    """Imports a verb's module when the verb is used; ``--help`` imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        import importlib

        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            ctx.fail(f"no such verb {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        # click would answer these itself: with an empty line, and with exit code 1.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None
        except BrokenPipeError:
            raise OutputClosed from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete verbs from the table alone: a shell asks at every press of a key."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=verb.help) for name, verb in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(verb.section for verb in VERBS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, verb.help) for name, verb in VERBS.items() if verb.section == section])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 usage or config, 3 not running, 4 the supervisor does not answer, 100 supervised already.",
)
@click.option(
    "--runtime-dir",
    metavar="D",
    type=click.Path(path_type=Path),
    help="The node's runtime directory. Default: $SHADOWSUP_RUNTIME_DIR, then the usual places.",
)
@click.version_option(__version__, prog_name="shadowsup", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, runtime_dir: Path | None) -> None:
    """Keep LLM engines' memory and clients' streams alive while engine processes die, hang or are replaced.

    \b
    shadowsup start configs/node.yaml      run a node
    shadowsup status                       look at it
    shadowsup kill chat.1                  see that nobody notices
    """
    ctx.obj = runtime_dir


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises, but SystemExit from a forked child."""
    try:
        result = cli.main(args=None if arguments is None else list(arguments), prog_name="shadowsup", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.DONE
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.UsageError as error:
        command = f"{error.ctx.command_path} --help" if error.ctx is not None else "shadowsup --help"
        tell(error.format_message().rstrip("."), f"see {command}")
        return ExitCode.USAGE
    except click.ClickException as error:
        tell(error.format_message())
        return ExitCode.FAILED
    except ShadowsupError as error:
        tell(error.message, error.hint)
        code = getattr(error, "exit_code", ExitCode.FAILED)
        return int(code)
    except (OutputClosed, BrokenPipeError):
        # Nothing may be flushed into the pipe at exit either.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Exception as error:
        where = _keep_trace()
        tell(
            f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
            f"the full trace is in {where}",
        )
        return ExitCode.FAILED


def tell(message: str, hint: str = "") -> None:
    """Write an error for people to stderr."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"shadowsup: {message}" if "\n" not in message else message, err=True)
        if hint:
            click.echo(f"    {hint}", err=True)


def _keep_trace() -> str:
    """Append the current exception to a log of ours and return its path."""
    import tempfile
    import time
    import traceback

    text = f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')} shadowsup {__version__}, pid {os.getpid()}\n{traceback.format_exc()}"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    try:
        folder = state / "shadowsup"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "errors.log"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        return str(path)
    except (OSError, RuntimeError):
        with tempfile.NamedTemporaryFile("w", prefix="shadowsup-error-", suffix=".log", delete=False) as file:
            file.write(text)
            return file.name
