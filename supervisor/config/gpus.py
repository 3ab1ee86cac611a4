"""GPU ids as people write them (index, ``GPU-…``, ``MIG-…``) and their resolution to UUIDs. Pure: the inventory is given.

Everything inside uses UUIDs, with CUDA_DEVICE_ORDER=PCI_BUS_ID, so an index means the same GPU to NVML, CUDA and people.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_HEX = r"[0-9a-fA-F]"
_UUID = re.compile(rf"(GPU|MIG)-{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\Z")
_PREFIX = re.compile(rf"(GPU|MIG)-{_HEX}[0-9a-fA-F-]*\Z")
_OLD_MIG = re.compile(rf"MIG-GPU-{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}/\d+/\d+\Z")
_INDEX = re.compile(r"\d+\Z")


@dataclass(frozen=True)
class GpuIdentity:
    """One device that can be used: a GPU, or one MIG instance (``index`` is then its parent's). ``mig_enabled``: the GPU is divided."""

    index: int
    uuid: str
    mig_enabled: bool = False


def check_gpu_id(text: str) -> str:
    """Return ``text`` in its usual spelling.

    Raises:
        ValueError: neither an index nor a (shortened) UUID.
    """
    stripped = text.strip()
    if _INDEX.match(stripped):
        return str(int(stripped))
    kind, dash, rest = stripped.partition("-")
    canonical = f"{kind.upper()}-{rest}" if dash else stripped
    if _OLD_MIG.match(canonical):
        return canonical
    if _UUID.match(canonical):
        return f"{canonical[:4]}{canonical[4:].lower()}"
    if _PREFIX.match(canonical):
        if len(canonical) < 12:
            raise ValueError(f"{text!r} is too short to name one GPU; give at least 8 digits, better the whole UUID (nvidia-smi -L)")
        return f"{canonical[:4]}{canonical[4:].lower()}"
    if match := re.match(r"(?:cuda|gpu):?(\d+)\Z", stripped, re.IGNORECASE):
        raise ValueError(f"{text!r} is not a GPU id; write {match.group(1)}")
    raise ValueError(f"{text!r} is not a GPU id; write an index (0), GPU-UUID or MIG-UUID, as nvidia-smi -L lists them")


def gpu_list(value: Any) -> Any:
    """Return a list of ids as text; an index may be a number. Used by the schema; leaves what is no list to it.

    Raises:
        ValueError: an id is malformed or there twice.
    """
    if not isinstance(value, list | tuple):
        return value
    found: list[str] = []
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int | str):
            return value
        if isinstance(item, int) and item < 0:
            raise ValueError(f"{item} is not a GPU index")
        gpu = check_gpu_id(str(item))
        if gpu in found:
            raise ValueError(f"{gpu} is there twice")
        found.append(gpu)
    return found


def resolve(ids: Sequence[str], inventory: Sequence[GpuIdentity]) -> tuple[str, ...]:
    """Return the UUID of each id. ``inventory`` has all GPUs and MIG instances of this machine; indices are in PCI bus order.

    Raises:
        ValueError: an id names no device, several devices, a GPU that is divided into MIG instances, or one that another id names.
    """
    there = ", ".join(f"{gpu.index}={gpu.uuid}" for gpu in inventory) or "no GPU"
    resolved: dict[str, str] = {}
    for text in ids:
        wanted = check_gpu_id(text)
        if _INDEX.match(wanted):
            matches = [gpu for gpu in inventory if gpu.uuid.startswith("GPU-") and gpu.index == int(wanted)]
        else:
            matches = [gpu for gpu in inventory if gpu.uuid.lower() == wanted.lower()] or [
                gpu for gpu in inventory if gpu.uuid.lower().startswith(wanted.lower())
            ]
        if not matches:
            raise ValueError(f"no GPU {text} here; there is {there}")
        if len(matches) > 1:
            raise ValueError(f"{text} is ambiguous: {', '.join(gpu.uuid for gpu in matches)}")
        gpu = matches[0]
        if gpu.mig_enabled:
            parts = ", ".join(part.uuid for part in inventory if part.index == gpu.index and part.uuid.startswith("MIG-"))
            raise ValueError(f"{text} is divided by MIG and cannot be used whole; name an instance: {parts or 'none is configured'}")
        if gpu.uuid in resolved:
            raise ValueError(f"{text} and {resolved[gpu.uuid]} are the same GPU ({gpu.uuid})")
        resolved[gpu.uuid] = text
    return tuple(resolved)
