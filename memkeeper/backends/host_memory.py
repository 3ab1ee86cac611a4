"""How much host memory can be had: what the kernel says is available, within what the control groups allow, less a margin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MARGIN_MIN = 256 * 1024 * 1024
_MARGIN_PART = 50
"""The margin is 1/50 of all memory, at least 256 MiB: the rest of the machine goes on living."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes. ``group``: what the tightest control group still allows; None where none limits."""

    kernel: int
    group: int | None
    group_name: str
    margin: int

    @property
    def usable(self) -> int:
        least = self.kernel if self.group is None else min(self.kernel, self.group)
        return max(0, least - self.margin)

    def __str__(self) -> str:
        group = "" if self.group is None else f", control group {self.group_name} allows {size_text(self.group)} more"
        return f"{size_text(self.usable)} usable (MemAvailable {size_text(self.kernel)}{group}, margin {size_text(self.margin)})"


def size_text(size: int) -> str:
    """Return ``size`` bytes for people: ``1.5 GiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def available(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Available:
    """Read the figures now."""
    fields = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024 if rest.split() else 0
    group, name = _group_left(proc, cgroup)
    return Available(fields["MemAvailable"], group, name, max(_MARGIN_MIN, fields["MemTotal"] // _MARGIN_PART))


def _group_left(proc: Path, cgroup: Path) -> tuple[int | None, str]:
    """Return what the tightest cgroup v2 above this process still allows, and its name. memfd pages are charged to who allocates them."""
    path = ""
    try:
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path = line[3:]
    except OSError:
        return None, ""
    least: int | None = None
    named = ""
    group = cgroup / path.lstrip("/")
    while group == cgroup or cgroup in group.parents:
        left = _left(group)
        if left is not None and (least is None or left < least):
            least, named = left, "/" + str(group.relative_to(cgroup)).removeprefix(".")
        group = group.parent
    return least, named


def _left(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((group / "memory.current").read_text())
        reclaimable = 0
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):  # page cache, which the kernel gives up first
                reclaimable = int(line.split()[1])
        return max(0, int(limit) - current + reclaimable)
    except (OSError, ValueError):  # no such controller here
        return None
