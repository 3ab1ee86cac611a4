"""The config file on disk: read as bytes, replaced in one step, never over somebody else's change."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from shadowsup.tui.errors import TuiError

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")


class ConfigFile:
    """One file, as it was when it was read. ``text``: what the editor shows; ``data``: its bytes.

    Raises:
        TuiError: it cannot be read, or is not text that can be edited here.
    """

    def __init__(self, path: Path) -> None:
        # A link stays a link: what it points to is replaced.
        self.path = path
        self.target = path.resolve()
        self.data = self._read()
        self.text = _decoded(self.data, path)

    def _read(self) -> bytes:
        try:
            return self.target.read_bytes()
        except OSError as error:
            raise TuiError(
                f"{self.path}: {(error.strerror or 'cannot be read').lower()}", "is it where the node was started from?"
            ) from None

    @property
    def backup(self) -> Path:
        """Where the content that is replaced goes, as for ``config edit``."""
        return self.target.with_name(self.target.name + "~")

    def changed(self) -> bool:
        """Whether somebody else has changed, or removed, the file."""
        try:
            return self._read() != self.data
        except TuiError:
            return True

    def encode(self, lines: Sequence[str]) -> bytes:
        """Return the bytes of an edited text: every line that was not touched has the very bytes, and the very line end, that it had.

        Args:
            lines: without their ends, as `str.splitlines` would give them, and an empty one last where the text ends with a line end.
        """
        old = self.text.splitlines(keepends=True)
        bare = [line[: len(line) - len(_end(line))] for line in old]
        ends = [_end(line) for line in old]
        if old and ends[-1]:
            bare.append("")
            ends.append("")
        usual = max(("\n", "\r\n", "\r"), key=ends.count)
        found = [usual] * len(lines)
        if len(set(ends)) > 1 or ends[:1] not in ([], ["\n"]):
            for tag, i, j, m, _ in SequenceMatcher(None, bare, list(lines), autojunk=False).get_opcodes():
                if tag == "equal":
                    found[m : m + j - i] = ends[i:j]
        if lines:
            # The last line has an end only if it is an old last line of which the editor knows no end (a form feed, say).
            found[-1] = found[-1] if found[-1] not in ("\n", "\r\n", "\r") else ""
        # A line that was the last one, without an end, and no longer is.
        return "".join(
            line + (end or (usual if i < len(lines) - 1 else "")) for i, (line, end) in enumerate(zip(lines, found, strict=True))
        ).encode()

    def save(self, data: bytes) -> None:
        """Put ``data`` in the place of the file, in one step; what was there becomes the backup. Mode and owner stay.

        Raises:
            TuiError: the file was changed by somebody else, or cannot be replaced. It is as it was then.
        """
        if self.changed():
            raise TuiError(
                f"{self.path} was changed by somebody else meanwhile: it was left as it is",
                "what you wrote is still in the editor; Ctrl+R takes theirs, F4 opens an editor on yours",
            )
        draft: Path | None = None
        try:
            there = self.target.stat()
            fd, name = tempfile.mkstemp(prefix=f".{self.target.stem}.", suffix=self.target.suffix, dir=self.target.parent)
            draft = Path(name)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(PermissionError):
                os.chown(draft, there.st_uid, there.st_gid)
            draft.chmod(there.st_mode & 0o7777)
            spare = draft.with_name(draft.name + "~")
            try:
                shutil.copy2(self.target, spare)
                spare.replace(self.backup)
            finally:
                spare.unlink(missing_ok=True)
            draft.replace(self.target)
            _sync_folder(self.target.parent)
        except OSError as error:
            if draft is not None:
                draft.unlink(missing_ok=True)
            raise TuiError(f"cannot replace {self.path}: {error.strerror}", "it was left as it is; may you write to its folder?") from None
        self.data, self.text = data, _decoded(data, self.path)


def _sync_folder(folder: Path) -> None:
    """The new name is on disk, too, when this returns."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _end(line: str) -> str:
    bare = line.splitlines()
    return line[len(bare[0]) :] if bare else ""


def _decoded(data: bytes, path: Path) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise TuiError(f"{path} is not UTF-8 text", "F4 opens it in your own editor") from None
    if _CONTROL.search(text):
        raise TuiError(f"{path} has control characters in it", "F4 opens it in your own editor")
    return text
