"""A node runs, an engine dies, and every expression of dashboard and alerts finds its metrics and labels in what is exposed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_metrics_figures import FIGURES

sys.path.append(str(Path(__file__).parents[1] / "supervisor"))
from node_world import WAIT_S, FakeNode, running, worker

from shadowsup.supervisor.gateway.node_metrics import NodeMetrics
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.wire import figures as wire

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs" / "grafana" / "shadowsup.json"
ALERTS = ROOT / "configs" / "prometheus" / "alerts.yaml"
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape adds."""
SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# TYPE vllm:num_requests_running gauge\\nvllm:num_requests_running{model_name=\\"m\\"} 3\\n")
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

Samples = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a node exposes after a stream survived the death of its engine."""
    web = worker(name="web", engine="command", command=[sys.executable, "-c", SERVER], ready={"http": "/"}, metrics="/metrics")
    for key in ("model", "args", "kv"):
        del web[key]
    with running(tmp_path_factory.mktemp("metrics"), worker(), web) as node:
        node.healthy()
        node.worker_is("healthy", "web")
        answer = node.ask(tokens=200)  # it is not over before its engine is killed, on a busy machine either
        answer.reached(5)
        active = next(engine for engine in node.healthy()["engines"] if engine["role"] == "active")
        os.kill(active["pid"], signal.SIGKILL)
        assert answer.done.wait(WAIT_S)
        assert not answer.error
        node.until(lambda status: status["workers"][0]["recoveries"] == {"shadow": 1})
        yield _exposed(node)


def _exposed(node: FakeNode) -> str:
    """Return the exposition once it has the failover, which the supervisor tells a moment later."""
    deadline = time.monotonic() + WAIT_S
    while True:
        connection = node.connect()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        wanted = ('shadowsup_failovers_total{kind="shadow",worker="chat"} 1.0', "shadowsup_worker_metrics_up", "vllm:num_requests_running")
        if all(words in text for words in wanted):  # the last one: a server that answers too late is left out
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.1)  # Prometheus polls, too


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.fixture(scope="module")
def exposed(text: str) -> Samples:
    """The samples of the run, and those of a GPU, which this machine may not have, as the same code tells them."""
    found = samples(text)
    registry = CollectorRegistry()
    metrics = NodeMetrics()
    metrics.take(wire.encode(FIGURES))
    registry.register(metrics)
    for name, labels in samples(generate_latest(registry).decode()).items():
        if name.startswith("shadowsup_gpu_"):
            found.setdefault(name, []).extend(labels)
    found["up"] = [{}]
    return found


def test_the_run_is_told(exposed: Samples, text: str) -> None:
    values = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in text_string_to_metric_families(text) for s in f.samples}

    def value(name: str, **labels: str) -> float:
        return values[f"shadowsup_{name}", tuple(sorted(labels.items()))]

    assert value("supervisor_up") == 1
    assert value("worker_state", worker="chat", state="healthy") + value("worker_state", worker="chat", state="degraded") == 1
    assert value("engine_restarts_total", worker="chat", reason="died") == 1
    assert value("engine_ends_total", worker="chat", fault="killed") == 1
    assert value("failover_duration_seconds_count", worker="chat", step="promote") == 1
    assert value("gateway_failover_pause_seconds_count", worker="chat") == 1
    assert value("gateway_inter_token_seconds_count", worker="chat") == 199
    assert value("gateway_prompt_tokens_total", worker="chat") > 0
    assert value("kept_memory_bytes", device="host", kind="kv") == 2**20
    assert value("part_up", part="memkeeper") == 1
    assert exposed["vllm:num_requests_running"] == [{"worker": "web", "model_name": "m"}]
    assert {state["state"] for state in exposed["shadowsup_worker_state"]} == {state.value for state in WorkerState}


def test_names_and_labels_are_as_prometheus_wants_them(text: str) -> None:
    """Counters end in _total, times in _seconds, sizes in _bytes; no label has an engine's id, which would grow without end."""
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("shadowsup_"):
            continue
        assert family.documentation, family.name
        assert not re.search(r"_(ms|milliseconds|mib|gib|percent|minutes)\b", family.name), family.name
        for sample in family.samples:
            assert not any(re.fullmatch(r"(chat|web)\.\d+", value) for value in sample.labels.values()), sample


