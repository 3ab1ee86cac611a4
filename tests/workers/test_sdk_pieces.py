"""Small pieces of the engine side: lifeline, doorbell, intake, process set-up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest
from sdk_world import environment, submit

from shadowsup.wire.engine import EngineState
from shadowsup.wire.link import Accepted, Cancel, Rejected, Replay, Stage, Submit, Token, Unstage
from shadowsup.workers import registry
from shadowsup.workers.doorbell import Doorbell
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.intake import Intake
from shadowsup.workers.kv_watch import KvWatch
from shadowsup.workers.lifeline import Lifeline
from shadowsup.workers.link import LinkChanged

ACTIVE = EngineState.ACTIVE


def fork(child: object) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            child()  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid


def test_a_lifeline_ends_with_its_process_though_forked_children_live_on() -> None:
    ours, theirs = socket.socketpair()
    hold, held = os.pipe()

    def engine() -> None:
        ours.close()
        os.close(held)
        line = Lifeline(theirs.detach())
        line.renew()
        fork(lambda: os.read(hold, 1))  # a data loader that outlives it

    os.waitpid(fork(engine), 0)
    theirs.close()
    with ours:
        ours.settimeout(30)
        assert ours.recv(1) == b""
    os.close(held)  # the loader ends too
    os.close(hold)


def test_renewing_a_lifeline_makes_it_the_newest_descriptor_without_a_gap() -> None:
    ours, theirs = socket.socketpair()
    old = theirs.detach()
    line = Lifeline(old)
    later = os.open(os.devnull, os.O_RDONLY)
    line.renew()
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    with pytest.raises(OSError):
        os.fstat(old)
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert "socket:" not in listing.stdout, "a program that the engine executes does not inherit it"
    line.close()
    line.close()
    assert ours.recv(1) == b""
    ours.close()
    os.close(later)


def test_no_lifeline_is_a_lifeline_that_does_nothing() -> None:
    line = Lifeline(-1)
    line.renew()
    line.close()


def test_a_ring_wakes_and_is_never_lost() -> None:
    bell = Doorbell()
    try:
        assert not bell.wait(0)
        bell.ring()
        bell.ring()
        assert bell.wait(None)
        assert not bell.wait(0)
        thread = threading.Thread(target=bell.ring)
        thread.start()
        assert bell.wait(30)
        thread.join()
    finally:
        bell.close()
        bell.close()
        bell.ring()


class Recorder:
    """An adapter that only notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def submit(self, request: Submit) -> None:
        self.calls.append(("submit", request.rid))

    def cancel(self, rid: str) -> None:
        self.calls.append(("cancel", rid))

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None:
        self.calls.append(("foresee", rid))

    def forget(self, rid: str) -> None:
        self.calls.append(("forget", rid))


def intake() -> tuple[Intake, Recorder]:
    recorder = Recorder()
    made = Intake(recorder, lambda: None)  # type: ignore[arg-type]
    made.deliver([LinkChanged(1)])
    return made, recorder


def accepted(rid: str) -> Accepted:
    return Accepted(rid=rid, epoch=1, prompt_ids=(1,), cached_tokens=0)


def last(rid: str) -> Token:
    return Token(rid=rid, epoch=1, ids=(1,), text="", chars=0, finish_reason="stop")


def test_a_request_that_comes_again_after_its_cancel_waits_for_the_step_boundary() -> None:
    requests, engine = intake()
    for message in (submit("a", "x"), Cancel(rid="a"), submit("a", "x")):
        requests.deliver([message])
    assert requests.take(ACTIVE, 1) == []
    assert engine.calls == [("submit", "a"), ("cancel", "a")]
    assert requests.waiting and requests.live == 0
    assert requests.passing([accepted("a")]) == [], "that was the first one's"
    assert engine.calls[-1] == ("submit", "a")
    assert requests.passing([accepted("a")]) == [accepted("a")]
    assert not requests.waiting


def test_a_cancel_reaches_a_request_that_still_waits_for_the_boundary() -> None:
    requests, engine = intake()
    for message in (submit("a", "x"), Cancel(rid="a"), submit("a", "x"), Cancel(rid="a")):
        requests.deliver([message])
    requests.take(ACTIVE, 1)
    requests.passing([])
    assert engine.calls == [("submit", "a"), ("cancel", "a")]
    assert requests.live == 0


@pytest.mark.parametrize(("state", "epoch"), [(EngineState.PARKED, 1), (ACTIVE, 2)])
def test_a_prompt_whose_replay_is_refused_is_not_kept(state: EngineState, epoch: int) -> None:
    requests, engine = intake()
    replay = Replay(prompt_ids=(), output_ids=(1,), delivered_chars=1, staged="a")
    requests.deliver([Stage(rid="a", prompt_ids=(1, 2))])
    requests.deliver([msgspec.structs.replace(submit("a", "x"), prompt=None, replay=replay)])
    assert [refused.retryable for refused in requests.take(state, epoch)] == [True]
    assert engine.calls == [("foresee", "a"), ("forget", "a")]


def test_a_change_of_gateway_cancels_everything_and_forgets_what_is_finished() -> None:
    requests, engine = intake()
    requests.deliver([submit("a", "x")])
    requests.deliver([submit("b", "x")])
    requests.take(ACTIVE, 1)
    assert requests.passing([last("a")]) == [last("a")]
    requests.deliver([submit("a", "x")])
    requests.take(ACTIVE, 1)
    assert engine.calls[2:] == [], "a duplicate of a finished request"
    requests.deliver([LinkChanged(2)])
    requests.deliver([submit("a", "x")])
    requests.deliver([submit("b", "x")])
    requests.take(ACTIVE, 1)
    assert engine.calls[2:] == [("cancel", "b"), ("submit", "a")]
    assert requests.connection == 2
    requests.passing([])
    assert engine.calls[-1] == ("submit", "b")


