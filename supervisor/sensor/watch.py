"""What is wrong with a GPU, from one reading to the next. Pure: readings in, news and warnings out."""

from __future__ import annotations

import msgspec

from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading

RISING_S = 60.0
"""How long errors that rose are a warning: one that stays alone is forgotten after that."""

RECOVERY = {
    1: "the driver asks for a reset of this GPU",
    2: "the driver asks for a reboot of the node",
    3: "the driver asks to drain peer-to-peer work",
    4: "the driver asks to drain and reset this GPU",
    5: "the driver asks for a bus reset",
    6: "the driver asks to recover the IMEX domain",
}
"""NVML_GPU_RECOVERY_ACTION_*; 0 is none."""


class GpuWatch:
    """One GPU."""

    def __init__(self) -> None:
        self._last: GpuReading | None = None
        self._rose_s = float("-inf")
        self._rose_by = 0

    def take(self, reading: GpuReading, now_s: float) -> tuple[GpuReading, tuple[GpuNews, ...]]:
        """Compare with the last reading.

        Returns: the reading with its warnings, and what has happened since the last one.
        """
        last, self._last = self._last, reading
        news: list[GpuNews] = []

        def tell(kind: GpuNewsKind, number: int, text: str) -> None:
            news.append(GpuNews(uuid=reading.uuid, kind=kind, number=number, text=text, at_s=now_s))

        if reading.lost:
            if last is None or not last.lost:
                tell(GpuNewsKind.LOST, 0, "the GPU has fallen off the bus")
            return reading, tuple(news)
        warnings = list(reading.warnings)
        before = last.ecc_uncorrected if last is not None else None
        if before is not None and reading.ecc_uncorrected is not None and reading.ecc_uncorrected > before:
            self._rose_s, self._rose_by = now_s, reading.ecc_uncorrected - before
            tell(GpuNewsKind.ECC, self._rose_by, f"{self._rose_by} uncorrected memory errors more")
        if now_s - self._rose_s < RISING_S:
            warnings.append(f"uncorrected memory errors rose by {self._rose_by}, {now_s - self._rose_s:.0f} s ago")
        if _lanes_lost(reading):
            words = f"PCIe link at x{reading.pcie_width} of x{reading.pcie_width_max}"
            warnings.append(words)
            if last is None or not _lanes_lost(last):
                tell(GpuNewsKind.PCIE, reading.pcie_width or 0, words)
        if reading.recovery_action:
            words = RECOVERY.get(reading.recovery_action, f"the driver asks for recovery action {reading.recovery_action}")
            warnings.append(words)
            if last is None or last.recovery_action != reading.recovery_action:
                tell(GpuNewsKind.RECOVERY, reading.recovery_action, words)
        rose = self._rose_by if now_s - self._rose_s < RISING_S else 0
        return msgspec.structs.replace(reading, warnings=tuple(warnings), ecc_rose=rose), tuple(news)


def _lanes_lost(reading: GpuReading) -> bool:
    width, most = reading.pcie_width, reading.pcie_width_max
    # A link of width 0 is one that NVML cannot see (virtual machines).
    return bool(width and most and width < most)