def expressions() -> list[tuple[str, str, str]]:
    """Return (where, expression, texts with labels in them) of every expression."""
    found = []
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            found.append((panel["title"], target["expr"], target["legendFormat"]))
    for note in dashboard["annotations"]["list"]:
        found.append((note["name"], note["expr"], note["titleFormat"]))
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            found.append((rule["alert"], rule["expr"], rule["annotations"]["summary"]))
    return found


EXPRESSIONS = expressions()


@pytest.mark.parametrize(("where", "expression", "words"), EXPRESSIONS, ids=[f"{n}-{each[0]}" for n, each in enumerate(EXPRESSIONS)])
def test_every_expression_finds_its_metrics_and_labels(exposed: Samples, where: str, expression: str, words: str) -> None:
    problems = wrong(exposed, expression, words)
    assert problems == []


def wrong(exposed: Samples, expression: str, words: str = "") -> list[str]:
    """Return what an expression, or the text that goes with it, names and is not there."""
    found, problems = promql.read(expression), []
    assert found.selectors, "no metric at all"
    labels: set[str] = set(FROM_PROMETHEUS)
    for selector in found.selectors:
        there = exposed.get(selector.metric)
        if there is None:
            problems.append(f"no metric {selector.metric}")
            continue
        labels |= {label for sample in there for label in sample}
        for label, operator, value in selector.matchers:
            if label in FROM_PROMETHEUS or value.startswith("$"):
                if label not in FROM_PROMETHEUS and not any(label in sample for sample in there):
                    problems.append(f"{selector.metric} has no label {label}")
                continue
            values = {sample[label] for sample in there if label in sample}
            if not values:
                problems.append(f"{selector.metric} has no label {label}")
            elif label not in ("status", "endpoint"):  # those come as they happen
                wanted = value.split("|") if "~" in operator else [value]
                problems += [f"{selector.metric} has no {label}={each}" for each in wanted if each not in values]
    problems += [f"no label {label} to group by" for label in found.groupings - labels]
    named = set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", words))
    return problems + [f"no label {label} to show" for label in named - labels]


def test_what_is_not_there_is_found(exposed: Samples) -> None:
    assert wrong(exposed, "rate(shadowsup_nothing_total[5m])") == ["no metric shadowsup_nothing_total"]
    assert wrong(exposed, 'shadowsup_worker_state{state="dwon"}') == ["shadowsup_worker_state has no state=dwon"]
    assert wrong(exposed, 'shadowsup_worker_epoch{engine="x"}') == ["shadowsup_worker_epoch has no label engine"]
    assert wrong(exposed, "sum by (enigne) (shadowsup_worker_epoch)") == ["no label enigne to group by"]
    assert wrong(exposed, "shadowsup_worker_epoch", "{{wroker}}") == ["no label wroker to show"]
    for bad in ("sum(x", "foo(x)", "x{a}", 'x{a~"b"}', "x ! y"):
        with pytest.raises((ValueError, IndexError)):
            promql.read(bad)


def test_the_documents_name_what_is_there(exposed: Samples) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for line in text.splitlines():
        if not line.startswith("| `shadowsup_"):
            continue
        names, labels, _ = (cell.strip() for cell in line.strip("| ").split("|", 2))
        wanted = set(re.findall(r"`(\w+)`", labels))
        there: set[str] = set()
        for name in re.findall(r"`(\w+)`", names):
            found = exposed.get(name) or exposed.get(f"{name}_count")
            assert found, name
            there |= {label for sample in found for label in sample}
        assert wanted <= there, line


def test_the_dashboards_variables_are_there(exposed: Samples) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            assert label in FROM_PROMETHEUS or all(label in sample for sample in exposed[metric])
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for one in dashboard["panels"]:
        assert one["type"] == "row" or one["targets"]
        at = one["gridPos"]
        assert at["x"] + at["w"] <= 24


def test_alerts_are_complete() -> None:
    rules: list[dict[str, Any]] = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names))
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
