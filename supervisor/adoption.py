"""Taking over what a dead supervisor has left running: who there was, who lives, what they say of themselves.

The processes of a node need no supervisor to serve. The next one takes each of them by its identity (pid, start time, boot), connects as
its predecessor did, and hears what they are; `shadowsup.supervisor.policy.adoption` makes of it how each worker stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shadowsup.memkeeper.ledger_word import read_owner
from shadowsup.memkeeper.protocol import Kind
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor import node_record, runtime_dir
from shadowsup.supervisor.config import LoadedConfig, NodeConfig
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.gateway import handover
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.node_record import NodeRecord
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import Desired, Ending, How
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.registry import Entry, Mark, Registry
from shadowsup.supervisor.tree import kill_tree, tagged
from shadowsup.wire.engine import Beat, Report

if TYPE_CHECKING:
    from shadowsup.memkeeper.vault import Vault
    from shadowsup.supervisor.node import Node

BEATS_S = 1.0
"""How long living engines may take to dial the new supervisor. They try every 20 to 200 ms; one that hangs is adopted silent."""
HANDOVER_S = 1.0
"""How long a gateway may take to give its listening sockets."""
NURSERY_S = 1.0
"""How long a living nursery is waited for: a worker without a shadow is replaced by a fork rather than by a cold start."""
SWEEP_S = 5.0

log = logging.getLogger("shadowsup.adoption")


class Adoption:
    """What was left in one runtime directory. Made before anything is touched; used once.

    Attributes:
        record: what the node's start had decided.
        config: the config that runs.
        entries: every process that was recorded, the dead ones too.
        began_ticks: when it was made, as `Identity.start_time` counts: nothing of what has started since is another supervisor's.
    """

    def __init__(self, path: Path, record: NodeRecord, config: NodeConfig, entries: Sequence[Entry]) -> None:
        self.record = record
        self.config = config
        self.entries = tuple(entries)
        self.began_ticks = _boot_ticks()
        self._path = path
        self._living = frozenset(entry.identity for entry in entries if ids.alive(entry.identity))
        self._taken: set[Identity] = set()
        self._beats: dict[str, Beat] = {}
        self._pending: set[str] = {worker.name for worker in config.workers}
        self._heard = asyncio.Event()

    # --- before the loop --------------------------------------------------------------------------------------------------------

    def sockets(self, bind: Callable[[str], list[socket.socket]]) -> list[socket.socket]:
        """Return the gateway's listening sockets: its own, or new ones where there is no gateway any more.

        Raises:
            SupervisorError: somebody else has the address now.
        """
        found = handover.fetch(self._path / "gateway.sock", HANDOVER_S)
        if found:
            return found
        gateway = self.part("gateway")
        if gateway is not None:  # it hangs, and nobody else can have the port before it is gone
            log.warning("the gateway (pid %d) does not answer and is replaced", gateway.identity.pid)
            end_tree(gateway)
        return [sock for address in self.record.listen.split(",") for sock in bind(address)]

    def tell(self, wanted: LoadedConfig, say: Callable[[str], None]) -> None:
        """Say what is adopted, and what of it is not as ``wanted``."""
        say(f"adopting {len(self._living)} processes of node {self.config.node.name}, whose supervisor is gone")
        if different := node_record.differences(self.config, wanted.config):
            say(f"it runs as it was started, not as {wanted.path} has it now: {', '.join(different)}")
            say(f"shadowsup reload {wanted.path} applies that")

    # --- who there is -----------------------------------------------------------------------------------------------------------

    def lives(self, entry: Entry) -> bool:
        return entry.identity in self._living

    def part(self, what: str, label: str = "") -> Entry | None:
        """Return the living process of a part, the newest if there are several."""
        found = [entry for entry in self.entries if (entry.what, entry.engine) == (what, label) and self.lives(entry)]
        chosen = max(found, key=lambda entry: entry.identity.start_time, default=None)
        if chosen is not None:
            self._taken.add(chosen.identity)
        return chosen

    def engines(self, worker: str) -> list[Entry]:
        """Return the engines of a worker, oldest first; what is left of dead ones is to be ended too."""
        found = [entry for entry in self.entries if entry.what == "engine" and entry.engine.rpartition(".")[0] == worker]
        self._taken |= {entry.identity for entry in found}
        return sorted(found, key=_seq)

    def unknown(self) -> list[Entry]:
        """Return the living that nobody has asked for."""
        return [entry for entry in self.entries if entry.identity not in self._taken and self.lives(entry)]

    # --- what they say ----------------------------------------------------------------------------------------------------------

    def wants(self, worker: str) -> bool:
        """Say whether what this worker's engines say is still to be collected here."""
        return worker in self._pending

    def heard(self, report: Report) -> None:
        if isinstance(report, Beat):
            self._beats[report.engine] = report
            self._heard.set()

    async def beats(self, engines: Iterable[str], timeout_s: float = BEATS_S) -> None:
        """Wait until each of ``engines`` has been heard, ``timeout_s`` at most."""
        wanted = set(engines)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while wanted - self._beats.keys():
                    self._heard.clear()
                    await self._heard.wait()

    def facts(self, worker: str, mark: Mark, vault: Vault | None) -> m.Adopt:
        """Return all that is known of a worker now; from here on its engines speak to its owner."""
        self._pending.discard(worker)
        epoch, owner, kv_set = ledger_facts(vault, worker)
        entries = self.engines(worker)
        living = [entry for entry in entries if ids.alive(entry.identity)]
        upstream = next((entry.data["upstream"] for entry in reversed(living) if "upstream" in entry.data), "")
        return m.Adopt(
            engines=tuple(self._engine(entry) for entry in entries),
            seq=mark.seq,
            epoch=max(epoch, mark.epoch),
            owner=owner if epoch >= mark.epoch else 0,
            kv_set=kv_set,
            desired=_desired(mark),
            cold_start_s=mark.cold_start_s or None,
            upstream=upstream,
            past=mark.past,
        )

    def _engine(self, entry: Entry) -> m.FoundEngine:
        data = entry.data
        return m.FoundEngine(
            id=entry.engine,
            seq=_seq(entry),
            how=How(data.get("how", How.COLD.value)),
            pid=entry.identity.pid,
            spawned_s=float(data.get("spawned_s", time.monotonic())),
            alive=ids.alive(entry.identity),
            beat=self._beats.get(entry.engine),
            refill=data.get("refill") == "1",
            ending=Ending(data["ending"]) if "ending" in data else None,
            gpus=tuple(data["gpus"].split(",")) if data.get("gpus") else None,
            revision=data.get("revision", ""),
        )


