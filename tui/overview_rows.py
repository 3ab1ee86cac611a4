"""The rows of the overview: workers with their engines, devices, events. Pure: a story in, rows out."""

from __future__ import annotations

from collections.abc import Callable

from shadowsup.supervisor.protocol import Event
from shadowsup.tui import spark, tones
from shadowsup.tui.grid import Column, Row
from shadowsup.tui.shapes import Engine, Gpu, Host, Worker
from shadowsup.tui.story import Story
from shadowsup.tui.words import Cell, clock, first_line, percent, rate, size, span

STEP_S = 5.0
FILLING_STEP_S = 30.0
STALE_BEATS_S = 1.0
"""A beat older than this is worth a colour; engines beat five times a second unless told otherwise."""

WORKERS = (
    Column("name", "WORKER / ENGINE", limit=24),
    Column("role", "ROLE", 8, rank=7),
    Column("state", "STATE", 12),
    Column("since", "SINCE", 6, right=True),
    Column("steps", "STEP/S", 6, right=True, rank=9),
    Column("tokens", "TOK/S", 6, right=True),
    Column("inflight", "FLY", 4, right=True),
    Column("queued", "QUEUE", 5, right=True, rank=6),
    Column("kv", "KV", 4, right=True),
    Column("restarts", "↻", 3, right=True, rank=8),
    Column("beat", "BEAT", 5, right=True),
    Column("trend", "TREND", 16, rank=10),
    Column("why", "WHY / NEXT", grow=1, least=10),
)
SORTS: dict[str, tuple[str, Callable[[Story, Worker], object]]] = {
    "name": ("the order of the config", lambda story, worker: 0),
    "state": ("health, the worst first", lambda story, worker: tones.badness(worker.state)),
    "tokens": ("tokens a second", lambda story, worker: -(story.worker_rate(worker) or 0.0)),
    "inflight": ("requests in flight", lambda story, worker: -worker.inflight),
    "queued": ("queue", lambda story, worker: -worker.queued),
    "kv": ("KV used", lambda story, worker: -(worker.kv.used or 0.0)),
    "restarts": ("restarts", lambda story, worker: -worker.restarts),
    "since": ("the newest change of state", lambda story, worker: worker.since_s if worker.since_s is not None else float("inf")),
}
"""Column → what it sorts by, for people, and the key."""


def worker_rows(story: Story, *, sort: str = "name", wanted: str = "", trend: int = 16) -> list[Row]:
    """Return a row for each worker and, below it, one for each of its engines.

    Args:
        sort: a key of `SORTS`.
        wanted: only workers and engines that have this in name, state, role, model or reason.
        trend: columns of a sparkline.
    """
    rows: list[Row] = []
    for worker in sorted(story.status.workers, key=lambda w: SORTS[sort][1](story, w)):  # type: ignore[arg-type, return-value]
        whole = _matches(wanted, worker.name, worker.state, worker.model, worker.reason)
        engines = [e for e in worker.engines if whole or _matches(wanted, e.id, e.role, e.state, e.detail, e.cause)]
        if not whole and not engines:
            continue
        rows.append(_worker(story, worker, trend))
        rows += [_engine(story, engine) for engine in engines]
    return rows


def _matches(wanted: str, *texts: str) -> bool:
    return not wanted or any(wanted.lower() in text.lower() for text in texts)


def _worker(story: Story, worker: Worker, trend: int) -> Row:
    sign, tone = tones.of_state(worker.state)
    now = story.status.time_s
    drawn = spark.line(story.worker_tokens[worker.name].columns(now, trend, STEP_S)) if worker.name in story.worker_tokens else ""
    used = worker.kv.used
    return Row(
        f"w:{worker.name}",
        (
            ((worker.name, "strong"),),
            ((f"epoch {worker.epoch}", "dim"),),
            ((f"{sign} {worker.state}", tone),),
            ((span(worker.since_s), ""),),
            (),
            ((rate(story.worker_rate(worker)), ""),),
            ((str(worker.inflight), ""),),
            ((str(worker.queued), "warn" if worker.queued else "dim"),),
            ((percent(used), "warn" if used is not None and used > 0.97 else ""),),
            ((str(worker.restarts), "warn" if worker.restarts else "dim"),),
            (),
            spark.marked(drawn, now, STEP_S, story.marks(worker.name), "accent", "bad"),
            why(worker),
        ),
        copy=f"{worker.name} {worker.state} epoch {worker.epoch}: {worker.reason or worker.model}",
    )


