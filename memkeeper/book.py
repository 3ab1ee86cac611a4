"""The keeper's book: which segments exist, who leases them, who publishes, who waits. Pure: no fd, no socket, no clock of its own.

Methods return *effects* for whoever does I/O (`shadowsup.memkeeper.server`). A connection is an int, a client a name; leases belong to
connections and end with them. After a restore the former leases are *expected*: kept for their clients until those have
connected again or `expire` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.errors import KeeperError, StaleHandle
from shadowsup.memkeeper.segments import Key, SegmentSet


@dataclass(frozen=True)
class Freed:
    """The keeper lets the set's fds go, and the vault forgets them."""

    set: SegmentSet


@dataclass(frozen=True)
class Changed:
    """State, leases or meta of a set changed; the vault is told."""

    set: SegmentSet


@dataclass(frozen=True)
class Grant:
    """A waiting `GetWeights` of ``connection`` is answered with the set."""

    connection: int
    set: SegmentSet


@dataclass(frozen=True)
class Publish:
    """A waiting `GetWeights` of ``connection`` is answered: it is the publisher."""

    connection: int


Effect = Freed | Changed | Grant | Publish


def worker_of(client: str) -> str:
    """Return the worker of an engine id ``NAME.K``, or of one of its ranks, ``NAME.K/RANK``; any other client stands for itself."""
    name, dot, number = client.rpartition(".")
    return name if dot and number.partition("/")[0].isdigit() else client


def kv_devices(request: p.GetKv) -> tuple[str, ...]:
    """Return the device of each slab that is asked for.

    Raises:
        KeeperError: there are not as many as slabs.
    """
    devices = request.devices or (request.device,) * len(request.kv_sizes)
    if len(devices) != len(request.kv_sizes) or (devices and devices[0] != request.device):
        raise KeeperError(f"{len(request.kv_sizes)} KV slabs on {len(devices)} devices", "name one device a slab, the first of them first")
    return devices