def find(path: Path) -> Adoption | None:
    """Return what is alive of a node in ``path``, None when nothing is. What dead processes have left of their trees is ended.

    Raises:
        SupervisorError: something is alive, and the records that an adoption needs are not there or not readable.
    """
    entries = Registry(path / runtime_dir.PROCESSES).resume()
    living = [entry for entry in entries if ids.alive(entry.identity)]
    if not living:
        for entry in entries:
            end_tree(entry)
        return None
    names = ", ".join(named(entry) for entry in living)
    hint = f"they serve on; shadowsup --runtime-dir {path} stop ends them, then start again"
    try:
        record = node_record.read(path)
        config = record.node_config() if record is not None else None
    except (SupervisorError, ValueError) as error:
        why = error.message if isinstance(error, SupervisorError) else "its config is another version's"
        raise SupervisorError(f"parts of this node are alive without a supervisor and cannot be adopted: {names}\n{why}", hint) from error
    if record is None or config is None:
        raise SupervisorError(f"parts of this node are alive without a supervisor: {names}", hint)
    return Adoption(path, record, config, entries)


def named(entry: Entry) -> str:
    """Return ``engine chat.3 (pid 17)``."""
    return f"{entry.what} {entry.engine}".strip() + f" (pid {entry.identity.pid})"


