"""A whole node with the toy engine (`fake_engine`): every process is real, only the model is not.

Run as a script, it *is* the node: ``python node_world.py CONFIG.json RUNTIME_DIR``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq

from shadowsup.supervisor.client import ControlClient
from shadowsup.supervisor.errors import NotRunning

TESTS = Path(__file__).parents[1]
ENGINE_PATH = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
"""Engines run the code that the tests run; PYTHONSAFEPATH keeps the current folder out of it."""
WAIT_S = 60.0
"""Far beyond what anything takes: this machine may be busy."""


def worker(**changes: Any) -> dict[str, Any]:
    """Return a worker of the toy engine, as in a config."""
    base: dict[str, Any] = {
        "name": "chat",
        "engine": "transformers",
        "model": "toy",
        "args": {"step_s": 0.01},
        "kv": {"size": "1MiB"},
        "env": {"PYTHONPATH": ENGINE_PATH, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        "stop": {"timeout": "5s"},
    }
    return base | changes


@dataclass
class Answer:
    """What a client was sent."""

    text: str = ""
    error: str = ""
    pieces: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    grew: threading.Condition = field(default_factory=threading.Condition)

    def reached(self, pieces: int) -> None:
        """Wait until so many pieces have come."""
        with self.grew:
            assert self.grew.wait_for(lambda: self.pieces >= pieces or self.done.is_set(), WAIT_S)


class FakeNode:
    """A running node, seen from outside: its process, its control socket, its gateway."""

    def __init__(self, folder: Path, workers: list[dict[str, Any]], listen: str) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.state = folder / "state"
        config = {
            "version": 1,
            "node": {"name": "toy", "state_dir": str(self.state)},
            "gateway": {"listen": listen},
            "workers": workers,
        }
        self.config = folder / "node.json"
        self.config.write_text(json.dumps(config))
        self.output = folder / "output"
        self.process = self.start()
        self._client: ControlClient | None = None
        self._subscriber: zmq.Socket[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start a supervisor for this node."""
        with self.output.open("ab") as sink:
            return subprocess.Popen([sys.executable, __file__, str(self.config), str(self.runtime)], stdout=sink, stderr=sink)

    # --- asking -----------------------------------------------------------------------------------------------------------------

    @property
    def client(self) -> ControlClient:
        if self._client is None:
            deadline = time.monotonic() + WAIT_S
            while True:
                client = ControlClient(self.runtime, 10.0)
                try:
                    self._client = client.__enter__()
                    break
                except NotRunning:
                    assert self.process.poll() is None, self.output.read_text()
                    assert time.monotonic() < deadline
                    # There is nothing to wait on before the socket is there.
                    time.sleep(0.02)
            assert client._context is not None
            self._subscriber = client._context.socket(zmq.SUB)
            self._subscriber.setsockopt(zmq.LINGER, 0)
            self._subscriber.setsockopt(zmq.SUBSCRIBE, b"event")
            self._subscriber.connect(f"ipc://{self.runtime}/events.sock")
        return self._client

    def call(self, verb: str, **args: Any) -> Any:
        return self.client.call(verb, **args)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.call("status")
        return found

    def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for a status, looking after each event (and now and then, for what is no event)."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.status()
            if condition(found):
                return found
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.told()}"
            assert self._subscriber is not None
            if self._subscriber.poll(100):
                self._subscriber.recv_multipart()

    def worker_is(self, state: str, name: str = "chat") -> dict[str, Any]:
        found = self.until(lambda s: any(w["name"] == name and w["state"] == state for w in s["workers"]))
        return next(w for w in found["workers"] if w["name"] == name)

    def healthy(self) -> dict[str, Any]:
        return self.worker_is("healthy")

    def engine(self, role: str) -> dict[str, Any]:
        """Return the newest living engine in a role."""
        engines = [e for w in self.status()["workers"] for e in w["engines"] if e["role"] == role]
        return engines[-1]

    def recoveries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("recoveries")["recoveries"]
        return found

    def recovery(self, number: int) -> dict[str, Any]:
        """Wait until the recovery of this number is complete, and return it: what it tells comes step by step, by several messages."""
        self.until(lambda _: any(event["data"]["n"] == number for event in self.events("recovery.done")))
        return next(one for one in self.recoveries() if one["n"] == number)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.call("events")["events"] if e["event"] == name]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted((self.state / "logs").glob("*.log")))

    def told(self) -> str:
        """Return all that the node tells of itself now, for a test that has failed."""
        found = [f"exit status: {self.process.poll()}"]
        for verb in ("status", "recoveries", "events"):
            try:
                answer = self.call(verb) if self._client is not None else {}
            except Exception as error:  # whatever it is: the rest is told
                answer = {"error": str(error)}
            answer["events"] = [f"{e['mono_s']:.3f} {e['event']}: {e['message']}" for e in answer.get("events", ())][-60:]
            found.append(f"== {verb}\n{json.dumps(answer, indent=1)}")
        if self.output.is_file():  # and no pipe, which has no end
            found.append(f"== output\n{self.output.read_text()[-4000:]}")
        return "\n".join([*found, self.logs()])

    # --- using ------------------------------------------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        host, _, port = self.status()["gateway"]["listen"].rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=WAIT_S)

    def ask(self, prompt: str = "Once upon a time", tokens: int = 60, model: str = "chat") -> Answer:
        """Stream a completion in the background."""
        answer = Answer()
        connection = self.connect()
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        threading.Thread(target=_stream, args=(connection, body, answer), daemon=True).start()
        return answer

    def answer(self, prompt: str = "Once upon a time", tokens: int = 60) -> str:
        """Stream a completion and return its text."""
        answer = self.ask(prompt, tokens)
        assert answer.done.wait(WAIT_S), self.told()
        assert not answer.error, answer.error
        return answer.text

    # --- ending -----------------------------------------------------------------------------------------------------------------

    def stop(self) -> int:
        """End it as an operator does, and return the exit code."""
        self.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.wait(5.0)
            raise AssertionError(self.output.read_text()[-8000:]) from None

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def processes(self) -> list[str]:
        """Return every living process that has to do with this node's folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if process.pid != os.getpid() and str(self.folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {words}")
        return found


def _stream(connection: http.client.HTTPConnection, body: dict[str, Any], answer: Answer) -> None:
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status} {response.read().decode()}"
            return
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = json.dumps(event)
                for choice in event.get("choices", []):
                    answer.text += choice.get("text") or ""
                with answer.grew:
                    answer.pieces += 1
                    answer.grew.notify_all()
    except OSError as error:
        answer.error = repr(error)
    finally:
        connection.close()
        answer.done.set()
        with answer.grew:
            answer.grew.notify_all()


@contextlib.contextmanager
def running(folder: Path, *workers: dict[str, Any], listen: str = "127.0.0.1:0") -> Iterator[FakeNode]:
    """Start a node, and see to it that nothing of it is left, whatever the test did."""
    node = FakeNode(folder, list(workers) or [worker()], listen)
    try:
        yield node
        assert node.stop() == 0, node.output.read_text()
        assert node.processes() == []
        assert not node.runtime.exists()
    except BaseException:
        print(node.told())
        raise
    finally:
        node.close()
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()
        for line in node.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def main(config: str, runtime_dir: str) -> int:
    from shadowsup.errors import ShadowsupError
    from shadowsup.supervisor import node_run
    from shadowsup.supervisor.config import load

    def report(text: str) -> None:
        print(text, flush=True)

    try:
        return node_run.run(load(Path(config)), Path(runtime_dir), reporter=report, adapters={"transformers": "fake_engine:create"})
    except ShadowsupError as error:
        report(f"error: {error}")
        return int(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
