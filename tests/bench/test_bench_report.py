"""The README's figures come from the result files, and from nowhere else."""

from __future__ import annotations

import copy
import getpass
import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_world import benchmark

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.tables import milliseconds, setting, tables
from shadowsup.supervisor.cli.output import Column, table

ROOT = Path(__file__).parents[2]
GPU_MARKERS = "<!-- results-gpu -->\n<!-- /results-gpu -->\n"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return benchmark("report")


def ranks(value: float) -> dict[str, float]:
    return {"p50": value, "p90": value, "p99": 2 * value, "max": 3 * value, "n": 4}


MODE: dict[str, Any] = {
    "prompt_tokens": [612, 608],
    "tokens_checked": 4096,
    "ids_checked": True,
    "streams_killed": 16,
    "streams_broken": 0,
    "wrong": [],
    "client": {"first_token_ms": ranks(180.0), "each_stream_ms": ranks(190.0), "longest_gap_ms": ranks(210.0)},
    "cached_share_min": 1.0,
    "node_ms": {step: ranks(1.0) for step in ("death_seen", "freeze", "promote", "first_token", "fence", "refill")},
}
PLAIN = {**MODE, "streams_broken": 16, "cached_share_min": 0.0, "client": {**MODE["client"], "caught_up_ms": ranks(19_000.0)}}


@pytest.fixture
def failover() -> dict[str, Any]:
    return machine.document(
        "failover",
        {"1m": 0.1, "5m": 0.1, "quiet": True},
        {
            "plan": {"kills": 2, "streams": 8, "output_tokens": 96},
            "engine": {"model": "SmolLM2.gguf", "dtype": "float32"},
            "modes": {"shadow": copy.deepcopy(MODE), "plain": copy.deepcopy(PLAIN)},
        },
    )


def test_the_readme_shows_what_the_results_say(report: ModuleType) -> None:
    assert report.main(["--check"]) == 0


