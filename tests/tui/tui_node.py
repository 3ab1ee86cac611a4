"""A node that runs nothing: the real control server over made-up figures, so that what a dashboard shows is the same everywhere."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shadowsup.supervisor.config import load
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.control import ControlServer
from shadowsup.supervisor.errors import ConfigError, ExitCode, SupervisorError
from shadowsup.supervisor.protocol import Event

BEGAN = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""
GIB = 2**30

CONFIG = """\
# A comment that must survive.
version: 1
node:
  name: demo          # names the runtime directory
workers:
  - name: chat
    engine: transformers
    model: ./model    # a folder
    shadows: 1
    kv: {size: 256MiB, block_tokens: 16}
    env:
      GREETING: "hello"
"""


def engine(name: str, seq: int, role: str = "active", state: str = "", **more: Any) -> dict[str, Any]:
    state = state or ("active" if role == "active" else "parked")
    serves = state == "active"
    return {
        "id": f"{name}.{seq}",
        "role": role,
        "state": state,
        "pid": 1000 + seq,
        "started_s": 3600.0,
        "since_s": 3590.0,
        "heartbeat_age_s": 0.1,
        "phase": "decode" if serves else "parked",
        "step": 1000 if serves else 0,
        "inflight": 3 if serves else 0,
        "queued": 0,
        "tokens_total": 5000 if serves else 0,
        "memory": 22 << 20,
        "epoch": 1 if serves else 0,
        "how": "nursery",
        "detail": "",
        "cause": "",
    } | more


def worker(name: str = "chat", state: str = "healthy", engines: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "engine": "transformers",
        "model": name,
        "source": "model.gguf",
        "state": state,
        "reason": "",
        "since_s": 3590.0,
        "epoch": 1,
        "shadows": 1,
        "restarts": 0,
        "backoff": None,
        "engines": engines if engines is not None else [engine(name, 1), engine(name, 2, "shadow")],
        "kv": {"blocks": 4096, "valid": 3112, "free": 700, "quarantined": 0, "reserve": 16},
        "queued": 0,
        "tokens_total": 5000,
        "last_recovery": None,
    } | more


def gpu(index: int, **more: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{index:08x}",
        "index": index,
        "name": "NVIDIA H200",
        "state": "ok",
        "memory_used": 98 * GIB,
        "memory_total": 141 * GIB,
        "util": 37 + index,
        "power_w": 412.0,
        "power_limit_w": 700.0,
        "temperature_c": 61 + index,
        "clock_sm_mhz": 1980,
        "ecc_uncorrected": 0,
        "memory": {"weights": 16 * GIB, "kv": 70 * GIB, "engines": 9 * GIB, "foreign": 3 * GIB},
        "warnings": [],
        "throttled": [],
        "stale": False,
    } | more


def status(workers: list[dict[str, Any]] | None = None, gpus: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "event": 0,
        "mono_s": 4000.0,
        "time_s": BEGAN,
        "node": {"name": "demo", "state": "running", "pid": 1, "uptime_s": 3725.0, "runtime_dir": "/run/demo", "state_dir": "/var/demo"},
        "memkeeper": {"state": "running", "pid": 101, "backend": "host", "segments": 3, "bytes": 432 << 20},
        "nursery": [{"state": "running", "pid": 102, "engine": "transformers"}],
        "sensor": {"state": "running", "pid": 103} if gpus else {"state": "stopped", "pid": None},
        "scribe": {"state": "running", "pid": 104},
        "gateway": {
            "state": "running",
            "pid": 105,
            "listen": "127.0.0.1:8000",
            "streams_held": 0,
            "requests_total": 12345,
            "connections": 4,
            "inflight": 3,
            "errors_total": 0,
            "tokens_total": 900_000,
            "replays_total": 0,
        },
        "workers": workers if workers is not None else [worker()],
        "gpus": gpus or [],
        "host": {
            "memory_total": 64 * GIB,
            "memory_used": 21 * GIB,
            "cpus": 16,
            "cpu_busy_s": 100.0,
            "cpu_all_s": 1000.0,
            "load": 3.2,
            "memory": {"weights": 2 * GIB, "kv": 8 * GIB, "engines": 3 * GIB, "foreign": 8 * GIB},
        },
    } | more


def event(n: int, name: str, message: str, *, at_s: float = -60.0, level: str = "info", **more: Any) -> dict[str, Any]:
    made = Event(n=n, ts=BEGAN + at_s, mono_s=4000.0 + at_s, level=level, event=name, message=message, **more)
    return msgspec.structs.asdict(made)


def recovery(n: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "n": n,
        "worker": "chat",
        "kind": "shadow",
        "cause": "engine process died",
        "ts": BEGAN - 30.0,
        "epoch": n + 1,
        "from_engine": f"chat.{n}",
        "to_engine": f"chat.{n + 1}",
        "detect_ms": 0.4,
        "freeze_ms": 2.4,
        "promote_ms": 8.2,
        "first_token_ms": 32.0,
        "fence_ms": 161.0,
        "refill_ms": 2310.0,
        "blocks_kept": 3112,
        "blocks_dropped": 0,
        "requests_resumed": 4,
        "exit": "signal 9",
    } | more


MEMORY = {
    "segments": [
        {"segment": "w", "kind": "weights", "worker": "", "size": 500 << 20, "leases": ["chat.1", "chat.2"]},
        {"segment": "k", "kind": "kv", "worker": "chat", "size": 256 << 20, "leases": ["chat.1"]},
        {"segment": "l", "kind": "ledger", "worker": "chat", "size": 1 << 20, "leases": ["chat.1"]},
        {"segment": "o", "kind": "kv", "worker": "other", "size": 7 << 30, "leases": ["other.1"]},
    ]
}


def block_map() -> dict[str, Any]:
    cells = 64
    return {
        "worker": "chat",
        "fenced": True,
        "epoch": 1,
        "blocks": cells * 4,
        "per_cell": 4,
        "valid": 160,
        "reserve": 8,
        "quarantined": 0,
        "open": 88,
        "free": 70,
        "inflight": 18,
        "cells": {
            "valid": [4] * 40 + [0] * 24,
            "open": [0] * 42 + [4] * 22,
            "reserve": [0] * 40 + [4] * 2 + [0] * 22,
            "quarantined": [0] * 64,
            "age": [min(99, n * 3) for n in range(40)] + [-1] * 24,
        },
    }


class FakeNode:
    """Serves ``folder``. Change ``status``, `happen`, `answers`; look at ``asked``. Orders are only noted.

    `reload` is answered as the supervisor's contract says: plan, apply, undo, over the config file.
    """

    def __init__(self, folder: Path, found: dict[str, Any] | None = None, *, events: list[dict[str, Any]] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(exist_ok=True)
        (self.logs / "chat.log").touch()
        self.config = folder / "node.yaml"
        if not self.config.exists():
            self.config.write_text(CONFIG)
        (folder / "model").mkdir(exist_ok=True)
        self.status = found if found is not None else status()
        self.status["node"]["config"] = str(self.config)
        self.events: list[dict[str, Any]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, SupervisorError] = {}
        self.advance_s = 0.0
        """Seconds that pass between two looks; tokens and steps grow at a rate of 100 and 25 a second."""
        self.restless = False
        """Whether every figure is another one at each look."""
        self.revisions = [self.config.read_text()]
        self.reloads = True
        """Whether this supervisor knows ``reload``."""
        self._looked = 0
        self._answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "status": self._status,
            "events": self._events,
            "recoveries": lambda _: {"recoveries": self.recoveries},
            "memory": lambda _: MEMORY,
            "blocks": lambda _: block_map(),
            "inspect": self._inspect,
            "logs": lambda _: {"paths": [str(self.logs / "chat.log")]},
            "reload": self._reload,
        }
        for happened in events or []:
            self.happen(happened)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._server: ControlServer | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fake node", daemon=True)

    # --- life -------------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeNode:
        self._thread.start()
        assert self._ready.wait(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Be gone, as a supervisor that was killed. Idempotent."""
        if self._thread.is_alive() and self._loop is not None and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10.0)
        for name in ("control.sock", "events.sock"):
            (self.folder / name).unlink(missing_ok=True)

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        verbs = {name: self._noting(name, answer) for name, answer in self._answers.items()}
        for order in ("failover", "drain", "restart", "stop", "kill"):
            verbs[order] = self._noting(
                order, lambda args, order=order: {"message": f"{order} {args.get('worker') or args.get('engine')}: taken"}
            )
        self._server = ControlServer(context, self.folder / "control.sock", self.folder / "events.sock", verbs)
        self._ready.set()
        await self._end.wait()
        await self._server.close()
        context.term()

    def _noting(self, verb: str, answer: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        def noted(args: dict[str, Any]) -> Any:
            if verb not in ("status", "events", "recoveries"):
                self.asked.append((verb, args))
            if verb in self.refusals:
                raise self.refusals[verb]
            return answer(args)

        return noted

    def orders(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the orders that were given."""
        reading = ("memory", "blocks", "inspect", "logs")
        return [(verb, args) for verb, args in self.asked if verb not in reading and not args.get("plan")]

    # --- what is told -----------------------------------------------------------------------------------------------------------

    def happen(self, happened: dict[str, Any]) -> None:
        """Something happens; the status's event number follows."""
        self.events.append(happened)
        self.status["event"] = happened["n"]
        if (loop := getattr(self, "_loop", None)) is not None and self._server is not None:
            loop.call_soon_threadsafe(self._server.publish, json.dumps(happened).encode())

    def write(self, *lines: str, name: str = "chat") -> None:
        """Append lines as the scribe does."""
        with (self.logs / f"{name}.log").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        self._looked += 1
        found = self.status
        if self.advance_s:
            found["mono_s"] += self.advance_s
            found["time_s"] += self.advance_s
            found["gateway"]["tokens_total"] += round(100 * self.advance_s * len(found["workers"]))
            for number, each in enumerate(found["workers"]):
                for one in each["engines"]:
                    one["since_s"] += self.advance_s
                    if self.restless:
                        one["heartbeat_age_s"] = (self._looked * 7 + number * 3) % 20 / 100
                    if one["state"] == "active":
                        more = (self._looked * 5 + number) % 9 if self.restless else 0
                        one["step"] += round(25 * self.advance_s) + more
                        one["tokens_total"] += round(100 * self.advance_s) + 4 * more
                        one["inflight"] = 3 + more
        return found

    def _events(self, args: dict[str, Any]) -> dict[str, Any]:
        since = args.get("since")
        return {"last": self.status["event"], "events": [e for e in self.events if since is None or e["n"] >= since]}

    def _inspect(self, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "worker": args["worker"],
            "command": "python -m shadowsup.workers.main SPEC.json",
            "forked": True,
            "cwd": None,
            "model": "model.gguf",
            "gpus": [],
            "env": [{"name": "HF_TOKEN", "value": "***", "from": "env"}, {"name": "PATH", "value": "/usr/bin", "from": "inherited"}],
        }

    # --- reload -----------------------------------------------------------------------------------------------------------------

    def _reload(self, args: dict[str, Any]) -> dict[str, Any]:
        if not self.reloads:
            raise SupervisorError("no verb 'reload'", "known here: status", exit_code=ExitCode.USAGE)
        current = len(self.revisions)
        if args.get("expect") not in (None, f"r{current}"):
            raise SupervisorError(f"r{current} is in force, not {args['expect']}", "look again")
        text = self.revisions[-2] if args.get("undo") else args.get("text") or Path(args.get("config") or self.config).read_text()
        try:
            new = loads(text, self.config).config if text != self.config.read_text() else load(self.config).config
        except ConfigError as error:
            raise SupervisorError(error.message, error.hint, exit_code=ExitCode.USAGE) from None
        old = loads(self.revisions[-1], self.config).config
        refused = "memkeeper.backend needs a node restart" if new.memkeeper != old.memkeeper else ""
        changed = [w.name for w in new.workers if w not in old.workers]
        changes = [
            {
                "section": "worker",
                "name": w.name,
                "change": "replaced" if w.name in changed else "kept",
                "keys": [],
                "kv": "kept" if w.name in changed else "",
                "gap_s": None,
                "text": f"replaces {w.name} through its shadow; its KV is kept" if w.name in changed else f"{w.name} untouched",
            }
            for w in new.workers
        ]
        summary = "; ".join(change["text"] for change in changes)
        plan = {"current": f"r{current}", "path": str(self.config), "summary": summary, "refused": refused, "hint": "", "changes": changes}
        plan["text"] = text if args.get("undo") else ""
        same = hashlib.sha256(text.encode()).digest() == hashlib.sha256(self.revisions[-1].encode()).digest()
        if args.get("plan") or same:
            return {"schema": 1, "n": 0, "state": "nothing" if same else "planned", "plan": plan, "message": summary}
        if refused:
            raise SupervisorError(refused, exit_code=ExitCode.USAGE)
        self.revisions.append(text)
        if args.get("undo"):
            self.config.write_text(text)
        self.status["config"] = {"revision": f"r{current + 1}", "path": str(self.config), "since": BEGAN, "previous": f"r{current}"}
        self.status["reload"] = {
            "n": current,
            "state": "done",
            "revision": f"r{current + 1}",
            "summary": summary,
            "message": "",
            "workers": {},
        }
        return {"schema": 1, "n": current, "state": "started", "plan": plan, "message": f"applying: {summary}"}


def large(engines: int = 64, gpus: int = 8) -> dict[str, Any]:
    """Return the status of a large node: two engines a worker."""
    workers = [
        worker(f"model-{n:02}", engines=[engine(f"model-{n:02}", 1), engine(f"model-{n:02}", 2, "shadow")]) for n in range(engines // 2)
    ]
    return copy.deepcopy(status(workers, [gpu(n) for n in range(gpus)]))


def serve(folder: Path, engines: int, gpus: int) -> None:
    """Be a large node, whose figures move, until somebody ends this process."""
    node = FakeNode(folder, large(engines, gpus))
    node.advance_s, node.restless = 0.5, True
    with node:
        print("serving", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
