"""What holds weights and KV of one device, as the seams in a worker see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shadowsup.memkeeper.protocol import Fingerprint
    from shadowsup.wire.engine import EngineSpec
    from shadowsup.workers.api import KvGeometry
    from shadowsup.workers.arena import KvArena
    from shadowsup.workers.weights import KeptWeights, WeightStore


class Holding(Protocol):
    """`EngineLife` where worker and scheduler share a process, else a `RankLife`. Called in this order.

    Attributes:
        device: a device UUID or ``host``.
        weight_bytes: of the device.
        weight_marks: for the KV's fingerprint: what its bytes depend on of the weights.
    """

    spec: EngineSpec
    device: str
    weight_bytes: int
    weight_marks: tuple[tuple[str, str], ...]

    def connect(self) -> WeightStore:
        """Return the weight store of this device."""

    def progress(self, words: str) -> None:
        """Say what goes on."""

    def take_weights(self, weights: KeptWeights, mark: Fingerprint) -> None:
        """The model's weights are there."""

    def reserve_range(self, size: int) -> KvArena:
        """Return the arena for ``size`` bytes of blocks, over scratch."""

    def hold(self, geometry: KvGeometry, weights: Fingerprint | None) -> None:
        """The KV tensors are laid out, and this is what the blocks are."""

    def warmed(self) -> None:
        """Nothing touches the arena any more until the promotion."""
