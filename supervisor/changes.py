"""What a changed config means for the node that runs: compared setting by setting, defaults filled in. Pure.

Only what differs is touched; what cannot be changed in a running node refuses the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.model import Backend
from shadowsup.supervisor.config.revision import IN_PLACE, engine_settings, flat
from shadowsup.supervisor.config.secrets import REDACTED, is_secret_name, redact_command
from shadowsup.supervisor.protocol import Change, Consequence, KeyChange, KvFate


class Room(NamedTuple):
    """Whether one engine more fits beside those that run (``why`` not), and about how long it takes to start one; None: not known."""

    fits: bool
    took_s: float | None = None
    why: str = ""


Look = Callable[[WorkerConfig, KvFate], Room]
"""Says of a changed worker whether there is room."""

_NEW_KV = ("model", "revision", "dtype", "kv.size", "kv.block_tokens", "gpus", "tensor_parallel", "shadows")
_SAME_KV = ("env", "env_file", "cwd", "kv.reserve", "health")
_RESTART = "stop the node and start it with this config, or take the change back"


def compare(running: NodeConfig, wanted: NodeConfig, look: Look, hidden: Container[tuple[str, str]] = ()) -> tuple[Consequence, ...]:
    """Return what ``wanted`` means: sections that change, then every worker of it in order, then those that are gone from it.

    ``hidden``: (worker, dotted key) of values that must not be shown, beside those whose name says so.
    """
    found = list(_sections(running, wanted))
    before = {worker.name: worker for worker in running.workers}
    for worker in wanted.workers:
        old = before.pop(worker.name, None)
        found.append(_added(running, worker) if old is None else _worker(running, old, worker, look))
    for name in before:
        found.append(
            Consequence(section="worker", name=name, change=Change.REMOVED, text=f"removes {name}: it finishes its requests first")
        )
    return tuple(_hide(change, hidden) for change in found)


def refusal(changes: Iterable[Consequence]) -> tuple[str, str]:
    """Return why nothing of it can be applied (message, hint); empty where it can."""
    words = [change.text for change in changes if change.change is Change.NODE_RESTART]
    return ("; ".join(words), _RESTART) if words else ("", "")


def summary(changes: Sequence[Consequence]) -> str:
    """Return all of it in one line: ``replaces chat through its shadow; mistral untouched``."""
    words = [change.text for change in changes if change.change is not Change.KEPT]
    kept = [change.name for change in changes if change.change is Change.KEPT]
    if not words:
        return "nothing changes"
    return "; ".join([*words, *([f"{', '.join(kept)} untouched"] if kept else [])])


def _sections(running: NodeConfig, wanted: NodeConfig) -> Iterable[Consequence]:
    for section, fixed in (("node", True), ("memkeeper", True), ("gateway", False)):
        old, new = getattr(running, section), getattr(wanted, section)
        keys = _differences(flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json")))
        if not keys or (section == "memkeeper" and _backend(running) == _backend(wanted)):
            continue
        names = [f"{section}.{key.key}" for key in keys]
        verb = "needs" if len(names) == 1 else "need"
        text = f"{', '.join(names)} {verb} a restart of the node" if fixed else _gateway_text(keys)
        yield Consequence(section=section, change=Change.NODE_RESTART if fixed else Change.IN_PLACE, keys=keys, text=text)


def _gateway_text(keys: Sequence[KeyChange]) -> str:
    words = []
    for key in keys:
        if key.key == "listen":
            words.append(f"gateway listens on {key.new} instead of {key.old}: what is connected stays so")
        else:
            words.append(f"gateway.{key.key} takes effect at once")
    return ", ".join(words)


def _backend(config: NodeConfig) -> str:
    if config.memkeeper.backend is not Backend.AUTO:
        return str(config.memkeeper.backend.value)
    on_gpu = any(worker.gpus for worker in config.workers if worker.engine.keeps_memory)
    return str((Backend.CUDA if on_gpu else Backend.HOST).value)


def _added(running: NodeConfig, worker: WorkerConfig) -> Consequence:
    if why := _out_of_reach(running, worker):
        return Consequence(section="worker", name=worker.name, change=Change.NODE_RESTART, text=f"{worker.name} {why}")
    return Consequence(section="worker", name=worker.name, change=Change.ADDED, text=f"adds {worker.name}")


def _worker(running: NodeConfig, old: WorkerConfig, new: WorkerConfig, look: Look) -> Consequence:
    name = new.name
    engine_keys = _differences(engine_settings(old), engine_settings(new))
    kept_out = set(engine_settings(old)) | set(engine_settings(new))
    other = _differences(_in_place(old, kept_out), _in_place(new, kept_out))
    keys = (*engine_keys, *other)
    if not keys:
        return Consequence(section="worker", name=name, change=Change.KEPT, text=f"{name} untouched")
    listed = _listed(keys)
    if any(key.key == "spares" for key in keys):
        text = f"{name}: spares are looked up when the node starts: it needs a restart of the node"
        return Consequence(section="worker", name=name, change=Change.NODE_RESTART, keys=keys, text=text)
    if not engine_keys:
        return Consequence(section="worker", name=name, change=Change.IN_PLACE, keys=keys, text=f"changes {name} in place ({listed})")
    why = (
        f"{name}: engine {old.engine.value} cannot become {new.engine.value}; give the new one another name"
        if old.engine is not new.engine
        else ""
    )
    why = why or (f"{name} {reach}" if (reach := _out_of_reach(running, new)) else "")
    if why:
        return Consequence(section="worker", name=name, change=Change.NODE_RESTART, keys=keys, text=why)
    kv = _kv(new, [key.key for key in engine_keys])
    fits, gap_s, why = look(new, kv)
    if fits:
        text = f"replaces {name} through its shadow ({listed})" if new.shadows else f"replaces {name} by a new engine beside it ({listed})"
        return Consequence(section="worker", name=name, change=Change.REPLACED, keys=keys, kv=kv, text=text + _kv_text(kv))
    about = f" of about {gap_s:.0f} s" if gap_s is not None else ""
    text = f"restarts {name} with a gap{about} ({listed}): {why}"
    return Consequence(section="worker", name=name, change=Change.GAP, keys=keys, kv=kv, gap_s=gap_s, text=text + _kv_text(kv))


def _in_place(worker: WorkerConfig, without: set[str]) -> dict[str, Any]:
    """Return what takes effect without a new engine, but for what a worker of this kind has in its engine all the same."""
    found = flat(worker.model_dump(mode="json", include=set(IN_PLACE) - {"name"}))
    return {key: value for key, value in found.items() if key not in without}


def _out_of_reach(running: NodeConfig, worker: WorkerConfig) -> str:
    """Return why this node's memkeeper cannot serve ``worker``; empty: it can."""
    if not worker.engine.keeps_memory:
        return ""
    kept = [each for each in running.workers if each.engine.keeps_memory]
    if not kept:
        return "keeps memory, and this node runs without a memkeeper: it needs a restart of the node"
    known = {gpu for each in kept for gpu in (*each.gpus, *each.spares)}
    strange = [gpu for gpu in (*worker.gpus, *worker.spares) if gpu not in known]
    if strange:
        return f"wants GPU {', '.join(map(str, strange))}, which the memkeeper was not started with: it needs a restart of the node"
    return ""