def why(worker: Worker) -> Cell:
    """Return why a worker is as it is, and what comes next and when."""
    parts: list[tuple[str, str]] = []
    if worker.backoff is not None:
        when = f" in {worker.backoff.in_s:.0f} s" if worker.backoff.in_s >= 0.5 else " now"
        parts.append((f"{worker.backoff.what}{when} (after failure {worker.backoff.failures})  ", "warn"))
    if worker.rollout:
        parts.append((f"roll-out {worker.rollout.get('stage', '')}  ", "warn"))
    if worker.reason:
        parts.append((first_line(worker.reason), "" if worker.state != "down" else "bad"))
    if worker.kv.quarantined:
        parts.append((f"  {worker.kv.quarantined} blocks quarantined", "warn"))
    return tuple(parts) or ((f"{worker.engine} {worker.model}".strip(), "dim"),)


def _engine(story: Story, engine: Engine) -> Row:
    sign, tone = tones.of_state(engine.state)
    beat = engine.heartbeat_age_s
    late = beat is not None and beat > STALE_BEATS_S
    told = engine.cause or engine.detail or engine.phase
    return Row(
        f"e:{engine.id}",
        (
            ((f" └ {engine.id}", ""),),
            ((engine.role, "" if engine.role != "retiring" else "dim"),),
            ((f"{sign} {engine.state}", tone),),
            ((span(engine.since_s), ""),),
            ((rate(story.step_rate(engine)), ""),),
            ((rate(story.token_rate(engine)), ""),),
            ((str(engine.inflight), "" if engine.inflight else "dim"),),
            ((str(engine.queued), "warn" if engine.queued else "dim"),),
            (),
            (),
            ((span(beat), "bad" if late else "dim"),),
            (),
            ((f"pid {engine.pid or '–'}  ", "dim"), (told, "warn" if engine.cause else "dim")),
        ),
        copy=f"{engine.id} {engine.role} {engine.state} pid {engine.pid or '-'}: {told}",
    )


DEVICES = (
    Column("device", "DEVICE", limit=16),
    Column("bar", "MEMORY", grow=3, least=12),
    Column("filling", "", 10, rank=8),
    Column("used", "", 13, right=True),
    Column("util", "BUSY", 4, right=True),
    Column("trend", "", 16, rank=5),
    Column("power", "POWER", 9, right=True, rank=6),
    Column("temperature", "TEMP", 5, right=True, rank=3),
    Column("clock", "CLOCK", 8, right=True, rank=7),
    Column("trouble", "ECC / XID", grow=1, least=9, rank=2),
)


def device_rows(story: Story, bar: int, trend: int) -> list[Row]:
    """Return a row for each GPU; on a machine without, one for main memory and the processors. ``bar``, ``trend``: columns of those."""
    status = story.status
    if status.gpus:
        return [_gpu(story, gpu, bar, trend) for gpu in status.gpus]
    return [_host(story, status.host, bar, trend)] if status.host is not None else []


def _shares(memory: dict[str, int | None]) -> dict[str, float | None]:
    return {name: memory.get(name) for name in ("weights", "kv", "engines", "other", "foreign")}