def test_refusals_meant_for_a_gateway_that_is_gone_are_not_for_the_next() -> None:
    requests, _ = intake()
    requests.deliver([submit("a", "x", epoch=9)])
    requests.deliver([LinkChanged(2)])
    requests.deliver([submit("b", "x", epoch=9)])
    assert [one.rid for one in requests.take(ACTIVE, 1)] == ["b"]


@pytest.mark.parametrize("state", [state for state in EngineState if state is not ACTIVE])
def test_only_an_active_engine_takes_requests(state: EngineState) -> None:
    requests, engine = intake()
    requests.deliver([submit("a", "x")])
    (rejected,) = requests.take(state, 1)
    assert (rejected.status, rejected.retryable, engine.calls) == (503, True, [])


def test_resumed_requests_are_counted_by_epoch() -> None:
    requests, _ = intake()
    replay = Replay(prompt_ids=(1,), output_ids=(2,), delivered_chars=1)
    requests.deliver([Submit(rid="a", epoch=1, sampling=submit("a", "x").sampling, replay=replay)])
    requests.deliver([submit("b", "x")])
    requests.take(ACTIVE, 1)
    assert requests.resumed == 1
    requests.begin()
    assert requests.resumed == 0


def test_a_rejection_by_the_engine_ends_the_request() -> None:
    requests, _ = intake()
    requests.deliver([submit("a", "x")])
    requests.take(ACTIVE, 1)
    refusal = Rejected(rid="a", epoch=1, status=400, message="no")
    assert requests.passing([refusal]) == [refusal]
    assert requests.live == 0


def test_a_lowered_priority_comes_back_on_every_thread_where_the_system_allows_it() -> None:
    code = (
        "import os, threading\n"
        "from shadowsup.workers.process import Priority\n"
        "nice = lambda: {os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir('/proc/self/task')}\n"
        "before = nice(); lowered = Priority.from_environment()\n"
        "done = threading.Event(); thread = threading.Thread(target=done.wait); thread.start()\n"
        "assert nice() == ({9} if lowered.lowered else before), nice()\n"
        "lowered.restore(); assert nice() == before, nice(); done.set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment(), "SHADOWSUP_NICE": "9"})


def test_kinds_that_cannot_be_had_say_so() -> None:
    for kind in ("nothing", "no_such_module:create", "os:no_such_attribute"):
        with pytest.raises(WorkerError) as caught:
            registry.factory(kind)
        assert caught.value.fatal and caught.value.hint


def test_the_engine_side_imports_without_the_supervisors_dependencies() -> None:
    code = (
        "import sys\n"
        "for name in ('psutil', 'pydantic', 'aiohttp', 'yaml', 'click', 'textual', 'torch'): sys.modules[name] = None\n"
        "import shadowsup.workers.runtime, shadowsup.workers.nursery, shadowsup.workers.main\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_bad_spec_is_words_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for argument in ("bad.json", "missing.json"):
        command = [sys.executable, "-m", "shadowsup.workers.main", str(tmp_path / argument)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        assert done.returncode == 2
        assert argument in done.stderr and "Traceback" not in done.stderr


def replayed(rid: str, staged: str) -> Submit:
    return msgspec.structs.replace(submit(rid, ""), prompt=None, replay=Replay(output_ids=(4,), delivered_chars=1, staged=staged))


def test_a_staged_prompt_is_put_into_the_replay_that_names_it_once() -> None:
    requests, engine = intake()
    seen: list[Submit] = []
    engine.submit = seen.append  # type: ignore[method-assign]
    requests.deliver([Stage(rid="a", prompt_ids=(1, 2)), Stage(rid="b", prompt_ids=(3,))])
    assert requests.take(EngineState.PARKED, 0) == []
    requests.deliver([replayed("a~1", "a"), replayed("c", "a"), Unstage(rids=("b", "unknown"))])
    (refused,) = requests.take(EngineState.ACTIVE, 1)
    (taken,) = seen
    assert taken.replay is not None
    assert (taken.rid, taken.prompt_ids, taken.replay.prompt_ids, taken.replay.staged) == ("a~1", (1, 2), (1, 2), "a")
    assert (refused.rid, refused.status, refused.retryable) == ("c", 503, True)
    assert engine.calls == [("foresee", "a"), ("foresee", "b"), ("forget", "b")]


def test_what_a_gateway_staged_goes_with_its_connection() -> None:
    requests, engine = intake()
    requests.deliver([Stage(rid="a", prompt_ids=(1,)), LinkChanged(2)])
    assert requests.take(EngineState.PARKED, 0) == []
    requests.deliver([replayed("a", "a")])
    (refused,) = requests.take(EngineState.ACTIVE, 1)
    assert refused.retryable
    assert engine.calls == [("foresee", "a"), ("forget", "a")]


class FollowedKv:
    """The KV of a parked engine, of which there is a newer set."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def replaced(self) -> object:
        return object()

    def follow_to(self, found: object) -> str:
        return "old"

    def drop(self, set_id: str) -> None:
        self.dropped.append(set_id)


def test_an_engine_that_is_promoted_as_soon_as_it_followed_gives_back_what_it_left() -> None:
    kv = FollowedKv()

    def promoted() -> None:
        assert watch.catch_up()
        watch.stop()

    watch = KvWatch(kv, promoted, ask_s=0.001)  # type: ignore[arg-type]
    watch.start()
    watch._thread.join(10)
    assert kv.dropped == ["old"]
