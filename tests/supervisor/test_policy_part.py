"""The policy of scribe, keeper, nursery and gateway, driven without I/O."""

from __future__ import annotations

from shadowsup.supervisor.policy.part import Do, PartPolicy, PartSettings, PartState


def part(**settings: object) -> PartPolicy:
    return PartPolicy(PartSettings(name="keeper", **settings))  # type: ignore[arg-type]


def test_a_dead_part_is_replaced_at_once_and_then_with_growing_pauses() -> None:
    p = part(backoff_s=(0.0, 1.0, 4.0))
    assert p.want(0.0) == [Do.SPAWN]
    assert p.state is PartState.STARTING
    assert p.ready(1.0) == []
    assert p.state is PartState.RUNNING
    assert p.ended(2.0, "signal 9") == [Do.SPAWN]
    assert p.ended(3.0, "status 1") == []
    assert (p.state, p.deadline_s) == (PartState.BACKOFF, 4.0)
    assert p.tick(3.9) == []
    assert p.tick(4.0) == [Do.SPAWN]
    assert p.ended(5.0, "status 1") == []
    assert p.deadline_s == 9.0
    assert p.reason == "status 1"


def test_a_part_that_was_well_starts_the_count_anew() -> None:
    p = part(healthy_after_s=10.0, backoff_s=(0.0, 60.0))
    p.want(0.0)
    for start_s in (0.0, 100.0, 200.0):
        p.ready(start_s + 1.0)
        assert p.ended(start_s + 20.0, "signal 9") == [Do.SPAWN]
    assert p.restarts == 3


def test_one_that_does_not_become_ready_is_killed_and_replaced() -> None:
    p = part(ready_s=20.0)
    p.want(0.0)
    assert p.tick(19.9) == []
    assert p.tick(20.0) == [Do.KILL]
    assert p.ended(20.1, "signal 9") == [Do.SPAWN]


def test_the_desired_state_wins_over_the_restart() -> None:
    p = part(backoff_s=(5.0,))
    p.want(0.0)
    p.ended(1.0, "status 1")
    assert p.state is PartState.BACKOFF
    assert p.release(2.0) == []
    assert p.state is PartState.STOPPED
    assert p.tick(100.0) == []


def test_the_end_of_one_that_shall_stop_is_not_answered_by_a_start() -> None:
    p = part()
    p.want(0.0)
    p.ready(1.0)
    p.release(2.0)
    assert p.state is PartState.STOPPING
    assert p.ended(3.0, "status 0") == []
    assert p.state is PartState.STOPPED


def test_the_ready_of_a_process_that_is_gone_is_ignored() -> None:
    p = part(backoff_s=(5.0,))
    p.want(0.0)
    p.ended(1.0, "signal 9")
    p.ready(1.1)
    assert p.state is PartState.BACKOFF
