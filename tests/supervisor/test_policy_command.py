"""A command worker's policy, and the accounting of restarts, driven without I/O."""

from __future__ import annotations

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.model import WorkerSettings, WorkerState
from shadowsup.supervisor.policy.restart import RestartBook
from shadowsup.supervisor.policy.rollout import Stage
from shadowsup.wire.engine import EngineState


def policy(**settings: object) -> CommandPolicy:
    return CommandPolicy(WorkerSettings(name="web", shadows=0, **settings))  # type: ignore[arg-type]


def started(p: CommandPolicy, now_s: float) -> str:
    """Spawn what the policy asked for."""
    engine = next(reversed(p.engines))
    p.handle(m.Spawned(engine, 100), now_s)
    return engine


def test_it_serves_when_its_probe_answers_and_not_before() -> None:
    p = policy()
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.1)
    assert p.state is WorkerState.STARTING
    assert p.upstream == ""
    actions = p.handle(m.Ready(engine, "http://127.0.0.1:9"), 1.0)
    assert p.state is WorkerState.HEALTHY
    assert p.upstream == "http://127.0.0.1:9"
    assert any(isinstance(a, m.PublishRoutes) for a in actions)


def test_a_death_takes_the_upstream_away_and_a_new_process_waits_for_the_end_of_the_old_tree() -> None:
    p = policy()
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Ready(engine, "http://a"), 1.0)
    actions = p.handle(m.Died(engine, -9, frozen=True), 100.0)
    assert p.upstream == ""
    assert p.state is WorkerState.RECOVERING
    assert m.KillTree(engine) in actions
    assert not any(isinstance(a, m.Spawn) for a in actions), "the port is not free before the whole tree is gone"
    actions = p.handle(m.Gone(engine, -9), 100.1)
    assert any(isinstance(a, m.Spawn) for a in actions)


def test_p06_nothing_is_started_onto_a_gpu_that_its_old_tree_still_holds() -> None:
    p = policy(gpus=("GPU-1",))
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Ready(engine, "http://a"), 1.0)
    p.handle(m.Died(engine, -9, frozen=True), 100.0)
    actions = p.handle(m.Tick(), 111.0)
    assert m.Quarantine(engine, ("GPU-1",), f"{engine}, a process that cannot be killed, holds it") in actions
    assert not any(isinstance(a, m.Spawn) for a in actions)
    assert p.state is WorkerState.DOWN
    assert "GPU-1 is quarantined" in p.reason
    assert not any(isinstance(a, m.Spawn) for a in p.handle(m.RestartWorker(), 112.0)), "it is there still"
    p.handle(m.Gone(engine, -9), 113.0)
    assert any(isinstance(a, m.Spawn) for a in p.handle(m.RestartWorker(), 114.0))


def test_p06_a_gpu_that_another_worker_lost_is_not_used_either() -> None:
    p = policy(gpus=("GPU-1",))
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Ready(engine, "http://a"), 1.0)
    p.handle(m.GpusQuarantined(frozenset({"GPU-1"})), 2.0)
    assert p.state is WorkerState.HEALTHY, "what serves there goes on"
    p.handle(m.Died(engine, -9, frozen=True), 100.0)
    assert not any(isinstance(a, m.Spawn) for a in p.handle(m.Gone(engine, -9), 100.1))
    assert p.state is WorkerState.DOWN
    held = (("GPU-1", "other.3 holds it"),)
    refused = p.refusal(m.RestartWorker(held))
    assert refused is not None and "other.3 holds it" in refused[0]
    assert not any(isinstance(a, m.Spawn) for a in p.handle(m.RestartWorker(held), 101.0))
    assert any(isinstance(a, m.Spawn) for a in p.handle(m.RestartWorker(), 102.0)), "it has failed, and is well again"


def test_p11_it_backs_off_and_goes_down_with_its_last_output() -> None:
    p = policy(backoff_s=(0.0, 1.0, 2.0), max_failures=3)
    p.handle(m.RunWorker(), 0.0)
    now_s = 0.0
    spawns = 1
    while p.state is not WorkerState.DOWN:
        engine = started(p, now_s)
        p.handle(m.Died(engine, 1, frozen=True), now_s)
        p.handle(m.Gone(engine, 1, ("no such module",)), now_s)
        if p.state is WorkerState.BACKOFF:
            now_s = p.deadline_s
            p.handle(m.Tick(), now_s)
        spawns += p.state is not WorkerState.DOWN
    assert spawns == 4
    assert now_s == 3.0
    assert "no such module" in p.reason


def test_p13_a_stop_during_backoff_sticks() -> None:
    p = policy(backoff_s=(5.0,))
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Gone(engine, 1), 0.1)
    assert p.state is WorkerState.BACKOFF
    p.handle(m.StopWorker(), 1.0)
    assert p.state is WorkerState.STOPPED
    assert not any(isinstance(a, m.Spawn) for a in p.handle(m.Tick(), 100.0))


def test_a_program_that_does_not_exist_counts_as_a_failed_start() -> None:
    p = policy(backoff_s=(0.0,), max_failures=1)
    actions = p.handle(m.RunWorker(), 0.0)
    for now_s in (0.1, 0.2):
        spawn = next(a for a in actions if isinstance(a, m.Spawn))
        actions = p.handle(m.SpawnFailed(spawn.engine, spawn.how, "there is no program x"), now_s)
    assert p.state is WorkerState.DOWN
    assert "there is no program x" in p.reason