def _gpu(story: Story, gpu: Gpu, bar: int, trend: int) -> Row:
    sign, tone = tones.of_state(gpu.state)
    total = float(gpu.memory_total or 0)
    now = story.status.time_s
    history = story.gpu_util.get(gpu.uuid)
    drawn = spark.line(history.columns(now, trend, STEP_S), top=1.0) if history is not None else ""
    warnings = " ".join(gpu.warnings)
    trouble: Cell = ((warnings, "bad"),) if warnings else ((f"{gpu.ecc_uncorrected} uncorrected", "bad"),) if gpu.ecc_uncorrected else ()
    if gpu.stale:
        trouble = ((f"figures of {span(gpu.age_s)} ago  ", "warn"), *trouble)
    if not trouble:
        trouble = ((" ".join(gpu.throttled), "warn"),) if gpu.throttled else (("none", "dim"),)
    return Row(
        f"g:{gpu.uuid}",
        (
            ((f"{sign} ", tone), (f"{gpu.index if gpu.index is not None else ''} {_short(gpu.name)}", "")),
            spark.stacked(_shares(gpu.memory), total, bar) if gpu.memory_used is not None else ((gpu.state, "dim"),),
            _filling(story.gpu_memory.get(gpu.uuid), now),
            ((f"{size(gpu.memory_used)}/{size(gpu.memory_total)}", ""),),
            ((percent(gpu.util / 100 if gpu.util is not None else None), ""),),
            spark.marked(drawn, now, STEP_S, story.marks(), "accent", "bad"),
            ((f"{gpu.power_w:.0f}" if gpu.power_w is not None else "–", ""), (_limit(gpu.power_limit_w), "dim")),
            ((f"{gpu.temperature_c:.0f}°C" if gpu.temperature_c is not None else "–", _heat(gpu.temperature_c)),),
            ((f"{gpu.clock_sm_mhz:.0f} MHz" if gpu.clock_sm_mhz is not None else "–", "dim"),),
            trouble,
        ),
        copy=f"{gpu.uuid} {gpu.name} {gpu.state} {size(gpu.memory_used)} of {size(gpu.memory_total)} {warnings}".strip(),
    )


def _filling(history: spark.History | None, now: float) -> Cell:
    """The history of how full a memory is, a column for each half minute."""
    return ((spark.line(history.columns(now, 10, FILLING_STEP_S), top=1.0), "kv"),) if history is not None else ()


def _limit(watts: object) -> str:
    return f"/{watts:.0f} W" if isinstance(watts, int | float) else " W"


def _heat(celsius: object) -> str:
    if not isinstance(celsius, int | float):
        return "dim"
    return "bad" if celsius >= 90 else "warn" if celsius >= 80 else ""


def _short(name: str) -> str:
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _host(story: Story, host: Host, bar: int, trend: int) -> Row:
    now = story.status.time_s
    cpu = story.cpu.last
    return Row(
        "host",
        (
            ((f"● host, {host.cpus} CPU", ""),),
            spark.stacked(_shares(host.memory), float(host.memory_total), bar),
            _filling(story.host_memory, now),
            ((f"{size(host.memory_used)}/{size(host.memory_total)}", ""),),
            ((percent(cpu), "warn" if cpu is not None and cpu > 0.9 else ""),),
            spark.marked(spark.line(story.cpu.columns(now, trend, STEP_S), top=1.0), now, STEP_S, story.marks(), "accent", "bad"),
            ((f"load {host.load:.1f}", "dim"),),
            (),
            (),
            (("no GPU is in use", "dim"),),
        ),
    )


def legend(story: Story) -> Cell:
    """Return what the parts of the memory bars are, with the sum over the devices."""
    status = story.status
    sums: dict[str, int] = {}
    for memory in [gpu.memory for gpu in status.gpus] or ([status.host.memory] if status.host is not None else []):
        for name, value in memory.items():
            if value is not None:
                sums[name] = sums.get(name, 0) + value
    names = {"weights": "weights", "kv": "KV", "engines": "engines' own", "other": "not kept", "foreign": "foreign"}
    parts: list[tuple[str, str]] = []
    for name, title in names.items():
        if name in sums:
            parts += [(f"{spark.FILLS.get(name, '▒')}", name), (f" {title} {size(sums[name])}   ", "dim")]
    return tuple(parts)


EVENTS = (
    Column("time", "TIME", 8),
    Column("level", "", 1),
    Column("event", "EVENT", limit=22, rank=3),
    Column("who", "WHO", limit=14, rank=2),
    Column("message", "WHAT HAPPENED", grow=1, least=20),
)
_LEVELS = {"warning": ("▲", "warn"), "error": ("✖", "bad")}


def event_rows(story: Story, count: int = 200) -> list[Row]:
    """Return the newest events, the newest last."""
    return [event_row(event) for event in list(story.events)[-count:]]


def event_row(event: Event) -> Row:
    sign, tone = _LEVELS.get(event.level, ("·", "dim"))
    text = first_line(event.message)
    return Row(
        f"n:{event.n}",
        (
            ((clock(event.ts), "dim"),),
            ((sign, tone),),
            ((event.event, "dim"),),
            ((event.engine or event.worker or "", ""),),
            ((text, tone if tone != "dim" else ""),),
        ),
        copy=f"{clock(event.ts)} {event.level} {event.event} {event.engine or event.worker or ''}: {event.message}",
    )
