"""A whole node of real processes: up, under kills, and down without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import psutil
import pytest
from node_world import WAIT_S, FakeNode, running, worker

from shadowsup.supervisor.cli.leftovers import end_leftovers


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="shadowsup-toy-"))
    yield made
    shutil.rmtree(made)


WORKER_KEYS = ("name", "engine", "model", "state", "epoch", "engines", "kv", "last_recovery")
ENGINE_KEYS = ("id", "role", "state", "pid", "started_s", "heartbeat_age_s", "phase", "step", "inflight")


def test_a_node_comes_up_answers_and_goes_without_a_trace(folder: Path) -> None:
    with running(folder) as node:
        found = node.healthy()
        assert [e["role"] for e in found["engines"]] == ["active", "shadow"]
        assert node.answer() == node.answer()
        status = node.until(lambda s: s["gateway"]["requests_total"] == 2)  # its beat tells
        schema = {
            "type": "object",
            "required": ["schema", "node", "memkeeper", "nursery", "sensor", "gateway", "workers", "gpus"],
            "properties": {
                "node": {"required": ["name", "state", "pid", "uptime_s"]},
                "memkeeper": {"required": ["state", "pid", "backend", "segments", "bytes"]},
                "nursery": {"items": {"required": ["state", "pid", "engine"]}},
                "gateway": {"required": ["state", "pid", "listen", "streams_held", "requests_total"]},
                "workers": {
                    "items": {"required": list(WORKER_KEYS), "properties": {"engines": {"items": {"required": list(ENGINE_KEYS)}}}}
                },
            },
        }
        jsonschema.validate(status, schema)
        assert status["schema"] == 1
        kinds = sorted(s["kind"] for s in node.call("memory")["segments"])
        assert kinds == ["kv", "ledger", "weights"]
        record = json.loads((node.runtime / "node.json").read_text())
        assert (record["name"], record["pid"]) == ("toy", node.process.pid)
        assert oct(node.runtime.stat().st_mode & 0o777) == "0o700"
        for path in node.runtime.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a file that takes the place of another has its own name for a moment
                assert path.stat().st_mode & 0o077 == 0, f"others may use {path}"
    assert (node.state / "logs" / "chat.log").read_text()
    events = [json.loads(line) for line in (node.state / "events.jsonl").read_text().splitlines()]
    assert [e["n"] for e in events] == list(range(1, len(events) + 1))
    assert events[-1]["event"] == "node.stopped"


def test_a_killed_engine_is_not_seen_by_its_client(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = node.answer(tokens=200)
        for number in (1, 2, 3):
            answer = node.ask(tokens=200)
            answer.reached(10)
            active = node.engine("active")
            os.kill(active["pid"], signal.SIGKILL)
            assert answer.done.wait(WAIT_S)
            assert (answer.error, answer.text) == ("", undisturbed)
            recovery = node.recovery(number)
            assert (recovery["kind"], recovery["from_engine"], recovery["exit"]) == ("shadow", active["id"], "signal 9")
            for step in ("detect_ms", "freeze_ms", "promote_ms", "first_token_ms", "fence_ms"):
                assert recovery[step] is not None
            assert recovery["requests_resumed"] == 1
            assert recovery["blocks_kept"] > 0
            assert node.worker_is("healthy")["epoch"] == number + 1
    lines = (node.state / "recoveries.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("part", ["memkeeper", "gateway", "nursery", "scribe"])
def test_a_killed_part_is_replaced_and_the_engines_stay(folder: Path, part: str) -> None:
    def pid_of(status: dict[str, object]) -> object:
        found = status[part]
        return (found[0] if isinstance(found, list) else found)["pid"]  # type: ignore[index]

    def state_of(status: dict[str, object]) -> object:
        found = status[part]
        return (found[0] if isinstance(found, list) else found)["state"]  # type: ignore[index]

    with running(folder) as node:
        before = node.healthy()
        undisturbed = node.answer()
        answer = node.ask() if part != "gateway" else None
        old = pid_of(node.status())
        os.kill(int(str(old)), signal.SIGKILL)
        killed_s = time.monotonic()
        node.until(lambda s: state_of(s) == "running" and pid_of(s) not in (None, old))
        assert time.monotonic() - killed_s < 20.0
        if answer is not None:
            assert answer.done.wait(WAIT_S)
            assert (answer.error, answer.text) == ("", undisturbed)
        assert node.answer() == undisturbed
        after = node.healthy()
        assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]
        # And what it is for still works: a failover over it.
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        node.until(lambda s: s["workers"][0]["epoch"] == 2 and s["workers"][0]["state"] == "healthy")
        assert node.answer() == undisturbed
        assert node.recoveries()[-1]["kind"] == "shadow"


def watches(watcher: int, pid: int) -> bool:
    """Whether a process has a pidfd of another one."""
    for entry in Path(f"/proc/{watcher}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if f"\nPid:\t{pid}\n" in entry.read_text():
                return True
    return False


def test_a_spare_takes_the_killed_nurserys_place_and_a_new_one_stands_by(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        for _ in range(3):
            nursery = node.status()["nursery"][0]["pid"]

            def spares(of: int = nursery) -> list[int]:
                engines = {e["pid"] for e in node.status()["workers"][0]["engines"]}
                return [child.pid for child in psutil.Process(of).children() if child.pid not in engines]

            # Forked is not yet known: the supervisor watches whom it has been told of.
            node.until(lambda s, spares=spares: len(spares()) == 1 and watches(node.process.pid, spares()[0]))
            (spare,) = spares()
            os.kill(nursery, signal.SIGKILL)
            node.until(lambda s, spare=spare: s["nursery"][0]["pid"] == spare and s["nursery"][0]["state"] == "running")
        node.until(lambda s: len(spares(spare)) == 1 and watches(node.process.pid, spares(spare)[0]))
        os.kill(spares(spare)[0], signal.SIGSTOP)  # which does not end by itself: the stop leaves no process all the same


def test_p34_a_killed_shadow_is_replaced_and_the_next_kill_finds_it(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        shadow = node.engine("shadow")
        os.kill(shadow["pid"], signal.SIGKILL)
        node.until(lambda s: any(e["state"] == "parked" and e["pid"] != shadow["pid"] for e in s["workers"][0]["engines"]))
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        node.until(lambda s: s["workers"][0]["epoch"] == 2 and s["workers"][0]["state"] == "healthy")
        assert node.recoveries()[-1]["kind"] == "shadow"


def test_without_a_shadow_an_engine_is_forked_and_finds_the_kept_blocks(folder: Path) -> None:
    with running(folder, worker(shadows=0)) as node:
        node.healthy()
        undisturbed = node.answer(tokens=100)
        answer = node.ask(tokens=100)
        answer.reached(10)
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)
        recovery = node.recovery(1)
        assert recovery["kind"] == "respawn" and recovery["blocks_kept"] > 0


def test_an_engine_that_stands_still_is_replaced(folder: Path) -> None:
    health = {"heartbeat": "100ms", "hang": {"floor": "500ms", "ceiling": "1500ms"}}
    with running(folder, worker(health=health)) as node:
        node.healthy()
        undisturbed = node.answer(tokens=100)
        answer = node.ask(tokens=100)
        answer.reached(10)
        os.kill(node.engine("active")["pid"], signal.SIGSTOP)
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)
        assert "hang" in node.recoveries()[0]["cause"]


def test_a_planned_failover_loses_no_token(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = node.answer(tokens=100)
        answer = node.ask(tokens=100)
        answer.reached(10)
        node.call("failover", worker="chat")
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)
        node.until(lambda s: s["workers"][0]["epoch"] == 2 and s["workers"][0]["state"] == "healthy")
        assert node.recoveries()[0]["cause"] == "planned hand-over"


def test_restart_replaces_every_engine_under_a_stream(folder: Path) -> None:
    with running(folder) as node:
        before = {e["pid"] for e in node.healthy()["engines"]}
        undisturbed = node.answer(tokens=150)
        answer = node.ask(tokens=150)
        answer.reached(5)
        node.call("restart", worker="chat")
        found = node.until(lambda s: s["workers"][0]["state"] == "healthy" and not before & {e["pid"] for e in s["workers"][0]["engines"]})
        assert len(found["workers"][0]["engines"]) == 2
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)


def test_a_worker_stops_frees_its_memory_and_comes_back(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        text = node.answer()
        node.call("stop", worker="chat")
        node.worker_is("stopped")
        node.until(lambda _: node.call("memory")["segments"] == [])
        node.call("restart", worker="chat")
        node.healthy()
        assert node.answer() == text


def test_a_drained_worker_finishes_what_it_has(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = node.answer(tokens=80)
        answer = node.ask(tokens=80)
        answer.reached(5)
        node.call("drain", worker="chat")
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)
        node.worker_is("stopped")


def test_p11_a_worker_that_cannot_start_goes_down_with_its_words_and_status_answers_throughout(folder: Path) -> None:
    restart = {"backoff": ["0s", "100ms"], "max": "3 in 10m"}
    with running(folder, worker(args={"fail": "load"}, restart=restart)) as node:
        slow = 0
        while True:
            asked_s = time.monotonic()
            found = node.status()["workers"][0]
            slow += time.monotonic() - asked_s > 1.0
            if found["state"] == "down":
                break
        assert slow < 4, (
            "whoever waits for a start waits at each of the four; a machine that does other things as well does it now and then"
        )
        assert "gave up after 3 restarts" in found["reason"]
        assert "load" in found["reason"] or "fail" in found["reason"]
        assert len(node.events("engine.verdict")) == 4


def test_a_fatal_failure_takes_the_worker_down_at_once(folder: Path) -> None:
    with running(folder, worker(args={"fail": "load", "fatal": True})) as node:
        found = node.worker_is("down")
        assert len(node.events("engine.verdict")) == 1
        assert found["reason"]


def test_p02_all_serves_on_without_a_supervisor_and_can_be_stopped_without_one(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = node.answer(tokens=100)
        answer = node.ask(tokens=100)
        answer.reached(5)
        connection = node.connect()
        node.close()
        node.process.kill()
        node.process.wait()
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", undisturbed)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        assert end_leftovers(node.runtime, lambda _: None) is not None
        assert node.processes() == []
        node.process = node.start()
        node.healthy()


def test_a_second_supervisor_is_refused(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        assert node.start().wait(WAIT_S) == 100
        assert f"by pid {node.process.pid}" in node.output.read_text()
        node.healthy()


def test_a_taken_port_is_refused_with_the_name_of_its_holder_and_nothing_is_started(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        node = FakeNode(folder, [worker()], f"127.0.0.1:{holder.getsockname()[1]}")
        assert node.process.wait(WAIT_S) == 1
        assert f"pid {os.getpid()}" in node.output.read_text()
        assert node.processes() == []
        assert not node.runtime.exists()


def test_a_stop_while_it_comes_up_leaves_nothing(folder: Path) -> None:
    with running(folder, worker(args={"load_s": 30.0})) as node:
        node.until(lambda s: any(e["state"] == "loading" for w in s["workers"] for e in w["engines"]))


def test_a_second_signal_hurries(folder: Path) -> None:
    with running(folder, worker(stop={"timeout": "60s"})) as node:
        node.healthy()
        answer = node.ask(tokens=2000)
        answer.reached(3)
        os.kill(node.engine("shadow")["pid"], signal.SIGSTOP)  # this one would take the whole timeout
        client = node.client
        node.process.terminate()
        node.until(lambda s: s["node"]["state"] == "stopping")
        node.process.terminate()
        assert client is node.client
        node.close()
        assert node.process.wait(20.0) == 0
        assert answer.done.wait(WAIT_S)


def test_the_supervisor_costs_next_to_nothing(folder: Path) -> None:
    import psutil

    with running(folder) as node:
        node.healthy()
        process = psutil.Process(node.process.pid)
        assert process.memory_info().rss < 120 * 2**20
        assert not any("libtorch" in m.path for m in process.memory_maps())


# --- command engines --------------------------------------------------------------------------------------------------------------

SERVER = """
import http.server, os, socket, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"object": "list", "data": []}'
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers(); self.wfile.write(body)
    do_POST = do_GET
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), H)
if "NOTIFY_SOCKET" in os.environ:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
print("listening", flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize("ready", [{"http": "/health"}, {"notify": True}, {"log": "^listening"}, {"exec": ["/bin/true"]}])
def test_a_command_is_ready_by_its_probe_and_restarted_when_it_dies(folder: Path, ready: dict[str, object]) -> None:
    import sys

    command = {"name": "web", "engine": "command", "command": [sys.executable, "-c", SERVER], "ready": ready, "stop": {"timeout": "5s"}}
    with running(folder, command) as node:
        first = node.worker_is("healthy", "web")
        assert first["upstream"].startswith("http://127.0.0.1:")
        os.kill(first["engines"][0]["pid"], signal.SIGKILL)
        node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["workers"][0]["epoch"] == 2)


