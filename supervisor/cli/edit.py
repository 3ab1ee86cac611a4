"""``shadowsup config edit``: the editor works on a copy; the file is replaced in one step, or not at all."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadowsup.supervisor.errors import ConfigError, ExitCode, SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.config import LoadedConfig

NOTE = "#! "
"""Begins each line of the errors that are put on top of the copy; they are taken out again."""
_EDITORS = ("sensible-editor", "nano", "vi")


def edit_config(path: Path) -> int:
    """Let the user edit a config until it is right or they give up. Returns the exit code.

    Raises:
        SupervisorError: no editor, the file cannot be read or replaced, or it was changed by somebody else meanwhile. What was
            written so far is kept then, and said where.
    """
    # A link stays a link: what it points to is edited.
    target = path.resolve()
    try:
        before = target.read_bytes()
    except OSError as error:
        raise SupervisorError(f"{path}: {(error.strerror or 'cannot be read').lower()}", exit_code=ExitCode.USAGE) from None
    command = editor()
    draft = _Draft(target, before)
    while True:
        draft.run(command)
        text = draft.text()
        if text == before:
            draft.remove()
            click.echo(f"{path}: not changed")
            return ExitCode.DONE
        try:
            loaded = _check(text, path)
        except ConfigError as error:
            click.echo(error.message, err=True)
            if _again(draft):
                draft.annotate(text, error)
                continue
            click.echo(f"{path}: not changed; what you wrote is in {draft.path}", err=True)
            return ExitCode.USAGE
        draft.replace(text)
        for warning in loaded.warnings:
            click.echo(f"warning: {warning}", err=True)
        click.echo(f"{path}: saved; the old one is {backup_of(target).name}")
        _tell_running(loaded)
        return ExitCode.DONE


def editor() -> list[str]:
    """Return the command of the user's editor: $VISUAL, $EDITOR, or one that is there.

    Raises:
        SupervisorError: none.
    """
    for name in ("VISUAL", "EDITOR"):
        if os.environ.get(name, "").strip():
            try:
                return shlex.split(os.environ[name])
            except ValueError as error:
                raise SupervisorError(f"${name} is no command: {error}", f"set {name} to your editor") from None
    for name in _EDITORS:
        if (found := shutil.which(name)) is not None:
            return [found]
    raise SupervisorError("there is no editor", "set VISUAL or EDITOR")


def backup_of(path: Path) -> Path:
    """Return where the file that is replaced goes."""
    return path.with_name(path.name + "~")


class _Draft:
    """The copy. It lies beside the file, so that relative paths and the schema's in it mean the same."""

    def __init__(self, target: Path, before: bytes) -> None:
        self._target = target
        self._before = before
        self._notes = 0
        try:
            fd, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix or ".yaml", dir=target.parent)
            with os.fdopen(fd, "wb") as file:
                file.write(before)
        except OSError as error:
            raise SupervisorError(f"cannot write to {target.parent}: {error.strerror}", "edit it as its owner") from None
        self.path = Path(name)

    def run(self, command: list[str]) -> None:
        """Run the editor to its end. Raises SupervisorError: it cannot be run, or says that it failed; nothing is lost."""
        try:
            status = subprocess.run([*command, str(self.path)]).returncode
        except OSError as error:
            self._keep_or_remove()
            raise SupervisorError(f"cannot run the editor {command[0]}: {error.strerror}", "set VISUAL or EDITOR") from None
        except KeyboardInterrupt:
            self._tell_kept()
            raise
        if status != 0:
            kept = self._keep_or_remove()
            raise SupervisorError(
                f"the editor ended with status {status}; nothing was changed", f"what you wrote is in {self.path}" if kept else ""
            )

    def text(self) -> bytes:
        """Return what is in it, without the errors on top."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise SupervisorError(f"the copy {self.path} cannot be read any more: {error.strerror}", "nothing was changed") from None
        # No more lines than were put there: the file may have such lines of its own.
        ours = 0
        while ours < min(self._notes, len(lines)) and lines[ours].startswith(NOTE.encode()):
            ours += 1
        return b"".join(lines[ours:])

    def annotate(self, text: bytes, error: ConfigError) -> None:
        """Put the errors on top, with the line numbers that the copy then has."""
        told: list[str] = []
        height = sum(1 + bool(problem.hint) for problem in error.problems) + 1
        for problem in error.problems:
            where = f"line {problem.line + height}, column {problem.column}: " if problem.line else ""
            told.append(f"{where}{problem.message}")
            told += [f"    {problem.hint}"] if problem.hint else []
        lines = [f"{NOTE}{' '.join(line.splitlines())}" for line in [*told, "these lines go away by themselves"]]
        if not error.problems:
            lines = [f"{NOTE}{line}" for line in error.message.splitlines()]
        self._notes = len(lines)
        self.path.write_bytes("".join(f"{line}\n" for line in lines).encode() + text)

    def replace(self, text: bytes) -> None:
        """Put ``text`` in the place of the file; the old one becomes the backup.

        Raises:
            SupervisorError: the file was changed by somebody else, or cannot be replaced. The copy is kept.
        """
        self.path.write_bytes(text)
        try:
            now = self._target.read_bytes()
            if now != self._before:
                raise SupervisorError(
                    f"{self._target} was changed by somebody else meanwhile: it was left as it is",
                    f"what you wrote is in {self.path}; compare the two",
                )
            there = self._target.stat()
            with contextlib.suppress(PermissionError):
                os.chown(self.path, there.st_uid, there.st_gid)
            self.path.chmod(there.st_mode & 0o7777)
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
            spare = self.path.with_name(self.path.name + "~")
            shutil.copy2(self._target, spare)
            spare.replace(backup_of(self._target))
            self.path.replace(self._target)
        except OSError as error:
            raise SupervisorError(
                f"cannot replace {self._target}: {error.strerror}", f"it was left as it is; what you wrote is in {self.path}"
            ) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _keep_or_remove(self) -> bool:
        """Keep the copy if there is something in it that the file does not have. Returns whether."""
        with contextlib.suppress(SupervisorError):
            if self.text() != self._before:
                return True
        self.remove()
        return False

    def _tell_kept(self) -> None:
        if self._keep_or_remove():
            click.echo(f"nothing was changed; what you wrote is in {self.path}", err=True)


def _check(text: bytes, path: Path) -> LoadedConfig:
    from shadowsup.supervisor.config.loader import loads
    from shadowsup.supervisor.errors import Problem

    try:
        return loads(text.decode("utf-8"), path, shown=str(path))
    except UnicodeDecodeError:
        raise ConfigError.of([Problem(file=str(path), message="not UTF-8 text")]) from None


def _again(draft: _Draft) -> bool:
    if not sys.stdin.isatty():
        return False
    try:
        return click.confirm("Edit again?", default=True, err=True)
    except click.Abort:
        click.echo(f"\nnothing was changed; what you wrote is in {draft.path}", err=True)
        raise


def _tell_running(loaded: LoadedConfig) -> None:
    from shadowsup.supervisor import runtime_dir

    node = loaded.config.node
    there = runtime_dir.for_start(node.name, explicit=None, configured=node.runtime_dir, environ=os.environ)
    if runtime_dir.serving(there):
        click.echo(f"node {node.name} is running: shadowsup reload {loaded.path} applies the change", err=True)
