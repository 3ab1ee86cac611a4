"""Write the results in ``benchmarks/results/*.json`` into the README, between its markers.

python benchmarks/report.py            rewrites the blocks
python benchmarks/report.py --check    exits with 1 when a block is not what the files say
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shadowsup.supervisor.bench.tables import Table, milliseconds, setting, tables

ROOT = Path(__file__).parents[1]
ORDER = ("failover", "failover-4-streams", "failover-8-streams", "throughput", "neighbour", "gateway", "supervisor", "chaos")
GPU_ORDER = ("gpu_failover-h200", "gpu_failover-h200-2", "gpu_failover-h200-3", "gpu_failover-h200-4", "gpu_neighbours-h200-x2")
"""Names of the files, without their ending."""

SUPERSEDED = {"gpu_failover-h200-3": ("shadow",), "gpu_vllm-h200-1": ("shadow", "throughput", "beside")}
"""Sections that were measured again with later code: not shown."""

VLLM_ORDER = ("gpu_vllm-h200", "gpu_vllm-h200-1")
"""The newest first."""

SMALL_KV_OF_TOKEN = 2 * 30 * 3 * 64 * 4
"""Bytes of K and V that a token takes in the shape of SmolLM2-135M: layers, KV heads, head size, float32."""


def documents(folder: Path, names: Sequence[str] = ORDER) -> list[dict[str, Any]]:
    """Return the results that there are, in order."""
    found = []
    for file in (folder / f"{name}.json" for name in names):
        if file.exists():
            document = json.loads(file.read_text())
            for section in SUPERSEDED.get(file.stem, ()):
                document["sections"].pop(section, None)
            found.append(document)
    return found


def block(found: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers; nothing where there are no results."""
    if not found:
        return ""
    about = (
        "By `shadowsup bench failover` and its siblings; [benchmarks/README.md](benchmarks/README.md) says what each figure means"
        " and what it does not."
    )
    text = f"\n## Measured\n\n{about}\n"
    for document in found:
        for table in tables(document):
            text += f"\n**{table.title}**\n\n{_markdown(table)}\n"
            text += "".join(f"\n{note}" for note in table.notes) + ("\n" if table.notes else "")
        text += f"\n<sub>{setting(document)}.</sub>\n"
    return text + "\n"


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---", *(["---:"] * (len(table.columns) - 1))], *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def gpu_block(found: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers of the GPU, from documents of `gpu_failover.py`; nothing where there are no results."""
    if not found:
        return ""
    table = gpu_table(found)
    runs = "one run" if len(found) == 1 else f"{len(found)} runs"
    text = f"\n### On an H200\n\nBy [benchmarks/gpu_failover.py](benchmarks/gpu_failover.py), {runs}.\n"
    text += f"\n**{table.title}**\n\n{_markdown(table)}\n\n"
    text += "".join(f"- {note}\n" for note in table.notes)
    settings = dict.fromkeys(setting(document) for document in found)
    return text + "".join(f"\n<sub>{line}.</sub>\n" for line in settings) + "\n"