def test_one_that_is_never_ready_is_killed() -> None:
    p = policy(startup_s=60.0)
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    assert p.deadline_s == 60.0
    assert m.KillTree(engine) in p.handle(m.Tick(), 60.0)
    assert "not ready within 60 s" in p.last_failure


def test_stop_sends_the_signal_at_once_then_kills() -> None:
    p = policy(stop_signal=2, stop_timeout_s=3.0)
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Ready(engine, "http://a"), 1.0)
    assert m.Signal(engine, 2) in p.handle(m.StopWorker(), 10.0)
    assert p.upstream == ""
    assert m.KillTree(engine) in p.handle(m.Tick(), 13.0)
    p.handle(m.Tick(), 23.0)
    assert p.engines[engine].state is EngineState.QUARANTINED
    assert p.settled


def test_restart_replaces_the_process() -> None:
    p = policy()
    p.handle(m.RunWorker(), 0.0)
    engine = started(p, 0.0)
    p.handle(m.Ready(engine, "http://a"), 1.0)
    p.handle(m.RestartWorker(), 2.0)
    actions = p.handle(m.Gone(engine, 0), 2.5)
    assert [a.engine for a in actions if isinstance(a, m.Spawn)] == ["web.2"]
    assert p.last_failure == ""


def test_a_failover_is_refused() -> None:
    refusal = policy().refusal(m.FailOver())
    assert refusal is not None and "no shadow" in refusal[0]


def test_the_restarts_are_counted_in_a_sliding_window() -> None:
    book = RestartBook((0.0, 1.0, 5.0), max_failures=2, window_s=10.0)
    waits = []
    for now_s in (0.0, 1.0, 2.0):
        book.failed(now_s)
        waits.append(book.not_before_s - now_s)
    assert waits == [0.0, 1.0, 5.0]
    assert book.exhausted(2.0)
    assert not book.exhausted(11.0)
    book.reset()
    assert book.in_a_row == 0


def rolling(p: CommandPolicy) -> str:
    """From serving to a process with new settings that is not ready yet."""
    p.handle(m.RunWorker(), 0.0)
    old = started(p, 0.0)
    p.handle(m.Ready(old, "http://old"), 1.0)
    p.handle(m.RollOut(WorkerSettings(name="web", shadows=0, revision="new")), 2.0)
    assert p.upstream == "http://old" and p.rollout is not None and p.rollout.stage is Stage.READY
    p.handle(m.CommitRollOut(), 3.0)
    assert p.upstream == ""
    p.handle(m.Died(old, 0, frozen=True), 3.1)
    p.handle(m.Gone(old, 0), 3.2)
    new = started(p, 3.3)
    assert p.engines[new].revision == "new"
    return new


def test_new_settings_follow_the_end_of_the_old_process() -> None:
    p = policy()
    new = rolling(p)
    p.handle(m.Ready(new, "http://new"), 4.0)
    assert p.rollout is not None and p.rollout.stage is Stage.PROVEN
    p.handle(m.FinishRollOut(), 4.1)
    assert p.rollout.stage is Stage.DONE and p.settings.revision == "new" and p.upstream == "http://new"


def test_new_settings_that_never_serve_are_taken_back_with_the_last_output_as_the_reason() -> None:
    p = policy()
    new = rolling(p)
    p.handle(m.Died(new, 1, frozen=True), 4.0)
    p.handle(m.Gone(new, 1, ("no such option --nonsense",)), 4.1)
    old = started(p, 4.2)
    assert p.engines[old].revision == "" and p.state is not WorkerState.BACKOFF
    p.handle(m.Ready(old, "http://old"), 5.0)
    assert p.rollout is not None and p.rollout.stage is Stage.FAILED
    assert "--nonsense" in p.rollout.reason and p.upstream == "http://old"


def test_a_gpu_that_comes_back_brings_a_command_back_and_failed_starts_outlive_a_supervisor() -> None:
    p = policy(gpus=("GPU-1",), backoff_s=(3.0,), max_failures=1)
    p.handle(m.GpusQuarantined(frozenset({"GPU-1"}), "off the bus"), 0.0)
    p.handle(m.RunWorker(), 1.0)
    assert p.state is WorkerState.DOWN and "off the bus" in p.reason
    assert p.past.down == "", "the quarantine is recorded by itself"
    assert any(isinstance(a, m.Spawn) for a in p.handle(m.GpusReleased(frozenset({"GPU-1"})), 2.0))
    (engine,) = p.engines
    p.handle(m.Died(engine, 1, frozen=True), 3.0)
    p.handle(m.Gone(engine, 1), 3.0)
    successor = policy(gpus=("GPU-1",), backoff_s=(3.0,), max_failures=1)
    assert not any(isinstance(a, m.Spawn) for a in successor.handle(m.Adopt(seq=1, past=p.past), 4.0))
    assert successor.state is WorkerState.BACKOFF and successor.reason == p.reason
    assert any(isinstance(a, m.Spawn) for a in successor.handle(m.Tick(), 6.0))
    (engine,) = successor.engines
    successor.handle(m.Died(engine, 1, frozen=True), 7.0)
    successor.handle(m.Gone(engine, 1), 7.0)
    assert successor.state is WorkerState.DOWN
    third = policy(gpus=("GPU-1",))
    third.handle(m.Adopt(seq=2, past=successor.past), 8.0)
    assert (third.state, third.reason) == (WorkerState.DOWN, successor.reason)
