"""Engine processes of this kind among a real keeper, supervisor and gateway: SIGKILL in mid-stream, and the streams go on."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
from engine_world import TINY, prompt_of, submit, tiny_spec
from sdk_world import Stream, World, run_streams

from shadowsup.wire.engine import EngineState, Failed, Fence, Fenced

SPEC = tiny_spec(blocks=96)
CHANGES: dict[str, Any] = {"kind": "transformers", "model": SPEC.model, "dtype": "float32", "args": SPEC.args, "kv": SPEC.kv}
REQUESTS = [
    submit("greedy", prompt_of(60), max_tokens=300),
    submit("seeded", prompt_of(33, 1), max_tokens=300, temperature=1.0, seed=5),
    submit("messages", prompt_of(20, 2), max_tokens=300, temperature=0.7, top_p=0.9, seed=6),
]
"""Long enough that none is over before the engine is killed, on a machine that does other things as well."""


def test_a_shadow_continues_every_stream_of_a_killed_engine(world: World) -> None:
    first = world.spawn(1, **CHANGES)
    shadow = world.parked(2, **CHANGES)
    world.supervisor.state(first, EngineState.PARKED)
    world.supervisor.promote(first, 1)
    gateway = world.gateway(first)
    expected = run_streams(gateway, [msgspec.structs.replace(one, rid=f"{one.rid} undisturbed") for one in REQUESTS])
    streams = {one.rid: Stream(one) for one in REQUESTS}
    gateway.send(*REQUESTS)
    gateway.pump(streams, lambda: all(len(stream.ids) >= 20 for stream in streams.values()))
    first.kill(signal.SIGKILL)
    gateway.pump(streams, lambda: False)  # what had been sent still counts
    first.wait()
    assert not any(stream.done for stream in streams.values())
    promoted = world.supervisor.promote(shadow, 2, fenced=False)
    assert promoted.blocks_kept > 0 and promoted.blocks_dropped == 0
    second = world.gateway(shadow)
    second.send(*[stream.replay(2) for stream in streams.values()])
    world.supervisor.order(shadow, Fence(epoch=2))
    world.supervisor.expect(lambda report: isinstance(report, Fenced))
    assert second.pump(streams, lambda: all(stream.done for stream in streams.values()))
    for rid, stream in streams.items():
        other = expected[f"{rid} undisturbed"]
        assert (stream.ids, stream.text, stream.finish_reason) == (other.ids, other.text, other.finish_reason)
        assert stream.cached[-1] > len(stream.prompt_ids), "the answer so far was found too"


def test_a_model_that_cannot_be_is_reported_and_not_tried_again(world: World) -> None:
    engine = world.spawn(1, **{**CHANGES, "args": {"load_format": "dummy", "config": {**TINY, "model_type": "mamba"}}})
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert failed.fatal and failed.stage == "load" and failed.message
    assert engine.wait() != 0