def test_a_program_that_does_not_exist_takes_its_worker_down_and_no_other(folder: Path) -> None:
    restart = {"backoff": ["0s"], "max": "2 in 10m"}
    missing = {"name": "gone", "engine": "command", "command": ["/no/such/program"], "ready": {"exec": ["/bin/true"]}, "restart": restart}
    with running(folder, worker(), missing) as node:
        found = node.worker_is("down", "gone")
        assert "/no/such/program" in found["reason"]
        node.healthy()


def test_p04_a_helper_that_left_session_and_group_goes_with_its_engine(folder: Path) -> None:
    import sys

    pidfile = folder / "helper.pid"
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nopen({str(pidfile)!r}, 'w').write(str(child.pid))\n"
        "print('up', flush=True)\ntime.sleep(1000)\n"
    )
    command = {"name": "web", "engine": "command", "command": [sys.executable, "-c", program], "ready": {"log": "up"}}
    with running(folder, command) as node:
        first = node.worker_is("healthy", "web")
        helper = os.pidfd_open(int(pidfile.read_text()))
        try:
            os.kill(first["engines"][0]["pid"], signal.SIGKILL)
            node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["workers"][0]["epoch"] == 2)
            poller = select.poll()
            poller.register(helper, select.POLLIN)
            assert poller.poll(0), "the fence came before its end"
        finally:
            os.close(helper)
