"""The site builds without a warning, and what it says of names, states, alerts and codes is what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import BLOCKS, DOCS, ROOT, pages

from shadowsup.supervisor.compat import TABLE
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.config.model import WorkerConfig
from shadowsup.supervisor.errors import ExitCode
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.wire.engine import EngineState

RUNBOOK = (DOCS / "runbook.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # A pristine process: what an extension warns of must not be an error of this one.
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(out / "trees"),
        str(DOCS),
        str(out / "html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return out / "html"


@pytest.mark.timeout(150)
def test_it_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    index = (site / "index.html").read_text()
    for path in [*DOCS.glob("*.md")]:
        assert (site / f"{path.stem}.html").exists()
        assert path.stem == "index" or f'href="{path.stem}.html"' in index, f"{path.stem} is not reached from the index"
    assert (site / "_images" / "failover.svg").exists() or (site / "_static" / "failover.svg").exists()


def test_the_config_reference_has_every_key_of_a_worker(site: Path) -> None:
    page = (site / "configuration.html").read_text()
    assert all(f">{key}</span>" in page for key in WorkerConfig.model_fields)
    assert "[section]" not in page and "$ref" not in page


def test_the_compatibility_page_is_the_table_of_the_doctor(site: Path) -> None:
    page = (site / "compatibility.html").read_text()
    assert all(each.span in page for each in TABLE)


def test_the_benchmarks_are_those_of_the_results(site: Path) -> None:
    page = (site / "benchmarks.html").read_text()
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (?:shadow|respawn|cold spawn|plain restart) \| ([\d.,]+ m?s)", readme, re.MULTILINE)
    assert rows
    assert all(figure in page for figure in rows)


def test_the_run_book_has_every_alert_state_and_exit_code() -> None:
    alerts = [
        rule["alert"]
        for group in yaml.safe_load((ROOT / "configs/prometheus/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    sections = re.findall(r"^### (Shadowsup\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(alerts) == sorted(sections)
    for heading, names in (
        ("## Worker states", [state.value for state in WorkerState]),
        ("## Engine states", [state.value for state in EngineState]),
        ("## Exit codes", [str(int(code)) for code in ExitCode]),
    ):
        section = RUNBOOK.partition(f"{heading}\n")[2].partition("\n## ")[0]
        told = re.findall(r"^\| `?(\w+)`? \|", section, re.MULTILINE)
        assert set(names) <= set(told), heading


def test_pages_and_paths_that_are_named_exist() -> None:
    for path in pages():
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for named in re.findall(r"`((?:supervisor|workers|memkeeper|shadowsup|tests|configs|benchmarks)/[\w/.]+)`", text):
            if "NAME" not in named and "*" not in named:
                assert (ROOT / named).exists(), f"{path.name}: {named}"


CONFIGS = [block for block in BLOCKS if block.language == "yaml" and "workers:" in block.text]


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_every_config_that_is_shown_is_right(block: object, tmp_path: Path) -> None:
    assert loads(block.text, tmp_path / "node.yaml", environ={}).config.workers  # type: ignore[attr-defined]


def test_there_are_configs() -> None:
    assert {block.page for block in CONFIGS} >= {"get-started", "migrating", "secrets"}
