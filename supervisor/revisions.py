"""The configs that were in force: ``STATE_DIR/revisions/r7.yaml`` and an index of them. With them a reload can be undone.

Files are 0600: a config may hold secrets. The last `KEEP` are kept. A disk that fails costs the history, never the reload.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.paths import write_private
from shadowsup.supervisor.protocol import SCHEMA, Revision

KEEP = 20
INDEX = "index.json"

log = logging.getLogger("shadowsup.revisions")


class _Index(msgspec.Struct, kw_only=True):
    schema: int
    revisions: list[Revision]


class Revisions:
    """The history in one folder, oldest first. One writer: the supervisor of the node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Revision] = self._read()

    @property
    def current(self) -> Revision | None:
        return self.all[-1] if self.all else None

    @property
    def previous(self) -> Revision | None:
        """The one that was in force before the present one."""
        return self.all[-2] if len(self.all) > 1 else None

    def begin(self, text: str, path: str) -> Revision:
        """Take the config that a node is started with: the last revision where nothing was changed since, else a new one."""
        current = self.current
        if current is not None and (current.digest, current.path) == (_digest(text), path):
            return current
        return self.add(text, path, "start")

    def add(self, text: str, path: str, origin: str) -> Revision:
        """Record the config that is in force from now on. Never raises: what cannot be written is only not kept."""
        number = 1 + max((int(revision.id[1:]) for revision in self.all), default=0)
        made = Revision(id=f"r{number}", ts=round(time.time(), 3), path=path, digest=_digest(text), origin=origin)
        self.all.append(made)
        dropped, self.all = self.all[:-KEEP], self.all[-KEEP:]
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._file(made.id), text.encode())
            write_private(self._folder / INDEX, msgspec.json.format(msgspec.json.encode(_Index(schema=SCHEMA, revisions=self.all))))
            for revision in dropped:
                self._file(revision.id).unlink(missing_ok=True)
        except OSError as error:
            log.warning("revision %s of the config is not kept: %s", made.id, error)
        return made

    def find(self, name: str) -> Revision:
        """Raises SupervisorError: (usage) there is none of this name."""
        for revision in self.all:
            if revision.id == name:
                return revision
        known = ", ".join(revision.id for revision in self.all[-5:])
        raise SupervisorError(f"no revision {name!r} of the config is kept", f"there are: {known}", exit_code=ExitCode.USAGE)

    def text(self, revision: Revision) -> str:
        """Return the config's text. Raises SupervisorError: it cannot be read, or is not what was written."""
        try:
            text = self._file(revision.id).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SupervisorError(f"revision {revision.id} of the config cannot be read: {error}") from None
        if _digest(text) != revision.digest:
            raise SupervisorError(f"{self._file(revision.id)} was changed: it is not the config that was in force")
        return text

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.yaml"

    def _read(self) -> list[Revision]:
        try:
            found = msgspec.json.decode((self._folder / INDEX).read_bytes(), type=_Index)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the history of the config begins anew: %s", error)
            return []
        return found.revisions if found.schema == SCHEMA else []


def put_back(path: Path, text: str, *, instead_of: str) -> str:
    """Write ``text`` into the config file, if that still holds ``instead_of``. Blocking. Returns what was done, or why not, for people."""
    target = path.resolve()
    try:
        now = target.read_bytes()
        if now == text.encode():
            return f"{path} holds it already"
        if now != instead_of.encode():
            return f"{path} was edited since and is left as it is"
        there = target.stat()
        fd, name = tempfile.mkstemp(prefix=f".{target.stem}.", suffix=target.suffix or ".yaml", dir=target.parent)
        draft = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.chmod(there.st_mode & 0o7777)
            with contextlib.suppress(PermissionError):
                os.chown(draft, there.st_uid, there.st_gid)
            shutil.copy2(target, target.with_name(target.name + "~"))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        return f"{path} is left as it is: {error.strerror}"
    return f"{path} holds it again; what it held is in {target.name}~"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