def gpu_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each case of each document."""
    sections = [section for document in found for section in document["sections"].items()]
    cases = [(name, case, result) for name, section in sections for case, result in section.items() if _is_case(result)]
    rows = [_gpu_row(*case) for order in ("exact", "often", "shadow", "respawn", "plain") for case in cases if case[0] == order]
    columns = ("killed, then", "KV in use", "streams", "kills", "token p50", "p99", "max", "death seen", "broken", "wrong", "diverged")
    return Table(title="Failover, seen by each client", columns=columns, rows=rows, notes=_gpu_notes(sections))


def _is_case(result: Any) -> bool:
    return isinstance(result, dict) and "wrong" in result


def _gpu_row(section: str, case: str, result: Mapping[str, Any]) -> list[str]:
    names = {"exact": "shadow, SmolLM2's shape, float32", "respawn": "no shadow: respawn", "plain": "plain restart"}
    special = {"32k context": "shadow, contexts of 32k", "after that": "shadow, keeper restarted before"}
    token, plan = result.get("client", result)["each_stream_ms"], result.get("plan")
    if plan is None:  # a kill of the keeper; nothing to compare its streams with, only counted
        name = f"{case.removesuffix(' killed')}: shadow" if "engine" in case else f"{case.removesuffix(' killed')} alone"
        return [name, "–", f"{result['longest_gap_ms']['n']}", "1", *_ranks(token), "–", "–", f"{len(result['wrong'])}", "–"]
    in_use = result.get("kv_in_use") or (sum(result["prompt_tokens"]) * SMALL_KV_OF_TOKEN if section == "exact" else None)
    seen = result["node_ms"]["death_seen"]
    return [
        names.get(section, special.get(case, "shadow")),
        f"{in_use / 1e9:.1f} GB" if in_use else "–",
        f"{plan['streams']}",
        f"{plan['kills']}",
        *_ranks(token),
        milliseconds(seen and seen["p50"]),
        f"{result['streams_broken']} of {result['streams_killed']}",
        f"{sum(len(one['what']) if isinstance(one, dict) else 1 for one in result['wrong'])}",
        f"{result['diverged']} of {result['streams_killed']}" if "diverged" in result else "–",
    ]


def _ranks(figures: Mapping[str, float]) -> list[str]:
    return [milliseconds(figures[rank]) for rank in ("p50", "p99", "max")]


def _gpu_notes(sections: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, section in sections:
        by_name.setdefault(name, []).append(section)
    often = [section for name in ("often", "shadow") for section in by_name.get(name, ())]
    checked = sum(section["kills"]["tokens_checked"] for section in by_name.get("exact", ()) if "kills" in section)
    notes = [
        "An 8B Llama's shape in bfloat16, random weights, but for the rows in float32. "
        "A kill is a SIGKILL to the active engine under load.",
        "Token: from the kill to the next token, over all streams of all kills of a row. Streams of one kill resume together: "
        "with few kills p99 says little more than the maximum.",
        "Diverged: in bfloat16 a step's rounding depends on who is in the batch, and random weights leave the logits nearly even, so that "
        "a stream goes on with other tokens than undisturbed. What comes then is not compared; wrong are errors and early ends there. "
        "That tokens are right is what the rows in float32 show.",
    ]
    if checked:
        notes.insert(
            2,
            f"In float32 each of {checked:,} tokens was compared with an undisturbed run; wrong: streams with one lost or changed.",
        )
    plain = [section["2 GB"] for section in by_name.get("plain", ()) if "2 GB" in section]
    with_shadow = [section["2 GB"] for section in often if "2 GB" in section]
    if with_shadow and plain:
        client, count = plain[0]["client"], plain[0]["plan"]["kills"]
        times = client["each_stream_ms"]["p50"] / with_shadow[0]["client"]["each_stream_ms"]["p50"]
        notes.append(
            f"Plain restart ({count} kill{'s' if count > 1 else ''}): the same engine without shadowsup, restarted at once. Its clients "
            f"ask again and wait {times:.0f} times as long for a token as with a shadow (medians), and "
            f"{milliseconds(client['caught_up_ms']['p50'])} for one that they did not have. "
            "Weights are made on the device, not read from a disk."
        )
    for steady in by_name.get("throughput", ()):
        plan, medians = steady["plan"], steady["median_tokens_per_s"]
        spread = {name: f"{min(rates):,.0f} to {max(rates):,.0f}" for name, rates in steady["tokens_per_s"].items()}
        notes.append(
            f"Steady decoding, {plan['streams']} streams, {plan['rounds']} rounds in turns: {medians['node']:,.0f} tokens/s on a node "
            f"({spread['node']}), {medians['plain']:,.0f} without ({spread['plain']}); with shadowsup {steady['ratio']:.1%} of without."
        )
    for name, where in (("neighbours", "on one GPU"), ("two-gpus", "each on a GPU of its own")):
        for section in by_name.get(name, ()):
            result = section["2 workers"]
            quiet, other, resumed = result["undisturbed_gap_ms"], result["other_gap_ms"], result["killed_resumed_ms"]
            notes.append(
                f"Two workers {where}, {result['streams']} streams each, {result['kills']} kills of the first one's engine: "
                f"the second one's streams pause {milliseconds(other['max'])} at most ({milliseconds(quiet['max'])} undisturbed), "
                f"the first one's next token comes after {milliseconds(resumed['p50'])}; {len(result['wrong'])} wrong."
            )
    for section in by_name.get("illegal-access", ()):
        result = section["2 workers"]
        deaths = ", ".join(dict.fromkeys(f"{one['fault']}: {one['decision']}" for one in result["deaths"]))
        beside = 2 * int(result["other_gap_ms"]["n"])
        notes.append(
            f"A request at which the engine's device code breaks, among {beside} streams of two workers on one "
            f"GPU: after {len(result['deaths'])} deaths ({deaths}) it is failed by name, {len(result['wrong'])} of the others are wrong, "
            f"and the other worker's streams pause {milliseconds(result['other_gap_ms']['max'])} at most."
        )
    memory = [section["memory"] for section in often if "memory" in section]
    if memory:
        parked = ", ".join(dict.fromkeys(f"{one['shadow'] / 1e9:.2f} GB" for one in memory))
        kept = ", ".join(dict.fromkeys(f"{one['kept'] / 1e9:.0f} GB" for one in memory))
        notes.append(
            f"A parked shadow of the 8B shape takes {parked} of the device, besides {kept} of weights and KV that all engines share."
        )
    return notes


def vllm_block(found: Sequence[dict[str, Any]]) -> str:
    """Return what is said of vLLM on a GPU, from documents of `gpu_vllm.py`, the newest first; nothing where there is none."""
    if not found:
        return ""
    sections = [section for document in found for section in document["sections"].values()]
    versions = ", ".join(dict.fromkeys(section.get("vllm_version", "?") for section in sections))
    text = f"\n### vLLM on an H200\n\nvLLM {versions}, by [benchmarks/gpu_vllm.py](benchmarks/gpu_vllm.py). {_VLLM_SETTING}\n"
    for number, document in enumerate(found):
        table = vllm_table(document["sections"])
        text += f"\n**{table.title}{', an earlier run' if number else ''}**\n\n{_markdown(table)}\n\n"
        text += "".join(f"- {note}\n" for note in table.notes)
        text += f"\n<sub>{setting(document)}.</sub>\n\n"
    return text


_VLLM_SETTING = (
    "An 8B Llama's shape in bfloat16, random weights, vLLM's defaults. Tokens are compared with an undisturbed run; a stream that went "
    "on with others counts as diverged, since vLLM's steps depend on who is in the batch unless it is told to be batch-invariant."
)
_KILLED = {"core": "EngineCore", "api": "API server", "rank0": "rank 0 of 2", "rank1": "rank 1 of 2"}
_THEN = {
    "shadow": "shadow",
    "exact": "shadow, batch-invariant",
    "tp2": "shadow, two GPUs",
    "tp2-exact": "shadow, two GPUs, batch-invariant",
    "respawn": "no shadow: respawn",
}


def vllm_table(sections: Mapping[str, Any]) -> Table:
    """Return a row for each process that was killed, by section."""
    rows = []
    for section, then in _THEN.items():
        for case in ("256k tokens", "16 streams"):
            for which, result in sections.get(section, {}).get(case, {}).items():
                seen = result["node_ms"]["death_seen"]
                rows.append(
                    [
                        f"{_KILLED[which]}: {then}",
                        f"{result['kv_in_use'] / 1e9:.1f} GB",
                        f"{result['plan']['streams']}",
                        f"{result['plan']['kills']}",
                        *_ranks(result["client"]["each_stream_ms"]),
                        milliseconds(seen and seen["p50"]),
                        f"{result['streams_broken']} of {result['streams_killed']}",
                        f"{len(result['wrong'])}",
                        f"{result['diverged']} of {result['streams_killed']}",
                    ]
                )
    columns = ("killed, then", "KV in use", "streams", "kills", "token p50", "p99", "max", "death seen", "broken", "wrong", "diverged")
    return Table(title="Failover, seen by each client", columns=columns, rows=rows, notes=_vllm_notes(sections))


def _vllm_notes(found: Mapping[str, Any]) -> list[str]:
    sections = {name: section for name, section in found.items() if "failed" not in section}
    notes: list[str] = []
    if plain := sections.get("plain"):
        first = plain["first_token_s"]
        listed = " and ".join(f"{one:.1f} s" for one in first)
        times = "once" if len(first) == 1 else f"{len(first)} times"
        notes.append(
            f"Plain vLLM, killed and restarted at once ({times}): the first token of a prompt of 4,000 tokens after {listed}; "
            "its clients' streams are lost, and its KV."
        )
    if steady := sections.get("throughput"):
        node, vllm = (statistics.median(steady[name]) for name in ("node", "vllm"))
        notes.append(
            f"Steady, 32 streams with prompts of 1,000 tokens, {len(steady['node'])} rounds each: {node:,.0f} tokens/s on a node with a "
            f"parked shadow, {vllm:,.0f} with plain vLLM; with shadowsup {steady['share']:.1%} of without."
        )
    if beside := sections.get("beside"):
        quiet, busy = beside["undisturbed"]["gap_ms"], beside["a shadow starts"]["gap_ms"]
        notes.append(
            f"While a shadow starts beside 16 streams, until it is parked after {beside['parked_after_s']:.0f} s: from token to "
            f"token p50 {busy['p50']:.1f}, p99 {busy['p99']:.1f}, at most {busy['max']:.1f} ms; undisturbed {quiet['p50']:.1f}, "
            f"{quiet['p99']:.1f}, {quiet['max']:.1f}."
        )
    two = next((memory for name in ("beside", "shadow") if (memory := sections.get(name, {}).get("memory"))), None)
    if two and (one := sections.get("respawn", {}).get("memory")):
        took, kept = (two["used"] - one["used"]) / 1e9, two["kept"] / 1e9
        notes.append(f"A parked shadow takes {took:.1f} GB of the device, besides {kept:.0f} GB that all engines share.")
    return notes


def replaced(readme: str, text: str, name: str = "results") -> str:
    """Return ``readme`` with ``text`` between the markers ``name``.

    Raises:
        ValueError: it has no such markers, or several.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"the README needs exactly one {begin} and one {end}")
    before, _, rest = readme.partition(begin)
    return f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Write the results into the README.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the README is stale")
    options = parser.parse_args(arguments)
    path = root / "README.md"
    before = path.read_text()
    results = root / "benchmarks" / "results"
    after = replaced(before, block(documents(results)))
    vllm = vllm_block(documents(results, VLLM_ORDER))
    after = replaced(after, gpu_block(documents(results, GPU_ORDER)) + vllm, "results-gpu")
    if before == after:
        return 0
    if options.check:
        print("README.md does not show what benchmarks/results has: run python benchmarks/report.py", file=sys.stderr)
        return 1
    path.write_text(after)
    print("README.md was brought up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
