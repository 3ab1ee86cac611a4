"""A real engine process among a real keeper, a supervisor's socket and a gateway: loads, parks, serves, dies, is succeeded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sdk_world import Stream, World, run_streams, submit

from shadowsup.memkeeper.protocol import Kind
from shadowsup.wire.engine import Beat, Drain, EngineState, Failed, Fence, Fenced, FirstToken, Phase, Promote, Promoted, Release, Stop
from shadowsup.wire.link import Cancel, Rejected, Sampling, Submit, Token
from shadowsup.workers.errors import ExitCode

LONG = "The quick brown fox jumps over the lazy dog. " * 5
SLOW = {"step_s": 0.004}
SLOWER = {"step_s": 0.03}
"""Of one that is killed in mid-stream: the stream must not be over before that, on a machine that does other things as well."""


def undisturbed(world: World, submits: list[Submit]) -> dict[str, Stream]:
    """What the streams are when nothing happens, from another worker over the same weights."""
    _, gateway = world.active(90, worker="reference")
    return run_streams(gateway, submits)


def test_comes_up_parked_says_so_and_serves_when_promoted(world: World) -> None:
    engine = world.parked(1)
    beat = world.supervisor.beats[engine.id]
    assert (beat.epoch, beat.phase, beat.inflight) == (0, Phase.PARKED, 0)
    gateway = world.gateway(engine)
    assert (gateway.hello.state, gateway.hello.epoch) == (EngineState.PARKED, 0)
    promoted = world.supervisor.promote(engine, 1)
    assert (promoted.epoch, promoted.blocks_kept) == (1, 0)
    hello = gateway.hello_state(EngineState.ACTIVE)
    assert (hello.epoch, hello.max_context) == (1, 4096)
    stream = run_streams(gateway, [submit("a", LONG, max_tokens=20)])["a"]
    assert (len(stream.ids), stream.finish_reason, len(stream.text)) == (20, "length", 20)
    first = world.supervisor.expect(lambda report: isinstance(report, FirstToken))
    assert (first.epoch, first.resumed) == (1, 0)
    served = world.supervisor.expect(lambda report: isinstance(report, Beat) and report.tokens_total == 20)
    assert served.step >= 20


def test_chat_stop_strings_and_bad_requests(world: World) -> None:
    _, gateway = world.active(1, args={"unicode": True})
    whole = run_streams(gateway, [submit("whole", "once upon", max_tokens=200)])["whole"]
    stop = whole.text[60:64]
    end = whole.text.index(stop)
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=200, stop=(stop,))
    chat = Submit(rid="chat", epoch=1, messages=({"role": "user", "content": "hi"},), sampling=sampling)
    cut = Submit(rid="cut", epoch=1, prompt="once upon", sampling=sampling)
    streams = run_streams(gateway, [chat, cut, submit("long", "x" * 5000), submit("empty", "")])
    assert streams["chat"].done and bytes(streams["chat"].prompt_ids) == b"<user>hi\n<assistant>"
    assert (streams["cut"].text, streams["cut"].finish_reason) == (whole.text[:end], "stop")
    for rid in ("long", "empty"):
        rejected = streams[rid].rejected
        assert rejected is not None and (rejected.status, rejected.retryable) == (400, False)


def test_streams_go_on_identically_after_kill_9_and_every_full_block_hits(world: World) -> None:
    sampled: dict[str, Any] = {"temperature": 0.8, "max_tokens": 150}
    submits = [submit(f"r{i}", f"{i} {LONG}", **({} if i % 2 else sampled)) for i in range(6)]
    expected = undisturbed(world, submits)
    first, gateway = world.active(1, args=SLOWER)
    second = world.parked(2, args=SLOW)
    successor = world.gateway(second)
    streams = {one.rid: Stream(one) for one in submits}
    gateway.send(*submits)
    assert gateway.pump(streams, lambda: all(len(stream.ids) >= 21 for stream in streams.values()))
    first.kill()
    assert not gateway.pump(streams, lambda: False), "the link ends with the engine"
    assert first.lifeline.recv(1) == b""
    promoted = world.supervisor.promote(second, 2, fenced=False)
    computed = {rid: len(stream.prompt_ids) + len(stream.ids) for rid, stream in streams.items() if not stream.done}
    assert len(computed) == 6
    successor.hello_state(EngineState.ACTIVE)
    successor.send(*(stream.replay(2) for stream in streams.values()))
    assert successor.pump(streams, lambda: all(len(stream.cached) == 2 for stream in streams.values()))
    # The newest token of a request has no KV yet; of what has, every full block was published with the step that filled it.
    for rid, tokens in computed.items():
        assert streams[rid].cached[-1] == (tokens - 1) // 16 * 16, rid
    assert promoted.blocks_kept >= sum((tokens - 1) // 16 for tokens in computed.values())
    world.supervisor.order(second, Fence(epoch=2))
    fenced = world.supervisor.expect(lambda report: isinstance(report, Fenced))
    assert fenced.epoch == 2 and fenced.reserve > 0
    assert successor.pump(streams, lambda: all(stream.done for stream in streams.values()))
    for rid, stream in streams.items():
        assert (stream.ids, stream.text) == (expected[rid].ids, expected[rid].text), rid
    resumed = [report for report in world.supervisor.reports if isinstance(report, FirstToken)][-1]
    assert (resumed.engine, resumed.epoch, resumed.resumed) == (second.id, 2, 6)


def test_wrong_bytes_under_a_true_index_change_the_text(world: World) -> None:
    """The negative control of the test above: it would see KV that is not what the ledger says."""
    request = submit("a", LONG, max_tokens=100)
    expected = undisturbed(world, [request])["a"]
    first, gateway = world.active(1, args=SLOWER)
    second = world.parked(2)
    streams = {"a": Stream(request)}
    gateway.send(request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 40)
    first.kill()
    gateway.pump(streams, lambda: False)
    client = world.keeper_client("vandal")
    kv = [one.manifest for one in client.list() if one.manifest.kind.value == "kv" and one.manifest.worker == "chat"]
    handles = client.get_kv("chat", kv[0].fingerprint, [kv[0].size], _ledger_size(client))
    assert not handles.created
    os.pwrite(handles.slabs[0].fd, os.urandom(kv[0].size), 0)
    handles.close()
    client.close()
    assert world.supervisor.promote(second, 2).blocks_kept > 0
    successor = world.gateway(second)
    successor.send(streams["a"].replay(2))
    assert successor.pump(streams, lambda: streams["a"].done)
    assert streams["a"].text != expected.text


def _ledger_size(client: object) -> int:
    sizes = [one.manifest.size for one in client.list() if one.manifest.kind.value == "ledger"]  # type: ignore[attr-defined]
    return int(sizes[0])


def test_promotion_without_the_kept_blocks_recomputes_everything(world: World) -> None:
    request = submit("a", LONG, max_tokens=60)
    expected = undisturbed(world, [request])["a"]
    first, gateway = world.active(1, args=SLOWER)
    second = world.parked(2)
    streams = {"a": Stream(request)}
    gateway.send(request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 20)
    first.kill()
    gateway.pump(streams, lambda: False)
    promoted = world.supervisor.promote(second, 2, keep_kv=False)
    assert (promoted.blocks_kept, promoted.blocks_dropped) == (0, 0)
    successor = world.gateway(second)
    successor.send(streams["a"].replay(2))
    assert successor.pump(streams, lambda: streams["a"].done)
    assert streams["a"].cached[-1] == 0
    assert streams["a"].text == expected.text


def test_a_shadow_parked_before_fresh_blocks_were_taken_goes_over_to_them(world: World) -> None:
    request = submit("a", LONG, max_tokens=120)
    expected = undisturbed(world, [request])["a"]
    first, gateway = world.active(1, args=SLOWER)
    second, third = world.parked(2, args=SLOWER), world.parked(3)
    streams = {"a": Stream(request)}
    gateway.send(request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 20)
    first.kill()
    gateway.pump(streams, lambda: False)
    assert world.supervisor.promote(second, 2, keep_kv=False).blocks_kept == 0
    successor = world.gateway(second)
    successor.send(streams["a"].replay(2))
    client = world.keeper_client()
    assert successor.pump(streams, lambda: len(streams["a"].ids) >= 60)

    def held() -> list[tuple[str, ...]]:
        return [one.leases for one in client.list() if one.manifest.kind is Kind.LEDGER and one.manifest.worker == "chat"]

    world.supervisor.expect(lambda report: held() == [("chat.2", "chat.3")])  # the old set is freed, the new one held by both
    client.close()
    second.kill()
    successor.pump(streams, lambda: False)
    tokens = len(streams["a"].prompt_ids) + len(streams["a"].ids)
    assert world.supervisor.promote(third, 3).blocks_kept >= (tokens - 1) // 16
    last = world.gateway(third)
    last.send(streams["a"].replay(3))
    assert last.pump(streams, lambda: streams["a"].done)
    assert streams["a"].text == expected.text


def test_blocks_that_were_given_up_are_never_trusted_again(world: World) -> None:
    """Even by a shadow that has not heard of the fresh ones: no keeper could tell it."""
    first, gateway = world.active(1)
    run_streams(gateway, [submit("a", LONG, max_tokens=20)])
    second, third = world.parked(2), world.parked(3)
    first.kill()
    world.supervisor.promote(second, 2, keep_kv=False)
    world.keeper.kill()
    second.kill()
    assert world.supervisor.promote(third, 3).blocks_kept == 0


def test_an_owner_that_was_only_paused_says_nothing_more_and_exits_with_its_own_status(world: World) -> None:
    first, gateway = world.active(1, args=SLOW)
    second = world.parked(2)
    streams = {"a": Stream(submit("a", LONG, max_tokens=3000))}
    gateway.send(streams["a"].submit)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 5)
    first.kill(signal.SIGSTOP)
    os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TimeoutError):  # what it had sent before it was stopped
        while True:
            streams["a"].take(gateway.next(0.0))  # type: ignore[arg-type]
    before = len(streams["a"].ids)
    world.supervisor.promote(second, 2)
    first.kill(signal.SIGCONT)
    assert first.wait() == ExitCode.LEDGER_LOST
    gateway.pump(streams, lambda: False)
    assert len(streams["a"].ids) - before <= 2, "at most what it was just sending"
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert (failed.engine, failed.stage) == (first.id, "step")


def test_two_promotions_to_one_epoch_leave_one_owner(world: World) -> None:
    engines = [world.parked(seq) for seq in (1, 2)]
    for engine in engines:
        world.supervisor.order(engine, Promote(epoch=1))
    lost = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert lost.stage == "promote"
    loser, winner = sorted(engines, key=lambda engine: engine.id != lost.engine)
    assert loser.wait() == ExitCode.LEDGER_LOST
    assert world.supervisor.state(winner, EngineState.ACTIVE).epoch == 1


def test_a_repeated_promote_is_answered_again(world: World) -> None:
    engine, _ = world.active(1)
    assert world.supervisor.promote(engine, 1).epoch == 1
    assert sum(isinstance(report, Promoted) for report in world.supervisor.reports) == 2


def test_requests_for_another_state_or_epoch_are_refused_for_a_retry(world: World) -> None:
    engine = world.parked(1)
    gateway = world.gateway(engine)
    early = run_streams(gateway, [submit("early", "x")])["early"].rejected
    assert early is not None and (early.status, early.retryable) == (503, True)
    world.supervisor.promote(engine, 1)
    gateway.hello_state(EngineState.ACTIVE)
    other = run_streams(gateway, [submit("other", "x", epoch=7)])["other"].rejected
    assert other is not None and (other.status, other.retryable, other.epoch) == (503, True, 7)


def test_a_duplicate_never_disturbs_the_running_request(world: World) -> None:
    _, gateway = world.active(1, args=SLOW)
    request = submit("a", LONG, max_tokens=40)
    streams = {"a": Stream(request), "b": Stream(submit("b", "x", max_tokens=1))}
    gateway.send(request, request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 5)
    gateway.send(request)
    assert gateway.pump(streams, lambda: streams["a"].done)
    assert (len(streams["a"].ids), streams["a"].rejected, len(streams["a"].cached)) == (40, None, 1)
    gateway.send(request, streams["b"].submit)
    assert gateway.pump(streams, lambda: streams["b"].done), "and one that comes after the end is ignored too"
    assert len(streams["a"].ids) == 40


def test_cancel_frees_the_request_and_silences_it(world: World) -> None:
    _, gateway = world.active(1, args=SLOW)
    streams = {"a": Stream(submit("a", LONG, max_tokens=3000)), "b": Stream(submit("b", LONG, max_tokens=30))}
    gateway.send(streams["a"].submit)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 3)
    gateway.send(Cancel(rid="a"), Cancel(rid="nobody"), streams["b"].submit)
    assert gateway.pump(streams, lambda: streams["b"].done)
    at = len(streams["a"].ids)
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.inflight == 0 and report.phase is Phase.IDLE)
    with pytest.raises(TimeoutError):
        gateway.next(0.05)
    assert len(streams["a"].ids) == at


def test_a_gateway_that_comes_back_submits_again_in_the_same_epoch(world: World) -> None:
    engine, gateway = world.active(1, args=SLOWER)
    request = submit("a", LONG, max_tokens=60)
    expected = undisturbed(world, [request])["a"]
    streams = {"a": Stream(request)}
    gateway.send(request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 20)
    gateway.close()
    again = world.gateway(engine)
    assert (again.hello.state, again.hello.epoch) == (EngineState.ACTIVE, 1)
    again.send(streams["a"].replay(1))
    assert again.pump(streams, lambda: streams["a"].done)
    assert streams["a"].text == expected.text


def test_a_step_sends_the_events_of_all_streams_in_one_frame(world: World) -> None:
    _, gateway = world.active(1, args={"step_s": 0.002})
    submits = [submit(f"r{i}", "go", max_tokens=50) for i in range(16)]
    before = gateway.frames
    run_streams(gateway, submits)
    assert gateway.frames - before <= 70


def test_drain_finishes_what_runs_and_refuses_what_comes(world: World) -> None:
    engine, gateway = world.active(1, args=SLOW)
    streams = {"a": Stream(submit("a", LONG, max_tokens=60)), "late": Stream(submit("late", "x"))}
    gateway.send(streams["a"].submit)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 2)
    world.supervisor.order(engine, Drain())
    world.supervisor.state(engine, EngineState.DRAINING)
    gateway.send(streams["late"].submit)
    assert gateway.pump(streams, lambda: all(stream.done for stream in streams.values()))
    assert len(streams["a"].ids) == 60
    late = streams["late"].rejected
    assert late is not None and (late.status, late.retryable) == (503, True)
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.state is EngineState.DRAINING and report.inflight == 0)
    world.supervisor.order(engine, Stop())
    assert engine.wait() == ExitCode.STOPPED


@pytest.mark.parametrize("how", ["stop", "release", "sigterm"])
def test_leaves_with_status_0_when_asked(world: World, how: str) -> None:
    engine, gateway = world.active(1, args=SLOW)
    streams = {"a": Stream(submit("a", LONG, max_tokens=3000))}
    gateway.send(streams["a"].submit)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 2)
    if how == "sigterm":
        engine.kill(signal.SIGTERM)
    else:
        world.supervisor.order(engine, Stop() if how == "stop" else Release())
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.state is EngineState.STOPPING)
    assert engine.wait() == ExitCode.STOPPED
    assert not Path(engine.spec.link_socket).exists()
    assert not gateway.pump(streams, lambda: False)


def test_stops_at_once_while_it_loads(world: World) -> None:
    engine = world.spawn(1, args={"load_s": 60.0})
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.detail == "loading fake weights")
    world.supervisor.order(engine, Stop())
    assert engine.wait() == ExitCode.STOPPED


@pytest.mark.parametrize(("fatal", "status"), [(False, ExitCode.FAILED), (True, ExitCode.FATAL)])
@pytest.mark.parametrize("stage", ["load", "warm", "promote", "step"])
def test_failures_are_reported_with_their_stage_before_the_exit(world: World, stage: str, fatal: bool, status: ExitCode) -> None:
    engine = world.spawn(1, args={"fail": stage, "fatal": fatal})
    if stage in ("promote", "step"):
        world.supervisor.state(engine, EngineState.PARKED)
        world.supervisor.order(engine, Promote(epoch=1))
    if stage == "step":
        world.supervisor.state(engine, EngineState.ACTIVE)
        world.gateway(engine).send(submit("a", "x"))
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert (failed.stage, failed.message, failed.fatal) == (stage, f"told to fail in {stage}", fatal)
    assert engine.wait() == status


def test_an_unknown_engine_kind_is_fatal_and_named(world: World) -> None:
    engine = world.spawn(1, kind="nothing")
    failed = world.supervisor.expect(lambda report: isinstance(report, Failed))
    assert failed.fatal and "nothing" in failed.message and "transformers" in failed.hint
    assert engine.wait() == ExitCode.FATAL


def test_beats_go_on_while_a_step_does_not_return_and_show_that_it_does_not(world: World) -> None:
    wedge = world.path / "wedge"
    engine, gateway = world.active(1, args={"wedge": str(wedge), **SLOW})
    streams = {"a": Stream(submit("a", LONG, max_tokens=3000))}
    gateway.send(streams["a"].submit)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 5)
    wedge.touch()
    seen: list[Beat] = []

    def stuck(report: object) -> bool:
        if isinstance(report, Beat) and report.engine == engine.id:
            seen.append(report)
        return len(seen) > 12 and len({beat.step for beat in seen[-10:]}) == 1

    last = world.supervisor.expect(stuck)
    assert (last.phase, last.inflight) == (Phase.DECODE, 1)
    gaps = [after.sent_s - before.sent_s for before, after in zip(seen[-10:], seen[-9:], strict=False)]
    assert max(gaps) < 5.0
    wedge.unlink()
    world.supervisor.expect(lambda report: isinstance(report, Beat) and report.step > last.step)


def test_nothing_happens_to_a_stream_when_the_keeper_is_killed(world: World) -> None:
    request = submit("a", LONG, max_tokens=80)
    expected = undisturbed(world, [request])["a"]
    _, gateway = world.active(1, args=SLOW)
    second = world.parked(2, args=SLOW)
    streams = {"a": Stream(request)}
    gateway.send(request)
    assert gateway.pump(streams, lambda: len(streams["a"].ids) >= 5)
    world.keeper.kill()
    assert gateway.pump(streams, lambda: streams["a"].done)
    assert streams["a"].text == expected.text
    # And a promotion needs no keeper either.
    world.engines[-2].kill()
    assert world.supervisor.promote(second, 2).blocks_kept > 0


def test_beats_and_kept_reports_come_when_the_supervisor_is_back(world: World) -> None:
    engine, gateway = world.active(1)
    world.supervisor.close_socket()
    stream = run_streams(gateway, [submit("a", LONG, max_tokens=20)])["a"]
    assert len(stream.ids) == 20
    world.supervisor.open()
    assert world.supervisor.state(engine, EngineState.ACTIVE).tokens_total == 20
    first = world.supervisor.expect(lambda report: isinstance(report, FirstToken))
    assert first.epoch == 1
    world.supervisor.order(engine, Stop())
    assert engine.wait() == ExitCode.STOPPED


def test_the_second_engine_maps_the_weights_of_the_first_read_only(world: World) -> None:
    engines = [world.parked(seq) for seq in (1, 2)]
    for engine in engines:
        maps = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
        weights = [line.split()[1] for line in maps if "memfd:" in line and "weights" in line]
        assert weights and set(weights) == {"r--s"}, weights
    client = world.keeper_client()
    kinds = [one.manifest.kind.value for one in client.list()]
    client.close()
    assert kinds.count("weights") == 1


def test_other_geometry_is_a_miss_not_a_guess(world: World) -> None:
    first, gateway = world.active(1)
    run_streams(gateway, [submit("a", LONG)])
    first.kill()
    second = world.parked(2, args={"token_bytes": 128})
    assert world.supervisor.promote(second, 2).blocks_kept == 0


def test_events_of_tokens_and_refusals_name_their_epoch(world: World) -> None:
    _, gateway = world.active(1, epoch=5)
    gateway.send(submit("a", "x", epoch=5, max_tokens=2), submit("b", "x", epoch=4))
    events = [gateway.next() for _ in range(4)]
    assert {event.epoch for event in events if isinstance(event, Token)} == {5}
    assert {event.epoch for event in events if isinstance(event, Rejected)} == {4}
