"""The beat thread against a real ROUTER."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_world import PATIENCE_S, Supervisor

from shadowsup.wire.engine import Beat, EngineState, Fenced, Order, Phase, Stop
from shadowsup.workers.heartbeat import Heart, Vitals

LOADING = Vitals(state=EngineState.LOADING, phase=Phase.LOADING)
PARKED = Vitals(state=EngineState.PARKED, phase=Phase.PARKED)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(str(tmp_path / "beat.sock"))
    yield made
    made.close()


class Beating:
    def __init__(self, endpoint: str, interval_s: float) -> None:
        self.orders: queue.Queue[Order] = queue.Queue()
        self.heart = Heart(engine="chat.1", endpoint=endpoint, interval_s=interval_s, vitals=LOADING, on_order=self.orders.put)
        self.heart.start()


def beat(report: object) -> bool:
    return isinstance(report, Beat)


def stopped(heart: Heart) -> float:
    """Stop ``heart``; return how long that took. Its thread is gone then."""
    started = time.monotonic()
    heart.stop()
    assert "heart" not in {thread.name for thread in threading.enumerate()}
    return time.monotonic() - started


def test_a_change_of_state_does_not_wait_for_the_next_beat(supervisor: Supervisor) -> None:
    beating = Beating(supervisor.endpoint, interval_s=3600.0)
    assert supervisor.expect(beat).state is EngineState.LOADING
    beating.heart.update(PARKED)
    assert supervisor.expect(beat).state is EngineState.PARKED
    beating.heart.report(Fenced(engine="chat.1", epoch=1, reserve=2))
    assert supervisor.expect(lambda report: isinstance(report, Fenced)).reserve == 2
    stopped(beating.heart)


def test_orders_are_handed_over_and_nonsense_is_survived(supervisor: Supervisor) -> None:
    beating = Beating(supervisor.endpoint, interval_s=0.05)
    supervisor.expect(beat)
    assert supervisor._router is not None
    supervisor._router.send_multipart([b"chat.1", b"\xc1"])
    supervisor.order("chat.1", Stop())
    assert beating.orders.get(timeout=PATIENCE_S) == Stop()
    stopped(beating.heart)


def test_a_supervisor_that_was_away_gets_one_fresh_beat_and_every_report(supervisor: Supervisor) -> None:
    beating = Beating(supervisor.endpoint, interval_s=0.01)
    supervisor.expect(beat)
    supervisor.close_socket()
    beating.heart.report(Fenced(engine="chat.1", epoch=7, reserve=1))
    beating.heart.update(PARKED)
    back = time.monotonic()
    supervisor.open()
    first = supervisor.expect(beat)
    assert first.sent_s >= back and first.state is EngineState.PARKED, "no burst of stale beats"
    assert supervisor.expect(lambda report: isinstance(report, Fenced)).epoch == 7
    stopped(beating.heart)


def test_stops_in_bounded_time_with_and_without_a_supervisor(supervisor: Supervisor) -> None:
    beating = Beating(supervisor.endpoint, interval_s=0.05)
    supervisor.expect(beat)
    assert stopped(beating.heart) < 10.0
    supervisor.close_socket()
    beating = Beating(supervisor.endpoint, interval_s=0.05)
    assert stopped(beating.heart) < 10.0
    beating.heart.stop()
