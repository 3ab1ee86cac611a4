"""Loops of one's own as real processes among a real keeper, a supervisor's socket and a gateway; and by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sdk_world import Engine, Stream, World, environment, run_streams, submit

from shadowsup.memkeeper.protocol import Kind
from shadowsup.wire.engine import Beat, Drain, EngineState, Failed, Fence, Fenced, FirstToken, KvSpec, Phase, Release, Stop
from shadowsup.wire.link import Cancel, Sampling, Submit
from shadowsup.workers.errors import ExitCode

SCRIPTS = Path(__file__).with_name("loop_scripts.py")
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_loop.py"
PROMPT = "Once upon a time there was a supervisor that never slept and a worker that died"


class Loops:
    """Engines of one program."""

    def __init__(self, world: World, program: str, *, gpus: tuple[str, ...] = (), **args: object) -> None:
        self.world = world
        self.trace = world.path / "trace"
        self.trace.touch()
        script = [str(EXAMPLE)] if program == "example" else [str(SCRIPTS), program]
        self._changes: dict[str, Any] = {
            "kind": "loop",
            "command": [sys.executable, *script],
            "args": {**args, "trace": str(self.trace)},
            "kv": KvSpec(size=1024 * 1024),
            "gpus": gpus,
        }

    def spawn(self, seq: int, **changes: Any) -> Engine:
        return self.world.spawn(seq, **{**self._changes, **changes})

    def parked(self, seq: int, **changes: Any) -> Engine:
        engine = self.spawn(seq, **changes)
        self.world.supervisor.state(engine, EngineState.PARKED)
        return engine

    @property
    def lines(self) -> list[str]:
        return self.trace.read_text().splitlines()


def over_a_kill(loops: Loops, requests: list[Submit], after: int, *, fenced: bool = False) -> tuple[dict[str, Stream], int]:
    """Kill the active engine when every stream has ``after`` tokens, and let the shadow finish. Returns the streams and blocks kept."""
    world = loops.world
    first, shadow = loops.parked(1), loops.parked(2)
    world.supervisor.promote(first, 1)
    gateway = world.gateway(first)
    streams = {one.rid: Stream(one) for one in requests}
    gateway.send(*requests)
    assert gateway.pump(streams, lambda: all(len(stream.ids) >= after for stream in streams.values()))
    first.kill(signal.SIGKILL)
    assert not gateway.pump(streams, lambda: False)
    assert first.lifeline.recv(1) == b""
    assert not any(stream.done for stream in streams.values())
    promoted = world.supervisor.promote(shadow, 2, fenced=fenced)
    successor = world.gateway(shadow)
    successor.send(*(stream.replay(2) for stream in streams.values()))
    assert successor.pump(streams, lambda: all(len(stream.cached) == 2 for stream in streams.values()))
    world.supervisor.order(shadow, Fence(epoch=2))
    world.supervisor.expect(lambda report: isinstance(report, Fenced) and report.epoch == 2)
    assert successor.pump(streams, lambda: all(stream.done for stream in streams.values()))
    return streams, promoted.blocks_kept


def test_the_example_goes_on_identically_after_kill_9_from_kept_blocks_without_loading(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    loops = Loops(world, "example")
    requests = [
        submit("greedy", PROMPT, max_tokens=160),
        submit("sampled", "x" * 21, max_tokens=160, temperature=1.0, seed=3),
        submit("stopped", "y" * 30, max_tokens=160, temperature=1.0, seed=4, stop=("never in it",), frequency_penalty=0.5),
    ]
    reference = loops.parked(9, worker="reference")
    world.supervisor.promote(reference, 1)
    expected = run_streams(world.gateway(reference), requests)
    streams, kept = over_a_kill(loops, requests, 25)
    for rid, stream in streams.items():
        assert (stream.ids, stream.text, stream.finish_reason) == (expected[rid].ids, expected[rid].text, "length"), rid
        assert stream.cached[-1] >= (len(stream.prompt_ids) + 25 - 1) // 16 * 16
    assert kept >= sum((len(stream.prompt_ids) + 24) // 16 for stream in streams.values())
    assert len(set(streams["sampled"].text)) > 5, "a text that says something about what it came from"
    assert capfd.readouterr().out.count("loading the weights") == 1
    resumed = [report for report in world.supervisor.reports if isinstance(report, FirstToken)][-1]
    assert (resumed.epoch, resumed.resumed) == (2, 3)


def test_wrong_bytes_in_kept_blocks_change_the_answer(world: World) -> None:
    """The negative control: what the successor reads is what the dead engine wrote."""
    loops = Loops(world, "example")
    request = submit("sampled", PROMPT, max_tokens=80, temperature=1.0, seed=3)
    first, shadow = loops.parked(1), loops.parked(2)
    world.supervisor.promote(first, 1)
    gateway = world.gateway(first)
    expected = run_streams(gateway, [msgspec.structs.replace(request, rid="undisturbed")])["undisturbed"]
    first.kill()
    first.wait()
    client = world.keeper_client("vandal")
    [slab] = [one.manifest for one in client.list() if one.manifest.kind is Kind.KV]
    [ledger] = [one.manifest for one in client.list() if one.manifest.kind is Kind.LEDGER]
    handles = client.get_kv("chat", slab.fingerprint, [slab.size], ledger.size)
    os.pwrite(handles.slabs[0].fd, np.random.default_rng(1).standard_normal(slab.size // 4, np.float32).tobytes(), 0)
    handles.close()
    client.close()
    assert world.supervisor.promote(shadow, 2).blocks_kept > 0
    other = run_streams(world.gateway(shadow), [msgspec.structs.replace(request, epoch=2)])["sampled"]
    assert other.cached[0] > 0 and other.text != expected.text


def test_kept_things_come_back_as_they_were_and_are_loaded_once(world: World) -> None:
    loops = Loops(world, "kinds")
    loops.parked(1)
    loops.parked(2, verify="full")
    assert loops.lines[0] == "load" and loops.lines.count("load") == 1
    said = [line for line in loops.lines if line.startswith("(")]
    values = ([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], "torch.bfloat16", 7, (0, 3), [4, 3, 2, 1, 0], "<i2", b"config")
    assert said == [repr(values) + "[1.0, 1.0, 1.0]"] * 2
    assert loops.lines.count("read-only") == 2


def a_loop_on_a_device_goes_on(world: World, **changes: Any) -> Loops:
    """On the CPU here, on a GPU in tests/gpu."""
    loops = Loops(world, "on_device", **changes)
    requests = [submit("a", PROMPT, max_tokens=80), submit("b", "short", max_tokens=80)]
    streams, kept = over_a_kill(loops, requests, 20)
    assert kept > 0
    for stream in streams.values():
        value = 0
        for token in (stream.submit.prompt or "").encode():
            value = (value * 31 + token) % 9973
        for token in stream.ids:
            assert token == 122 - value % 26
            value = (value * 31 + token) % 9973
        assert stream.cached[-1] >= (len(stream.prompt_ids) + 19) // 4 * 4
    return loops


def test_tensors_blocks_and_notes_of_a_loop_go_on_wherever_its_memory_is(world: World) -> None:
    loops = a_loop_on_a_device_goes_on(world)
    assert loops.lines == ["cpu [122, 121, 120]", "cpu [122, 121, 120]", "nothing", "kept"]


def test_a_loop_with_its_own_scheduler_goes_on_where_its_predecessor_was(world: World) -> None:
    loops = Loops(world, "summing")
    requests = [submit("a", PROMPT, max_tokens=60), submit("b", "short", max_tokens=60)]
    streams, kept = over_a_kill(loops, requests, 20)
    assert kept > 0
    for stream in streams.values():
        total = sum(stream.submit.prompt.encode() if stream.submit.prompt else b"")
        for token in stream.ids:
            assert token == 97 + total % 26
            total += token
        assert stream.cached[-1] >= (len(stream.prompt_ids) + 19) // 4 * 4


def test_a_loop_with_its_own_scheduler_is_told_of_clients_that_leave(world: World) -> None:
    loops = Loops(world, "summing")
    engine = loops.parked(1)
    world.supervisor.promote(engine, 1)
    gateway = world.gateway(engine)
    streams = {"a": Stream(submit("a", PROMPT, max_tokens=10_000)), "b": Stream(submit("b", PROMPT, max_tokens=30))}
    assert gateway.hello.max_context == 200
    gateway.send(streams["a"].submit)
    gateway.pump(streams, lambda: len(streams["a"].ids) >= 3)
    gateway.send(Cancel(rid="a"), streams["b"].submit)
    assert gateway.pump(streams, lambda: streams["b"].done)
    assert loops.lines == ["cancelled a"]
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.inflight == 0 and report.step > 30)


def test_state_of_a_loop_without_requests_goes_on_after_kill_9(world: World) -> None:
    loops = Loops(world, "training")
    first, shadow = loops.parked(1), loops.parked(2)
    world.supervisor.promote(first, 1)
    beat = world.supervisor.expect(lambda report: isinstance(report, Beat) and report.step >= 30)
    assert (beat.phase, beat.inflight) == (Phase.DECODE, 1)
    first.kill()
    first.wait()
    world.supervisor.promote(shadow, 2, fenced=False)
    world.supervisor.order(shadow, Fence(epoch=2))
    world.supervisor.expect(lambda report: isinstance(report, Fenced))
    second = world.supervisor.expect(lambda report: isinstance(report, Beat) and report.engine == shadow.id and report.step >= 30)
    assert second.kv is not None and second.kv.valid > 2
    start, resumed = [int(line.removeprefix("from ")) for line in loops.lines]
    assert start == 0 and resumed >= beat.step


def test_a_loop_without_requests_says_so_to_clients_and_has_nothing_to_drain(world: World) -> None:
    loops = Loops(world, "training")
    engine = loops.parked(1)
    world.supervisor.promote(engine, 1)
    rejected = run_streams(world.gateway(engine), [submit("a", "hello")])["a"].rejected
    assert rejected is not None and (rejected.status, rejected.retryable) == (404, False)
    world.supervisor.order(engine, Drain())
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.state is EngineState.DRAINING and report.inflight == 0)
    world.supervisor.order(engine, Release())
    assert engine.wait() == ExitCode.STOPPED


def test_limits_bad_prompts_chat_and_ends(world: World) -> None:
    engine = Loops(world, "echo").parked(1)
    world.supervisor.promote(engine, 1)
    greedy = Sampling(temperature=0.0, seed=1, max_tokens=40)
    chat = Submit(rid="chat", epoch=1, messages=({"role": "user", "content": "hello"},), sampling=greedy)
    ids = Submit(rid="ids", epoch=1, prompt_ids=(1, 256), sampling=greedy)
    requests = [submit("ok", "hi", max_tokens=40), submit("empty", ""), submit("long", "x" * 100), submit("poison", "poison"), ids, chat]
    streams = run_streams(world.gateway(engine), requests)
    for rid in ("ok", "chat"):
        assert (streams[rid].text, streams[rid].finish_reason, len(streams[rid].ids)) == ("...", "stop", 4)
    assert streams["chat"].prompt_ids == tuple(b"hello")
    told = {rid: streams[rid].rejected for rid in ("empty", "long", "poison", "ids")}
    assert all(one is not None and one.status == 400 and not one.retryable for one in told.values())
    words = {rid: one.message for rid, one in told.items() if one is not None}
    assert "no tokens" in words["empty"] and "takes 64 tokens" in words["long"]
    assert words["poison"] == "the prompt cannot be encoded: it is poison" and "vocabulary of 256" in words["ids"]


# --- endings ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["stop", "release", "signal"])
def test_a_loop_that_is_told_to_go_leaves_the_block_and_the_script_goes_on(
    world: World, order: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Loops(world, "echo").parked(1)
    world.supervisor.promote(engine, 1)
    if order == "signal":
        engine.kill(signal.SIGTERM)
    else:
        world.supervisor.order(engine, Stop() if order == "stop" else Release())
    assert engine.wait() == ExitCode.STOPPED
    out, err = capfd.readouterr()
    assert "left" in out and "Traceback" not in err


def test_a_loop_is_stopped_while_it_loads(world: World) -> None:
    loops = Loops(world, "failing", how="slow load")
    engine = loops.spawn(1)
    world.supervisor.state(engine, EngineState.LOADING)
    world.supervisor.order(engine, Stop())
    assert engine.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(
    ("how", "stage", "words", "code"),
    [
        ("load", "load", "RuntimeError: no such file", ExitCode.FAILED),
        ("fatal", "load", "no such model", ExitCode.FATAL),
        ("early", "warm", "this engine is not the active one", ExitCode.FATAL),
    ],
)
def test_what_goes_wrong_before_it_parks_is_reported(
    world: World, how: str, stage: str, words: str, code: ExitCode, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Loops(world, "failing", how=how).spawn(1)
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert (failed.stage, failed.message, failed.fatal) == (stage, words, code is ExitCode.FATAL)
    assert engine.wait() == code
    assert capfd.readouterr().err.count("Traceback") == (how == "load"), "errors of this project are words, others are told once"


@pytest.mark.parametrize(("how", "words", "code"), [("step", "RuntimeError: step failed", 1), ("unfinished", "a step was not finished", 2)])
def test_what_goes_wrong_in_a_step_is_reported(world: World, how: str, words: str, code: int) -> None:
    engine = Loops(world, "failing", how=how).parked(1)
    world.supervisor.promote(engine, 1)
    world.gateway(engine).send(submit("a", "hello"))
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert (failed.stage, failed.message) == ("step", words)
    assert engine.wait() == code


def test_a_loop_whose_ledger_was_taken_ends_and_says_why(world: World) -> None:
    loops = Loops(world, "training")
    first, second = loops.parked(1), loops.parked(2)
    world.supervisor.promote(first, 1)
    world.supervisor.promote(second, 2)
    assert first.wait() == ExitCode.LEDGER_LOST


# --- by hand ------------------------------------------------------------------------------------------------------------------------


def by_hand(*command: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], input=lines, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )


def test_the_example_runs_by_hand_and_answers_the_same(world: World) -> None:
    done = by_hand(str(EXAMPLE), lines=f"{PROMPT}\nhello\n")
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.splitlines()[2:]
    engine = Loops(world, "example").parked(1)
    world.supervisor.promote(engine, 1)
    expected = run_streams(world.gateway(engine), [submit("a", PROMPT, max_tokens=64), submit("b", "hello", max_tokens=64)])
    assert answers == [expected["a"].text, expected["b"].text]


def test_the_program_in_the_document_runs_by_hand() -> None:
    blocks = (EXAMPLE.parents[1] / "own-loop.md").read_text().split("```python\n")[1:]
    [program] = [block for block in (one.partition("```")[0] for one in blocks) if "import" in block]
    done = by_hand("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done at 500.0\n", "")


def test_the_example_is_as_long_as_it_says() -> None:
    lines = len(EXAMPLE.read_text().splitlines())
    assert lines < 80 and f"a whole one, {lines} lines" in (EXAMPLE.parents[1] / "own-loop.md").read_text()


def test_an_error_by_hand_is_told_and_a_refusal_is_no_end() -> None:
    done = by_hand(str(SCRIPTS), "echo", lines="poison\nhi\n")
    assert (done.returncode, done.stdout) == (0, "...\nleft\n")
    assert done.stderr == "the prompt cannot be encoded: it is poison\n"