def _kv(worker: WorkerConfig, keys: Sequence[str]) -> KvFate:
    if not worker.engine.keeps_memory:
        return KvFate.NONE
    if any(key in _NEW_KV for key in keys):
        return KvFate.NEW
    return KvFate.KEPT if all(key.partition(".")[0] in _SAME_KV or key in _SAME_KV for key in keys) else KvFate.ENGINE_DECIDES


def _kv_text(kv: KvFate) -> str:
    return {
        KvFate.KEPT: "; its KV is kept",
        KvFate.NEW: "; its KV begins anew, requests in flight are computed again",
        KvFate.ENGINE_DECIDES: "; its KV is kept if the new engine lays it out alike",
    }.get(kv, "")


def _listed(keys: Sequence[KeyChange]) -> str:
    names = [key.key for key in keys]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[KeyChange, ...]:
    return tuple(
        KeyChange(key=key, old=_shown(key, old.get(key)), new=_shown(key, new.get(key)))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    )


def _hide(change: Consequence, hidden: Container[tuple[str, str]]) -> Consequence:
    keys = tuple(
        msgspec.structs.replace(key, old=key.old and REDACTED, new=key.new and REDACTED) if (change.name, key.key) in hidden else key
        for key in change.keys
    )
    return msgspec.structs.replace(change, keys=keys)


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "command":
        return " ".join(redact_command(value))
    if is_secret_name(key.rpartition(".")[2]) and key != "api_key_file":
        return REDACTED
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
