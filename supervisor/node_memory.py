"""The kept memory of a node, as its supervisor sees to it: what outlived others is taken back, what nobody needs any more is freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor.adoption import Adoption, facts_of_memory
from shadowsup.supervisor.node_parts import KeeperPart
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.part_set import PartSet
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.registry import Mark
from shadowsup.supervisor.service import Service


class KeptMemory:
    """One for a node; where it has no keeper there is nothing to free, and no worker has memory.

    Args:
        parts: the keeper is one of them.
        service: what may have kept memory for this node.
    """

    def __init__(self, parts: PartSet, service: Service) -> None:
        self._parts = parts
        self._host = parts.host
        self._service = service

    # --- what is there at the start ---------------------------------------------------------------------------------------------

    def take_back(self, keeper: KeeperPart, workers: Sequence[str], marks: Mapping[str, Mark], found: Adoption | None) -> None:
        """Of memory that outlived supervisor and keeper: the keeper is given it before it serves anyone.

        Args:
            workers: the names of those whose memory it may be.
            marks: how far they had come.
            found: what runs of this node already.
        """
        count = keeper.preload(lambda vault: self._service.fill(vault, workers))
        if count and found is None:
            for name, mark in marks.items():
                self._host.registry.set_mark(name, mark)
        if count:
            self._host.journal.add("keeper.kept", f"{count} segments were kept by the service manager")
        elif found is not None and found.part("keeper") is None:
            self._rescue(keeper, workers, found)

    def _rescue(self, keeper: KeeperPart, workers: Sequence[str], found: Adoption) -> None:
        """Supervisor and keeper have died together: what engines hold of the memory is given to the next keeper."""
        engines = [entry.identity for entry in found.entries if entry.what == "engine" and found.lives(entry)]
        missing = 0

        def fill(vault: Vault) -> int:
            nonlocal missing
            count, missing = self._service.rescue(vault, engines, workers)
            return count

        if count := keeper.preload(fill):
            self._host.journal.add("keeper.rescued", f"{count} segments were taken back from the engines that hold them")
        if missing:
            text = f"{missing} segments cannot be taken back: engines go on with them, and those that come later start with fresh memory"
            self._host.journal.add("keeper.lost", text, level="warning", data={"segments": missing})

    def begin_worker(self, owner: WorkerOwner) -> None:
        """Have a worker run of which no engine does; with the memory that is left of it, if any is."""
        keeper, kept = self._parts.keeper, self._host.registry.mark(owner.name)
        vault = keeper.vault if keeper is not None else None
        if vault is None or kept == Mark():
            owner.put(m.RunWorker())
        else:
            owner.adopt(facts_of_memory(owner.name, kept, vault), ())

    # --- what is not needed any more --------------------------------------------------------------------------------------------

    def free(self, worker: str) -> None:
        """Free what is this worker's own."""
        self._host.run_task(self._free(worker))

    def tidy(self, worker: str, keep: str) -> None:
        """Free what only engines of ``worker`` used that are gone. ``keep``: its KV set in use."""
        if self._parts.keeper is not None:
            self._host.run_task(self._parts.keeper.tidy(worker, keep))

    async def _free(self, worker: str) -> None:
        keeper = self._parts.keeper
        if keeper is None or not keeper.policy.wanted:
            return
        try:
            await keeper.free(worker)
        except (KeeperError, TimeoutError) as error:
            text = f"memory of {worker} was not freed: {error}"
            self._host.journal.add("keeper.free_failed", text, level="warning", worker=worker)