def test_a_stale_readme_is_found_and_brought_up_to_date(
    report: ModuleType, tmp_path: Path, failover: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"# before\n<!-- results -->\nold figures\n<!-- /results -->\n{GPU_MARKERS}after\n")
    (tmp_path / "benchmarks/results/failover.json").write_text(json.dumps(failover))
    assert report.main(["--check"], tmp_path) == 1
    assert "python benchmarks/report.py" in capsys.readouterr().err
    assert report.main([], tmp_path) == 0
    assert report.main(["--check"], tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("# before\n<!-- results -->\n")
    assert text.endswith(f"<!-- /results -->\n{GPU_MARKERS}after\n")
    assert "old figures" not in text
    assert "| shadow | 180 ms | 360 ms | 210 ms | 630 ms | 0 of 16 | 0 | 100% |" in text
    assert "| plain restart | 180 ms | 360 ms | 210 ms | 630 ms | 16 of 16 | 0 | 0% |" in text
    assert "comes after 19.0 s (p50), 57.0 s (max)." in text


def test_without_results_the_block_is_empty(report: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- results -->\n<!-- /results -->\n{GPU_MARKERS}")
    assert report.main(["--check"], tmp_path) == 0


def test_a_readme_without_markers_is_not_touched(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no markers\n")
    with pytest.raises(ValueError, match="exactly one"):
        report.main([], tmp_path)


@pytest.mark.parametrize("missing", ["<!-- results -->\n", "<!-- /results-gpu -->\n"])
def test_a_readme_with_half_of_the_markers_is_not_touched(report: ModuleType, tmp_path: Path, missing: str) -> None:
    text = f"<!-- results -->\n<!-- /results -->\n{GPU_MARKERS}".replace(missing, "")
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match="exactly one"):
        report.main([], tmp_path)
    assert (tmp_path / "README.md").read_text() == text


@pytest.fixture
def on_a_gpu() -> list[dict[str, Any]]:
    """Two documents of gpu_failover.py."""
    plan = {"kills": 2, "streams": 8}
    loaded = {**MODE, "plan": plan, "wrong": [], "diverged": 3, "kv_in_use": 2_000_000_000}
    exact = {**MODE, "plan": plan, "wrong": [{"kill": 1, "what": ["token 3 of 96 differs"]}]}
    plain = {**PLAIN, "plan": plan, "node_ms": {"death_seen": None}, "diverged": 16}
    keeper = {"wrong": ["HTTP 503"], "longest_gap_ms": ranks(5.0), "each_stream_ms": ranks(40.0), "healthy_after_s": 1.0}
    memory = {"kept": 102_000_000_000, "shadow": 1_050_000_000}
    rates = {"node": [90.0, 110.0], "plain": [100.0, 104.0]}
    steady = {
        "plan": {"streams": 8, "rounds": 2},
        "tokens_per_s": rates,
        "median_tokens_per_s": {"node": 100.0, "plain": 102.0},
        "ratio": 0.98,
    }
    sections: list[dict[str, Any]] = [
        {"shadow": {"memory": memory, "2 GB": loaded, "keeper killed": keeper, "recoveries": []}, "plain": {"2 GB": plain}},
        {"exact": {"kills": exact}, "throughput": steady, "often": {"failed": "TimeoutError: "}},
    ]
    return [machine.document("gpu_failover", {"1m": 0.1, "5m": 0.1, "quiet": True}, {"factor": 1.0, "sections": one}) for one in sections]


def test_the_runs_on_a_gpu_make_one_table(report: ModuleType, on_a_gpu: list[dict[str, Any]]) -> None:
    made = report.gpu_table(on_a_gpu)
    assert all(len(row) == len(made.columns) for row in made.rows)
    # SmolLM2's 46,080 bytes a token; a stream that differs in float32 is wrong, in bfloat16 it has diverged.
    assert made.rows == [
        ["shadow, SmolLM2's shape, float32", "0.1 GB", "8", "2", "190 ms", "380 ms", "570 ms", "1.00 ms", "0 of 16", "1", "–"],
        ["shadow", "2.0 GB", "8", "2", "190 ms", "380 ms", "570 ms", "1.00 ms", "0 of 16", "0", "3 of 16"],
        ["keeper alone", "–", "4", "1", "40.0 ms", "80.0 ms", "120 ms", "–", "–", "1", "–"],
        ["plain restart", "–", "8", "2", "190 ms", "380 ms", "570 ms", "–", "16 of 16", "0", "16 of 16"],
    ]
    notes = "\n".join(made.notes)
    assert "each of 4,096 tokens was compared" in notes
    assert "Plain restart (2 kills)" in notes
    assert "wait 1 times as long" in notes
    assert "100 tokens/s on a node (90 to 110), 102 without (100 to 104); with shadowsup 98.0% of without" in notes
    assert "takes 1.05 GB of the device, besides 102 GB" in notes


@pytest.fixture
def of_vllm() -> dict[str, Any]:
    """A document of gpu_vllm.py."""
    kills = {**MODE, "plan": {"kills": 2, "streams": 8}, "wrong": ["HTTP 503"], "diverged": 1, "kv_in_use": 32_000_000_000}
    gap = {"p50": 5.0, "p99": 6.0, "max": 9.0}
    sections = {
        "respawn": {"256k tokens": {"core": kills}, "memory": {"used": 62_000_000_000, "kept": 59_000_000_000}},
        "shadow": {"256k tokens": {"core": kills, "api": kills}, "memory": {"used": 65_400_000_000, "kept": 59_000_000_000}},
        "exact": {"failed": "TimeoutError: "},
        "tp2-exact": {"16 streams": {"rank1": kills}},
        "throughput": {"node": [5100.0, 5200.0], "vllm": [5000.0, 5020.0], "share": 1.028},
        "plain": {"first_token_s": [37.33, 37.74]},
        "beside": {
            "undisturbed": {"gap_ms": gap},
            "a shadow starts": {"gap_ms": {"p50": 5.5, "p99": 8.5, "max": 23.0}},
            "parked_after_s": 30.29,
            "covered": 0.98,
        },
    }
    dated = {name: {"date": "2026-11-30", "vllm_version": "0.26.0", **section} for name, section in sections.items()}
    return machine.document("gpu_vllm", {"1m": 0.1, "5m": 0.1, "quiet": True}, {"sections": dated})


def test_what_vllm_did_is_told_by_the_process_that_was_killed(report: ModuleType, of_vllm: dict[str, Any]) -> None:
    made = report.vllm_table(of_vllm["sections"])
    figures = ["32.0 GB", "8", "2", "190 ms", "380 ms", "570 ms", "1.00 ms", "0 of 16", "1", "1 of 16"]
    assert made.rows == [
        ["EngineCore: shadow", *figures],
        ["API server: shadow", *figures],
        ["rank 1 of 2: shadow, two GPUs, batch-invariant", *figures],
        ["EngineCore: no shadow: respawn", *figures],
    ]
    notes = "\n".join(made.notes)
    assert "killed and restarted at once (2 times): the first token of a prompt of 4,000 tokens after 37.3 s and 37.7 s" in notes
    assert "5,150 tokens/s on a node with a parked shadow, 5,010 with plain vLLM; with shadowsup 102.8% of without" in notes
    assert "parked after 30 s: from token to token p50 5.5, p99 8.5, at most 23.0 ms" in notes
    assert "takes 3.4 GB of the device, besides 59 GB" in notes
    failed = {name: {"date": "2026-11-30", "failed": "TimeoutError: "} for name in of_vllm["sections"]}
    assert report.vllm_table(failed).rows == report.vllm_table(failed).notes == []
    assert "### vLLM on an H200\n\nvLLM 0.26.0, by" in report.vllm_block([of_vllm])
    assert report.vllm_block([]) == ""
    earlier = {**of_vllm, "sections": {"plain": {"vllm_version": "0.25.0", "first_token_s": [36.0]}}}
    both = report.vllm_block([of_vllm, earlier])
    assert "vLLM 0.26.0, 0.25.0, by" in both and both.count("###") == 1 and both.count(", an earlier run**") == 1
    assert "restarted at once (once): the first token" in both


def test_what_was_measured_again_since_is_not_shown(report: ModuleType, tmp_path: Path, on_a_gpu: list[dict[str, Any]]) -> None:
    name, sections = next(iter(report.SUPERSEDED.items()))
    (tmp_path / f"{name}.json").write_text(json.dumps(on_a_gpu[0]))
    (found,) = report.documents(tmp_path, [name])
    assert set(on_a_gpu[0]["sections"]) - set(found["sections"]) == set(sections)


def test_the_block_of_the_gpu_is_checked_too(
    report: ModuleType, tmp_path: Path, on_a_gpu: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"<!-- results -->\n<!-- /results -->\n{GPU_MARKERS}after\n")
    for name, document in zip(report.GPU_ORDER, on_a_gpu, strict=False):  # of some there are no results here
        (tmp_path / f"benchmarks/results/{name}.json").write_text(json.dumps(document))
    assert report.main(["--check"], tmp_path) == 1
    assert report.main([], tmp_path) == 0
    assert report.main(["--check"], tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("<!-- results -->\n<!-- /results -->\n<!-- results-gpu -->\n\n### On an H200\n")
    assert text.endswith("<!-- /results-gpu -->\nafter\n")
    assert text.count("<sub>") == 1  # both on the same machine
    assert "python benchmarks/report.py" in capsys.readouterr().err


def test_a_wrong_stream_is_counted_in_the_table(failover: dict[str, Any]) -> None:
    failover["modes"]["shadow"]["wrong"] = [{"kill": 1, "what": ["token 3 of 96 differs", "HTTP 503"]}]
    assert tables(failover)[0].rows[0][6] == "2"


def test_every_table_fits_a_terminal(failover: dict[str, Any]) -> None:
    for made in tables(failover):
        shown = table([Column(title, right=number > 0, shrink=True) for number, title in enumerate(made.columns)], made.rows, limit=80)
        assert "…" not in shown


def test_a_busy_machine_is_told(failover: dict[str, Any]) -> None:
    assert "busy" not in setting(failover)
    failover["load_before"] = {"1m": 3.5, "5m": 3.0, "quiet": False}
    assert "the machine was busy: load average 3.5" in setting(failover)


def test_the_machine_is_described_without_names_and_paths() -> None:
    values = _texts(machine.document("failover", machine.load(), {}))
    assert values
    assert not {socket.gethostname(), getpass.getuser()} & set(values)
    assert not any(str(Path.home()) in value for value in values)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts(one)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.4234, "0.42 ms"), (7.31, "7.3 ms"), (184.4, "184 ms"), (1250.0, "1.25 s"), (12_400.0, "12.4 s")]
)
def test_milliseconds_are_shown_as_precisely_as_people_need(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


def test_every_result_that_there_is_can_be_shown(report: ModuleType) -> None:
    for document in report.documents(ROOT / "benchmarks" / "results"):
        assert document["schema"] == machine.SCHEMA
        assert all(table.rows for table in tables(document))
        assert document["date"] in setting(document)