def end_tree(entry: Entry, timeout_s: float = SWEEP_S) -> bool:
    """SIGKILL to what is left of a process and its children; wait for it. Blocking. Returns whether all of it is gone."""
    killed = kill_tree(tag=entry.tag, pgid=entry.pgid, leader=entry.identity, cgroup=entry.cgroup)
    try:
        poller = select.poll()
        left = {member.pidfd for member in killed.members}
        for pidfd in left:
            poller.register(pidfd, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while left and (remaining := deadline - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(remaining * 1000):
                poller.unregister(pidfd)
                left.discard(pidfd)
        return not left
    finally:
        killed.close()


def ledger_facts(vault: Vault | None, worker: str) -> tuple[int, int, str]:
    """Return (epoch, owner, set id) of the KV set that was owned last; zeros and an empty id where the vault has none.

    There are several while new settings are rolled out.
    """
    if vault is None:
        return 0, 0, ""
    sets = [
        info for info in vault.segments() if info.manifest.kind is Kind.LEDGER and info.manifest.worker == worker and not info.superseded
    ]
    facts = [(*read_owner(vault.fd(info.manifest.segment)), info.manifest.set_id) for info in sets]
    return max(facts, key=lambda fact: fact[0], default=(0, 0, ""))


def facts_of_memory(worker: str, mark: Mark, vault: Vault) -> m.Adopt:
    """Return what is known of a worker of which nothing is left but its memory."""
    epoch, _, kv_set = ledger_facts(vault, worker)
    return m.Adopt(seq=mark.seq, epoch=max(epoch, mark.epoch), kv_set=kv_set, cold_start_s=mark.cold_start_s or None, past=mark.past)


async def take_over(node: Node, found: Adoption) -> None:
    """Hear each worker's engines and hand them to its owner; a worker whose engines have all spoken does not wait for another's.

    What runs and is nobody's is ended.
    """
    vault = node.parts.keeper.vault if node.parts.keeper is not None else None

    async def take(worker: str) -> None:
        owner = node.workers[worker]
        entries = found.engines(worker)
        if isinstance(owner.policy, WorkerPolicy):
            await found.beats(entry.engine for entry in entries if found.lives(entry))
        if owner.nursery is not None and owner.nursery.pid is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NURSERY_S):
                    await owner.nursery.running.wait()
        owner.adopt(found.facts(worker, node.registry.mark(worker), vault), entries)

    await asyncio.gather(*(take(worker) for worker in node.workers))
    strays = found.unknown()
    for entry in strays:
        log.warning("%s belongs to nothing that runs here and is ended", named(entry))
        node.run_task(_end_stray(node, entry))
    node.run_task(_end_unrecorded(node, found))


async def _end_stray(node: Node, entry: Entry) -> None:
    if await asyncio.to_thread(end_tree, entry):
        node.registry.forget(entry.identity)


async def _end_unrecorded(node: Node, found: Adoption) -> None:
    """End engines of this node whose supervisor died between their start and their record: nobody will ever promote them."""
    recorded = {entry.tag for entry in node.registry.entries}

    def look() -> list[tuple[Identity, str]]:
        mine = f"/{found.record.instance}"
        return [(one, tag) for one, tag in tagged(f"{node.config.node.name}/") if tag.endswith(mine) and tag not in recorded]

    for identity, tag in await asyncio.to_thread(look):
        if identity.start_time > found.began_ticks:
            continue  # started by us, meanwhile: it runs some ms before it is recorded
        log.warning("pid %d is an engine that was never recorded (%s) and is ended", identity.pid, tag)
        pidfd = ids.open_identity(identity)
        if pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def _boot_ticks() -> int:
    """Return now, as `Identity.start_time` counts."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _seq(entry: Entry) -> int:
    number = entry.engine.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def _desired(mark: Mark) -> Desired:
    try:
        return Desired(mark.desired)
    except ValueError:
        return Desired.RUN
