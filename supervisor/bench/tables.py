"""Results for people: rows of text from the documents of a run. The terminal and the README show the same rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MODES = {"shadow": "shadow", "respawn": "respawn", "cold": "cold spawn", "plain": "plain restart"}
_STEPS = {
    "death_seen": "death seen",
    "freeze": "frozen",
    "promote": "promoted",
    "first_token": "first token sent",
    "fence": "fenced",
    "refill": "next shadow parked",
}
RANKS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True, kw_only=True)
class Table:
    """``columns``: titles; the first one is text, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables(document: dict[str, Any]) -> list[Table]:
    """Return what a document of any bench says."""
    made: list[Table] = _OF[document["bench"]](document)
    return made


def setting(document: dict[str, Any]) -> str:
    """Return a line on what it was measured on, and when."""
    machine, load = document["machine"], document["load_before"]
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB{gpus}",
        f"Linux {machine['kernel'].split('-')[0]}, Python {machine['python']}",
        *(f"{name} {machine[name]}" for name in ("torch", "transformers") if machine[name]),
        f"shadowsup {machine['shadowsup']}, {document['date']}",
    ]
    busy = "" if load["quiet"] else f"; the machine was busy: load average {load['1m']} before the run"
    return ", ".join(parts) + busy


def milliseconds(value: float | None) -> str:
    """Return ``0.42 ms``, ``7.3 ms``, ``184 ms``, ``12.4 s``; ``–`` for nothing."""
    if value is None:
        return "–"
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    if value >= 1_000:
        return f"{value / 1e3:.2f} s"
    return f"{value:.2f} ms" if abs(value) < 2 else f"{value:.1f} ms" if abs(value) < 100 else f"{value:.0f} ms"


def _failover(document: dict[str, Any]) -> list[Table]:
    modes: dict[str, dict[str, Any]] = document["modes"]
    rows = []
    for mode, result in modes.items():
        client = result["client"]
        wrong = sum(len(kill["what"]) for kill in result["wrong"])
        rows.append(
            [
                _MODES[mode],
                *(_rank(client["first_token_ms"], rank) for rank in ("p50", "p99")),
                *(_rank(client["longest_gap_ms"], rank) for rank in ("p50", "max")),
                f"{result['streams_broken']:,} of {result['streams_killed']:,}",
                f"{wrong:,}",
                _share(result["cached_share_min"]),
            ]
        )
    columns = ("kill -9, then", "token p50", "p99", "gap p50", "max", "broken", "wrong", "KV kept")
    summary = Table(title="Failover, seen by clients", columns=columns, rows=rows, notes=_failover_notes(document, modes))
    steps = [
        [name, *(_rank(modes["shadow"]["node_ms"][step], rank) for rank in RANKS)] for step, name in _STEPS.items() if "shadow" in modes
    ]
    if not steps:
        return [summary]
    client = modes["shadow"]["client"]
    steps[4:4] = [
        ["token at the first client", *(_rank(client["first_token_ms"], rank) for rank in RANKS)],
        ["token at each client", *(_rank(client["each_stream_ms"], rank) for rank in RANKS)],
    ]
    return [summary, Table(title="Failover to a shadow, from the kill on", columns=("step", *RANKS), rows=steps)]


def _failover_notes(document: dict[str, Any], modes: dict[str, dict[str, Any]]) -> list[str]:
    plan, engine = document["plan"], document["engine"]
    some = next(iter(modes.values()))
    prompt = f"prompts of {min(some['prompt_tokens'])} tokens, {plan['output_tokens']} generated"
    checked = sum(result["tokens_checked"] for mode, result in modes.items() if mode != "plain")
    what = "ids and text" if all(result["ids_checked"] for result in modes.values()) else "text"
    notes = [
        f"{plan['kills']} kills a row under {plan['streams']} streams, {prompt}; {engine['model']}, {engine['dtype']}.",
        "Token: from the kill to the next token at the first client. Gap: the longest pause of a stream in its whole life.",
        f"{checked:,} tokens of shadowsup's rows were compared ({what}) with an undisturbed run; wrong: streams that differ from it.",
    ]
    if "plain" in modes:
        caught_up = modes["plain"]["client"]["caught_up_ms"]
        notes.append(
            "Plain restart: the same engine in a server without shadowsup, restarted at once; its clients ask again from the start."
        )
        if caught_up is not None:
            back = f"{milliseconds(caught_up['p50'])} (p50), {milliseconds(caught_up['max'])} (max)"
            notes.append(f"There the first token that a client did not have before the kill comes after {back}.")
    return notes


def _throughput(document: dict[str, Any]) -> list[Table]:
    plan, rates = document["plan"], document["tokens_per_s"]
    names = {"node": "keeper, ledger, gateway, a parked shadow", "plain": "the same engine in a server of its own"}
    rows = [
        [text, f"{document['median_tokens_per_s'][name]:.1f}", f"{min(rates[name]):.1f}", f"{max(rates[name]):.1f}"]
        for name, text in names.items()
    ]
    note = f"{plan['streams']} streams, {plan['rounds']} rounds in turns; with shadowsup {document['ratio']:.1%} of without."
    return [Table(title="Steady tokens a second", columns=("one active engine", "median", "min", "max"), rows=rows, notes=[note])]


