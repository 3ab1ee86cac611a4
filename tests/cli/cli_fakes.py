"""A supervisor's control side without a supervisor: answers verbs from a table, in a thread of the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

Answer = Callable[[dict[str, Any]], Any]


class Refusal(Exception):
    """Raised by an answer: the supervisor says no."""

    def __init__(self, error: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(error)
        self.reply = {"ok": False, "error": error, "hint": hint, "exit_code": exit_code}


class FakeSupervisor:
    """Serves ``control.sock`` and ``events.sock`` in ``folder``. ``answers``: verb → result, or a function of its arguments.

    A verb without an answer is never answered.
    """

    def __init__(self, folder: Path, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._folder = folder
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{folder / 'control.sock'}")
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.bind(f"ipc://{folder / 'events.sock'}")
        self._stop = threading.Event()
        self._to_publish: list[dict[str, Any]] = []
        self.subscribed = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeSupervisor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._router.close()
        self._publisher.close()
        self._context.term()
        for name in ("control.sock", "events.sock"):
            (self._folder / name).unlink(missing_ok=True)

    def publish(self, event: dict[str, Any]) -> None:
        self._to_publish.append(event)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._publisher, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(10))
            if self._publisher in ready and self._publisher.recv().startswith(b"\x01"):
                self.subscribed.set()
            while self._to_publish:
                self._publisher.send_multipart([b"event", json.dumps(self._to_publish.pop(0)).encode()])
            if self._router in ready:
                self._answer(*self._router.recv_multipart())

    def _answer(self, peer: bytes, payload: bytes) -> None:
        request = json.loads(payload)
        verb, args = request["verb"], request["args"]
        self.asked.append((verb, args))
        if verb not in self.answers:
            return
        answer = self.answers[verb]
        try:
            reply = {"ok": True, "result": answer(args) if callable(answer) else answer}
        except Refusal as refusal:
            reply = refusal.reply
        self._router.send_multipart([peer, json.dumps({"id": request["id"], **reply}).encode()])


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that has no event of its own (a file of another process)."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def event(n: int, text: str = "") -> dict[str, Any]:
    return {
        "n": n,
        "ts": 1.7e9 + n,
        "mono_s": float(n),
        "level": "info",
        "event": "engine.state",
        "engine": "chat.1",
        "message": text or f"e{n}",
    }


RECOVERY = {
    "n": 1,
    "worker": "chat",
    "kind": "shadow",
    "cause": "signal 9",
    "ts": 1.7e9,
    "epoch": 2,
    "from_engine": "chat.1",
    "to_engine": "chat.2",
    "detect_ms": 0.41,
    "freeze_ms": 0.9,
    "promote_ms": 8.2,
    "first_token_ms": 21.7,
    "fence_ms": 161.0,
    "refill_ms": None,
    "blocks_kept": 3112,
    "requests_resumed": 4,
}

STATUS: dict[str, Any] = {
    "schema": 1,
    "event": 7,
    "node": {"name": "demo", "state": "running", "pid": 4242, "uptime_s": 3725.2},
    "memkeeper": {"state": "running", "pid": 4243, "backend": "host", "segments": 3, "bytes": 432 * 2**20},
    "nursery": [{"state": "ready", "pid": 4244, "engine": "transformers"}],
    "sensor": {"state": "stopped", "pid": None},
    "gateway": {"state": "running", "pid": 4245, "listen": "http://127.0.0.1:8000", "streams_held": 0, "requests_total": 12345},
    "workers": [
        {
            "name": "chat",
            "engine": "transformers",
            "model": "SmolLM2-135M-Instruct-with-a-very-long-name-that-does-not-fit-into-eighty-columns.gguf",
            "state": "degraded",
            "reason": "",
            "epoch": 2,
            "engines": [
                {
                    "id": "chat.2",
                    "role": "active",
                    "state": "active",
                    "pid": 4250,
                    "started_s": 9.0,
                    "heartbeat_age_s": 0.1,
                    "phase": "decode",
                }
                | {"step": 123456, "inflight": 4},
                {
                    "id": "chat.3",
                    "role": "shadow",
                    "state": "loading",
                    "pid": None,
                    "started_s": 1.0,
                    "heartbeat_age_s": None,
                    "phase": "loading",
                }
                | {"step": 0, "inflight": 0},
            ],
            "kv": {"blocks": 4096, "valid": 3112, "quarantined": 0, "reserve": 16},
            "last_recovery": RECOVERY,
        }
    ],
    "gpus": [
        {"uuid": "GPU-x", "index": 0, "name": "NVIDIA H200", "memory_used": 2**34, "memory_total": 141 * 2**30, "util": 37, "state": "ok"}
    ],
}
