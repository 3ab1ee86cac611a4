"""``processes.json``: every process this node runs, so that the next supervisor can adopt or end it.

Written at each change by rename, so that a supervisor killed at any instant leaves a whole file. There is no fsync: a machine that
crashes takes the processes with it, and another boot id makes the old entries void.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.policy.past import Past

SCHEMA = 1

log = logging.getLogger("shadowsup.registry")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``what``: ``engine``, ``keeper``, ``gateway``, ``nursery``, ``scribe``, ``sensor``."""

    identity: Identity
    what: str
    engine: str = ""
    """Engine id; for other kinds a name where there are several (a nursery's)."""
    tag: str = ""
    """Value of ``SHADOWSUP_ENGINE`` in its environment, see `shadowsup.supervisor.tree`."""
    pgid: int = 0
    """Its process group, 0 = none of its own."""
    data: dict[str, str] = {}
    """What an adopting supervisor needs besides: paths of sockets and spec."""

    @property
    def cgroup(self) -> Path | None:
        """The folder of its control group, where it has one."""
        return Path(self.data["cgroup"]) if self.data.get("cgroup") else None


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker has come, for a supervisor that goes on with it. ``cold_start_s`` 0.0: never measured."""

    seq: int = 0
    """The largest K of ``NAME.K`` that was ever given to an engine; it is on disk before the engine is started."""
    epoch: int = 0
    """The newest epoch that was ordered. The ledger's header knows better, where there is one."""
    desired: str = "run"
    """What the operator wants: ``run | drain | stop``."""
    cold_start_s: float = 0.0
    past: Past = Past()
    """What it has been through; void after another boot."""


class OutOfUse(msgspec.Struct, frozen=True, kw_only=True):
    """A reason for which nothing is started on a GPU. ``by``: its name; the engine's that cannot be ended, if ``process``."""

    gpu: str
    by: str
    why: str
    process: bool = False


class _File(msgspec.Struct, kw_only=True):
    schema: int
    processes: list[Entry]
    workers: dict[str, Mark] = {}
    out_of_use: list[OutOfUse] = []
    boot_id: str = ""


class Registry:
    """The file of one runtime directory. One writer: the supervisor that holds the node's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[Identity, Entry] = {}
        self._workers: dict[str, Mark] = {}
        self._out_of_use: tuple[OutOfUse, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def record(self, entry: Entry) -> None:
        """Add or replace the entry of ``entry.identity``; it is on disk when this returns. Call right after the spawn.

        Raises:
            SupervisorError: the file cannot be written; the process is not in the list, and must not run.
        """
        before = self._entries.get(entry.identity)
        self._entries[entry.identity] = entry
        try:
            self._write()
        except SupervisorError:
            if before is None:
                del self._entries[entry.identity]
            else:
                self._entries[entry.identity] = before
            raise

    def forget(self, identity: Identity) -> None:
        """Drop a process that is gone; unknown ones are ignored. Never raises: a dead process in the file does no harm, and the next
        change takes it out."""
        if self._entries.pop(identity, None) is not None:
            try:
                self._write()
            except SupervisorError as error:
                log.warning("%s", error)

    @property
    def marks(self) -> dict[str, Mark]:
        return dict(self._workers)

    def mark(self, worker: str) -> Mark:
        """Return how far the worker had come when that was last recorded."""
        return self._workers.get(worker, Mark())

    def set_mark(self, worker: str, mark: Mark) -> None:
        """Record how far a worker has come. Never raises: what cannot be written now is written with the next change."""
        if self._workers.get(worker) == mark:
            return
        self._workers[worker] = mark
        try:
            self._write()
        except SupervisorError as error:
            log.warning("%s", error)

    @property
    def out_of_use(self) -> tuple[OutOfUse, ...]:
        """Why which GPUs are quarantined."""
        return self._out_of_use

    def set_out_of_use(self, reasons: tuple[OutOfUse, ...]) -> None:
        """Record them, in place of what was recorded. Never raises, as `set_mark`."""
        if self._out_of_use == reasons:
            return
        self._out_of_use = reasons
        try:
            self._write()
        except SupervisorError as error:
            log.warning("%s", error)

    def leftovers(self) -> tuple[Entry, ...]:
        """Read the file an earlier supervisor left and return, and keep, the entries whose process still runs.

        Raises:
            SupervisorError: the file is not readable as a registry. Nothing may be started then: it could be the second one.
        """
        for entry in self.resume():
            if not ids.alive(entry.identity):
                del self._entries[entry.identity]
        return self.entries

    def resume(self) -> tuple[Entry, ...]:
        """Read the file an earlier supervisor left, and keep and return all that it says, also of processes that are gone.

        Who takes over must know of these: their children may be left. Entries of an earlier boot are void.

        Raises:
            SupervisorError: as `leftovers`.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SupervisorError(f"cannot read {self._path}: {error.strerror}") from error
        try:
            found = msgspec.json.decode(raw, type=_File)
        except msgspec.MsgspecError as error:
            raise SupervisorError(
                f"{self._path} is not a list of processes: {error}",
                "find what an earlier supervisor left running (ps aux | grep shadowsup), end it, then remove the file",
            ) from error
        if found.schema != SCHEMA:
            raise SupervisorError(
                f"{self._path} has schema {found.schema}, this version writes {SCHEMA}",
                "stop the node with the version that started it",
            )
        for entry in found.processes:
            if entry.identity.boot_id == ids.boot_id():
                self._entries.setdefault(entry.identity, entry)
        marks = found.workers
        if found.boot_id == ids.boot_id():
            self._out_of_use = self._out_of_use or tuple(found.out_of_use)
        else:  # its times are of another clock, and a GPU that has been reset since is another matter
            marks = {name: msgspec.structs.replace(mark, past=Past()) for name, mark in marks.items()}
        self._workers = marks | self._workers
        return self.entries

    def _write(self) -> None:
        content = _File(
            schema=SCHEMA,
            processes=list(self._entries.values()),
            workers=self._workers,
            out_of_use=list(self._out_of_use),
            boot_id=ids.boot_id(),
        )
        data = msgspec.json.format(msgspec.json.encode(content))
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            # Mode at creation: a moment with wider permissions would be one moment too many.
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            temporary.rename(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise SupervisorError(f"cannot write {self._path}: {error.strerror}", "is the runtime directory full or gone?") from error