class Book:
    """Everything the keeper knows.

    Args:
        generation: of this keeper process.
        new_id: returns a unique hex string.
        clock: monotonic seconds.
    """

    def __init__(self, generation: int, *, new_id: Callable[[], str], clock: Callable[[], float]) -> None:
        self.generation = generation
        self.sets: dict[str, SegmentSet] = {}
        self._new_id = new_id
        self._clock = clock
        self._clients: dict[int, str] = {}
        self._publishers: dict[Key, int | None] = {}
        """Who was told to publish, until it is sealed; None: the publisher under the former keeper, who is expected back."""
        self._waiting: dict[Key, list[int]] = {}
        """Connections in order of arrival."""

    # --- connections ---------------------------------------------------------------------------------------------------------

    def connect(self, connection: int, client: str, holds: Iterable[str]) -> tuple[tuple[str, ...], list[Effect]]:
        """A client came (back). Returns (segments of ``holds`` that are unknown here, effects)."""
        self._clients[connection] = client
        by_segment = {segment: each for each in self.sets.values() for segment in each.segments}
        held: dict[str, SegmentSet] = {}
        stale = []
        for segment in holds:
            if segment in by_segment:
                held[by_segment[segment].set_id] = by_segment[segment]
            else:
                stale.append(segment)
        effects: list[Effect] = []
        for each in held.values():
            if each.weights and not each.sealed:
                if client not in each.expected and client not in each.leases.values():
                    continue  # half-written weights are their publisher's only
                self._publishers[each.key] = connection
            self._lease(connection, each)
            effects.append(Changed(each))
        for each in list(self.sets.values()):
            if client in each.expected:
                each.expected.discard(client)
                if each.set_id not in held:
                    effects += self._settle(each)
        return tuple(stale), effects

    def disconnect(self, connection: int) -> list[Effect]:
        """A client is gone, and its leases with it."""
        self._clients.pop(connection, None)
        for key in list(self._waiting):
            self._waiting[key] = [other for other in self._waiting[key] if other != connection]
        effects: list[Effect] = []
        for each in list(self.sets.values()):
            if each.leases.pop(connection, None) is not None:
                effects += self._settle(each)
        # Publishers that had not created anything yet.
        for key in [key for key, publisher in self._publishers.items() if publisher == connection]:
            del self._publishers[key]
            effects += self._next_publisher(key)
        return effects

    # --- weights -------------------------------------------------------------------------------------------------------------

    def get_weights(self, connection: int, fingerprint: p.Fingerprint, device: str) -> list[Effect]:
        """Answered by an effect for this connection, now or later."""
        key = (fingerprint, device)
        self._waiting.setdefault(key, []).append(connection)
        if self._publishers.get(key) == connection:
            if self._writing(key):
                self._waiting[key].remove(connection)
                raise KeeperError("this client is publishing these weights", "seal or drop them first")
            del self._publishers[key]
        return self._next_publisher(key)

    def plan_weights(self, connection: int, request: p.Create, sizes: Sequence[int]) -> SegmentSet:
        """Return the set that the publisher may create; `add` it when its memory is there."""
        if request.kind is not p.Kind.WEIGHTS:
            raise KeeperError(f"create makes weights, not {request.kind.value}", "ask for KV and its ledger with get_kv")
        if not sizes:
            raise KeeperError("a set of weights has at least one segment")
        key = (request.fingerprint, request.device)
        if self._publishers.get(key, connection) != connection or self._sealed(key):
            raise KeeperError("another client publishes or has published these weights", "ask with get_weights first")
        if self._writing(key):
            raise KeeperError("this client has created these weights already", "seal or drop them first")
        self._publishers[key] = connection
        return self._plan([(p.Kind.WEIGHTS, request.device, size, request.meta) for size in sizes], request.worker, request.fingerprint)

    def to_seal(self, connection: int, set_id: str) -> SegmentSet | None:
        """Return the set to seal, or None where it is sealed already (the call is repeated after a reconnect)."""
        each = self._find(set_id)
        if connection not in each.leases:
            raise KeeperError(f"set {set_id} is not this client's to seal")
        if not each.weights:
            raise KeeperError(f"set {set_id} holds no weights")
        return None if each.sealed else each

    def seal(self, each: SegmentSet, meta: dict[str, str]) -> list[Effect]:
        """The publisher is done; whoever waits gets the set."""
        each.manifests = tuple(msgspec.structs.replace(manifest, meta={**manifest.meta, **meta}) for manifest in each.manifests)
        each.sealed = True
        self._publishers.pop(each.key, None)
        return [Changed(each), *self._next_publisher(each.key)]

    # --- kv ------------------------------------------------------------------------------------------------------------------

    def find_kv(self, request: p.GetKv, sizes: Sequence[int], ledger_size: int) -> SegmentSet | None:
        """Return the worker's present set if it is what is asked for."""
        if request.fresh:
            return None
        for each in self.sets.values():
            first = each.first
            same = (first.worker, first.fingerprint, first.device) == (request.worker, request.fingerprint, request.device)
            if not each.weights and not each.superseded and same:
                kv, ledger = each.manifests[:-1], each.manifests[-1]
                slabs = [(manifest.device, manifest.size) for manifest in kv]
                if slabs == list(zip(kv_devices(request), sizes, strict=True)) and ledger.size == ledger_size:
                    return each
        return None

    def plan_kv(self, request: p.GetKv, sizes: Sequence[int], ledger_size: int, ledger_meta: dict[str, str]) -> SegmentSet:
        """Return a new set for the worker; `add` it when its memory is there."""
        if not request.worker or not sizes:
            raise KeeperError("KV needs a worker and at least one slab")
        slabs = [(p.Kind.KV, device, size, dict[str, str]()) for device, size in zip(kv_devices(request), sizes, strict=True)]
        # Everyone reads the ledger on the CPU.
        return self._plan([*slabs, (p.Kind.LEDGER, "host", ledger_size, ledger_meta)], request.worker, request.fingerprint)

    def supersede(self, worker: str) -> list[Effect]:
        """Give the worker's KV sets to nobody any more; free those without a lease."""
        effects: list[Effect] = []
        for each in list(self.sets.values()):
            if not each.weights and each.first.worker == worker and not each.superseded:
                each.superseded = True
                effects += self._settle(each)
        return effects

    # --- any set -------------------------------------------------------------------------------------------------------------

    def add(self, connection: int, each: SegmentSet) -> None:
        """A planned set exists now, leased by who asked for it."""
        self.sets[each.set_id] = each
        self._lease(connection, each)

    def lease(self, connection: int, each: SegmentSet) -> list[Effect]:
        self._lease(connection, each)
        return [Changed(each)]

    def drop(self, connection: int, set_id: str, *, discard: bool) -> list[Effect]:
        """End a lease. Half-written weights are freed by it."""
        each = self._find(set_id)
        each.leases.pop(connection, None)
        each.superseded = each.superseded or discard
        return self._settle(each)

    def free(self, *, worker: str, set_id: str) -> list[Effect]:
        """By order, whoever leases it. Weights go with the last worker that has used them."""
        if bool(worker) == bool(set_id):
            raise KeeperError("free takes either a worker or a set")
        if set_id:
            return self._free(self._find(set_id))
        effects: list[Effect] = []
        for each in list(self.sets.values()):
            if worker not in ({each.first.worker} if not each.weights else each.workers):
                continue
            if not each.weights or len(each.workers) == 1:
                effects += self._free(each)
            else:
                each.workers.discard(worker)
                effects.append(Changed(each))
        return effects

    def infos(self) -> list[p.SegmentInfo]:
        return [info for each in self.sets.values() for info in each.infos()]

    def holdings(self) -> list[tuple[str, int, tuple[str, ...]]]:
        """Return (what, bytes, who) of every set, largest first."""
        sets = sorted(self.sets.values(), key=lambda each: -each.size)
        return [(f"{each.first.kind.value} of {each.owner_text}", each.size, each.infos()[0].leases) for each in sets]

    # --- restore -------------------------------------------------------------------------------------------------------------

    def restore(self, infos: Iterable[p.SegmentInfo]) -> tuple[list[SegmentSet], list[str]]:
        """Take over what a former keeper had. Returns (new sets, segments of sets that nobody can use: incomplete, or half-written)."""
        by_set: dict[str, list[p.SegmentInfo]] = {}
        for info in infos:
            by_set.setdefault(info.manifest.set_id, []).append(info)
        restored, left_over = [], []
        for set_id, members in by_set.items():
            members.sort(key=lambda info: info.manifest.index)
            complete = [info.manifest.index for info in members] == list(range(members[0].manifest.of))
            # Nobody writes it any more, and nobody will.
            orphaned = members[0].state is p.SegmentState.WRITING and not members[0].leases
            if orphaned or not complete:
                left_over += [info.manifest.segment for info in members]
                continue
            if set_id in self.sets:
                continue
            first = members[0]
            each = SegmentSet(
                manifests=tuple(info.manifest for info in members),
                created_s=first.created_s,
                sealed=first.state is p.SegmentState.SEALED,
                superseded=first.superseded,
                expected=set(first.leases),
                workers=set(first.workers),
            )
            self.sets[set_id] = each
            restored.append(each)
            if each.weights and not each.sealed:
                self._publishers.setdefault(each.key, None)
        return restored, left_over

    def expire(self) -> list[Effect]:
        """Whoever has not come back by now is gone."""
        effects: list[Effect] = []
        for each in list(self.sets.values()):
            if each.expected:
                each.expected.clear()
                effects += self._settle(each)
        return effects

    @property
    def expecting(self) -> bool:
        """Whether clients of the former keeper are not back yet."""
        return any(each.expected for each in self.sets.values())

    # --- within --------------------------------------------------------------------------------------------------------------

    def _plan(self, segments: Iterable[tuple[p.Kind, str, int, dict[str, str]]], worker: str, fingerprint: p.Fingerprint) -> SegmentSet:
        segments = list(segments)
        set_id = f"set-{self.generation}-{self._new_id()}"
        manifests = tuple(
            p.Manifest(
                segment=f"{kind.value}-{self.generation}-{self._new_id()}",
                generation=self.generation,
                kind=kind,
                set_id=set_id,
                index=index,
                of=len(segments),
                worker="" if kind is p.Kind.WEIGHTS else worker,
                device=device,
                size=size,
                fingerprint=fingerprint,
                meta=meta,
            )
            for index, (kind, device, size, meta) in enumerate(segments)
        )
        return SegmentSet(manifests, self._clock(), workers={worker} - {""})

    def _find(self, set_id: str) -> SegmentSet:
        if each := self.sets.get(set_id):
            return each
        parts = set_id.split("-")
        if len(parts) == 3 and parts[1].isdigit() and int(parts[1]) != self.generation:
            raise StaleHandle(
                f"set {set_id} is of generation {parts[1]}; this keeper is generation {self.generation} and does not have it",
                "ask for the memory again",
            )
        raise StaleHandle(f"there is no set {set_id}: it was freed", "ask for the memory again")

    def _sealed(self, key: Key) -> SegmentSet | None:
        return next((each for each in self.sets.values() if each.weights and each.sealed and not each.superseded and each.key == key), None)

    def _writing(self, key: Key) -> SegmentSet | None:
        return next((each for each in self.sets.values() if each.weights and not each.sealed and each.key == key), None)

    def _lease(self, connection: int, each: SegmentSet) -> None:
        client = self._clients[connection]
        each.leases[connection] = client
        each.workers.add(worker_of(client))

    def _next_publisher(self, key: Key) -> list[Effect]:
        """Answer those who wait for ``key``, as far as they can be answered now."""
        waiting = self._waiting.pop(key, [])
        if each := self._sealed(key):
            for connection in waiting:
                self._lease(connection, each)
            return [*(Grant(connection, each) for connection in waiting), *([Changed(each)] if waiting else [])]
        if not waiting:
            return []
        if key in self._publishers:
            self._waiting[key] = waiting
            return []
        first, *others = waiting
        self._publishers[key] = first
        self._waiting[key] = others
        return [Publish(first)]

    def _settle(self, each: SegmentSet) -> list[Effect]:
        """A lease ended or the set was superseded: free it if it goes with its last lease."""
        unleased = not each.leases and not each.expected
        if unleased and (each.superseded or (each.weights and not each.sealed)):
            return self._free(each)
        return [Changed(each)]

    def _free(self, each: SegmentSet) -> list[Effect]:
        del self.sets[each.set_id]
        effects: list[Effect] = [Freed(each)]
        if each.weights and not each.sealed:
            self._publishers.pop(each.key, None)
            effects += self._next_publisher(each.key)
        return effects
