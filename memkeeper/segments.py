"""A set of segments as the keeper's book has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shadowsup.memkeeper import protocol as p

Key = tuple[p.Fingerprint, str]
"""What weights are asked for by: fingerprint and device."""


@dataclass(eq=False)
class SegmentSet:
    """Segments that are created, given out and freed together."""

    manifests: tuple[p.Manifest, ...]
    created_s: float
    sealed: bool = False
    superseded: bool = False
    leases: dict[int, str] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)
    """Clients that leased it under an earlier keeper and are not back yet."""
    workers: set[str] = field(default_factory=set)

    @property
    def first(self) -> p.Manifest:
        return self.manifests[0]

    @property
    def set_id(self) -> str:
        return self.first.set_id

    @property
    def weights(self) -> bool:
        return self.first.kind is p.Kind.WEIGHTS

    @property
    def key(self) -> Key:
        return self.first.fingerprint, self.first.device

    @property
    def state(self) -> p.SegmentState:
        if self.weights:
            return p.SegmentState.SEALED if self.sealed else p.SegmentState.WRITING
        return p.SegmentState.LEASED if self.leases or self.expected else p.SegmentState.FROZEN

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(manifest.segment for manifest in self.manifests)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(manifest.size for manifest in self.manifests)

    @property
    def owner_text(self) -> str:
        return self.first.worker or "/".join(sorted(self.workers)) or "no worker"

    def infos(self) -> list[p.SegmentInfo]:
        return [
            p.SegmentInfo(
                manifest=manifest,
                state=self.state,
                leases=tuple(sorted({*self.leases.values(), *self.expected})),
                created_s=self.created_s,
                workers=tuple(sorted(self.workers)),
                superseded=self.superseded,
            )
            for manifest in self.manifests
        ]
