"""The README's figures come from the result files, and from nowhere else."""

from __future__ import annotations

import copy
import getpass
import importlib.util
import json
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.tables import milliseconds, setting, tables
from shadowsup.supervisor.cli.output import Column, table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_report", ROOT / "benchmarks" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    readme.write_text("# before\n<!-- results -->\nold figures\n<!-- /results -->\nafter\n")
    (tmp_path / "benchmarks/results/failover.json").write_text(json.dumps(failover))
    assert report.main(["--check"], tmp_path) == 1
    assert "python benchmarks/report.py" in capsys.readouterr().err
    assert report.main([], tmp_path) == 0
    assert report.main(["--check"], tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("# before\n<!-- results -->\n")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old figures" not in text
    assert "| shadow | 180 ms | 360 ms | 210 ms | 630 ms | 0 of 16 | 0 | 100% |" in text
    assert "| plain restart | 180 ms | 360 ms | 210 ms | 630 ms | 16 of 16 | 0 | 0% |" in text
    assert "comes after 19.0 s (p50), 57.0 s (max)." in text


def test_without_results_the_block_is_empty(report: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results -->\n<!-- /results -->\n")
    assert report.main(["--check"], tmp_path) == 0


def test_a_readme_without_markers_is_not_touched(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no markers\n")
    with pytest.raises(ValueError, match="exactly one"):
        report.main([], tmp_path)


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
