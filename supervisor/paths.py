"""Where a node keeps what: names of sockets and files in its runtime and state directories."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor import runtime_dir
from shadowsup.wire.staged import socket_of


@dataclass(frozen=True)
class NodePaths:
    """``runtime``: sockets, specs, records; gone after a stop. ``state``: logs and history of this node, on disk."""

    runtime: Path
    state: Path

    def prepare(self, group: int | None = None) -> None:
        """Create the folders below (`runtime` itself is made by `runtime_dir.create`). ``group``: may read the logs.

        Raises:
            OSError: one cannot be made, or given to the group, or somebody else can write to it.
        """
        self.engines.mkdir(mode=0o700, exist_ok=True)
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.state, self.logs):
            status = folder.stat()
            # Who could have put a link where a log is going to be could have us write into any file of ours.
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o002:
                raise OSError(errno.EPERM, "it belongs to another user, or everybody may write to it", str(folder))
        if group is None:
            self.logs.chmod(0o700)
            return
        for folder, mode in ((self.state, 0o710), (self.logs, 0o2750)):  # setgid: the files in it are the group's (`scribe_file`)
            os.chown(folder, -1, group)
            folder.chmod(mode)

    @property
    def overheads(self) -> Path:
        """What engines were measured to cost their devices."""
        return self.state / "overheads.json"

    @property
    def control(self) -> Path:
        return self.runtime / runtime_dir.CONTROL_SOCKET

    @property
    def events(self) -> Path:
        return self.runtime / runtime_dir.EVENTS_SOCKET

    @property
    def control_ro(self) -> Path:
        return self.runtime / runtime_dir.READING_CONTROL_SOCKET

    @property
    def events_ro(self) -> Path:
        return self.runtime / runtime_dir.READING_EVENTS_SOCKET

    @property
    def record(self) -> Path:
        return self.runtime / runtime_dir.NODE_RECORD

    @property
    def processes(self) -> Path:
        return self.runtime / runtime_dir.PROCESSES

    @property
    def beats(self) -> Path:
        return self.runtime / "beat.sock"

    @property
    def keeper(self) -> Path:
        return self.runtime / "keeper.sock"

    @property
    def scribe(self) -> Path:
        return self.runtime / "scribe.sock"

    @property
    def gateway_spec(self) -> Path:
        return self.runtime / "gateway.json"

    @property
    def retune(self) -> Path:
        return self.runtime / "gateway-settings.sock"

    @property
    def handover(self) -> Path:
        return self.runtime / "gateway.sock"

    @property
    def engines(self) -> Path:
        return self.runtime / "engines"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    def nursery(self, number: int) -> Path:
        return self.runtime / f"nursery-{number}.sock"

    def link(self, engine: str) -> Path:
        return self.runtime / f"link-{engine}.sock"

    def staged(self, engine: str) -> Path:
        return Path(socket_of(str(self.link(engine))))

    def notify(self, engine: str) -> Path:
        return self.runtime / f"notify-{engine}.sock"

    def spec(self, engine: str) -> Path:
        return self.engines / f"{engine}.json"

    def tether(self, engine: str) -> Path:
        return self.engines / f"{engine}.tether"

    def front(self, engine: str) -> Path:
        return self.engines / f"{engine}.front"

    def files(self, engine: str) -> Path:
        """A folder for what the engine leaves lying when it is killed (vLLM's sockets)."""
        return self.engines / f"{engine}.files"

    def rank(self, engine: str, rank: int) -> Path:
        """The tether of one rank's process."""
        return self.engines / f"{engine}.rank{rank}"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def write_private(path: Path, data: bytes) -> None:
    """Replace a file by ``data``, readable by its owner only, never seen half-written."""
    temporary = path.with_name(f".{path.name}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.replace(path)