def _neighbour(document: dict[str, Any]) -> list[Table]:
    plan, figures = document["plan"], document["first_token_ms"]
    names = {"well": "both workers are well", "recovering": "the other worker recovers"}
    rows = [[text, *(_rank(figures[name], rank) for rank in RANKS)] for name, text in names.items()]
    note = (
        f"{plan['kills']} kills of the other worker, which serves {plan['streams']} streams all the time; "
        f"{len(document['wrong'])} of its streams differed from an undisturbed run."
    )
    return [Table(title="First token of another worker's client", columns=("while", *RANKS), rows=rows, notes=[note])]


def _gateway(document: dict[str, Any]) -> list[Table]:
    rows = []
    for run in document["latency"]:
        for name, added in run["added_ms"].items():
            per_core = run["runs"][name]["tokens_per_cpu_s"]
            figures = [milliseconds(added["p50"]), milliseconds(added["p99"]), f"{per_core:,}" if per_core else "–"]
            rows.append([f"{name}, {run['streams']} streams" if run["streams"] > 1 else f"{name}, 1 stream", *figures])
    top = max(run["tokens_per_cpu_s"] or 0 for run in document["throughput"] if run["target"] == "gateway")
    notes = [
        f"Beside a direct connection to the same stub engine at {document['plan']['steps_per_s']:g} steps a second, one event a token.",
        f"An engine that is faster than that gets up to {top:,} tokens a second of a core: tokens are then merged into one event.",
    ]
    columns = ("in between", "added p50", "added p99", "tokens/s of a core")
    return [Table(title="Latency that the gateway adds to a token", columns=columns, rows=rows, notes=notes)]


def _supervisor(document: dict[str, Any]) -> list[Table]:
    plan = document["plan"]
    rows = [
        ["CPU", f"{document['core_percent']:.2f} % of a core"],
        ["resident memory", f"{document['rss'] / 1e6:.0f} MB"],
        ["status over its socket, p99", milliseconds(document["status_ms"]["p99"])],
        ["shadowsup status, p99", milliseconds(document["status_command_ms"]["p99"])],
    ]
    title = f"The supervisor with {plan['engines']} engines at {plan['beats_per_s']:g} beats a second"
    return [Table(title=title, columns=("what", "figure"), rows=rows, notes=[f"Watched for {plan['seconds']:g} s."])]


def _chaos(document: dict[str, Any]) -> list[Table]:
    detected, settled = document["detected_ms"], document["settled_ms"]
    rows = [
        [
            kind,
            f"{count:,}",
            *(_rank(detected.get(kind), rank) for rank in ("p50", "p99")),
            *(_rank(settled.get(kind), rank) for rank in ("p50", "max")),
        ]
        for kind, count in document["faults"]["by_kind"].items()
    ]
    streams, blocks = document["streams"], document["blocks"]
    ways = ", ".join(f"{count:,} by {kind}" for kind, count in sorted(document["recoveries"]["by_kind"].items()))
    leaks = [f"{what}: {', '.join(each)}" for what, each in document["leaks"].items() if each]
    notes = [
        f"{'A toy engine' if document['engine']['model'] == 'toy' else document['engine']['model']}; "
        f"{document['faults']['total']:,} faults in {document['seconds']:.0f} s under {document['plan']['streams']} streams, "
        f"seed {document['plan']['seed']}; {document['recoveries']['total']:,} recoveries: {ways or 'none'}.",
        f"{streams['finished']:,} streams, {document['tokens_compared']:,} tokens compared with an undisturbed run: "
        f"{streams['wrong']} wrong; {streams['cut_by_gateway']} cut by a death of the gateway.",
        f"Full blocks of the prompts found in kept KV: {_exact_share(blocks['share'])}. Longest gap of a stream: "
        f"{milliseconds(document['longest_gap_ms'])}.",
        f"Left behind: {'; '.join(leaks) or 'nothing'}.",
    ]
    if document["stuck"]:
        notes.append(f"The run ended early: {document['stuck']}.")
    columns = ("struck", "times", "seen p50", "p99", "whole again p50", "max")
    return [Table(title="Random faults under load", columns=columns, rows=rows, notes=notes)]


_OF: dict[str, Any] = {
    "chaos": _chaos,
    "failover": _failover,
    "throughput": _throughput,
    "neighbour": _neighbour,
    "gateway": _gateway,
    "supervisor": _supervisor,
}


def _rank(figures: dict[str, float] | None, rank: str) -> str:
    return milliseconds(figures[rank]) if figures is not None else "–"


def _exact_share(share: float | None) -> str:
    """What is not all of it must not be shown as all."""
    return "–" if share is None else "100%" if share == 1.0 else f"{min(share, 0.9999):.2%}"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
