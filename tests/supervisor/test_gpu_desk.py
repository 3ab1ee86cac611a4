"""Between sensor and policies: what a worker's owner is told, and what keeps a GPU out of use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading

A, B = "GPU-a", "GPU-b"


class Owner:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.used: list[tuple[str, float | None]] = []
        self.policy = SimpleNamespace(engines={})

    def put(self, event: Any) -> None:
        self.events.append(event)

    def gpu_used(self, uuid: str, util: float | None) -> None:
        self.used.append((uuid, util))


def desk(tmp_path: Path) -> tuple[GpuDesk, Owner, Journal]:
    owner, journal = Owner(), Journal(tmp_path / "events.jsonl")
    gpus: list[dict[str, Any]] = [{"uuid": uuid, "index": index, "state": "ok"} for index, uuid in enumerate((A, B))]
    return GpuDesk(gpus, {"chat": owner}, journal), owner, journal  # type: ignore[dict-item]


def test_a_gpu_is_in_use_again_when_the_last_reason_is_gone(tmp_path: Path) -> None:
    made, owner, journal = desk(tmp_path)
    made.quarantine((A,), "chat.1", "stuck")
    made.quarantine((A, B), "xid 79", "off the bus")
    made.quarantine((A,), "chat.1", "stuck")
    assert owner.events == [m.GpusQuarantined(frozenset({A}), "stuck"), m.GpusQuarantined(frozenset({A, B}), "off the bus")]
    assert [gpu["state"] for gpu in made.gpus] == ["quarantined", "quarantined"]
    assert made.gpus[0]["reason"] == "stuck; off the bus"
    owner.events.clear()
    made.release("chat.1")
    assert owner.events == []
    made.release("xid 79")
    assert owner.events == [m.GpusReleased(frozenset({A, B}))]
    assert made.gpus[0] == {"uuid": A, "index": 0, "state": "ok"}
    made.release("nobody")
    journal.close()


def test_an_operator_forgives_errors_but_no_process_that_still_holds_a_gpu(tmp_path: Path) -> None:
    made, owner, journal = desk(tmp_path)
    owner.policy.engines = {"chat.1": object()}
    made.quarantine((A,), "chat.1", "stuck")
    made.quarantine((B,), "xid 48", "DBE")
    made.forgive()
    assert [gpu["state"] for gpu in made.gpus] == ["quarantined", "ok"]
    journal.close()


def test_news_become_notices_and_the_end_of_warnings_is_told(tmp_path: Path) -> None:
    made, owner, journal = desk(tmp_path)
    made.news(GpuNews(uuid=A, kind=GpuNewsKind.ECC, number=3, text="3 more", at_s=5.0))
    made.news(GpuNews(uuid=A, kind=GpuNewsKind.RECOVERY, number=1, text="GPU reset", at_s=6.0))
    assert owner.events == [
        m.GpuWarned(m.GpuNotice(uuid=A, kind=m.GpuTrouble.ECC, text="3 more", since_s=5.0)),
        m.GpuWarned(m.GpuNotice(uuid=A, kind=m.GpuTrouble.XID, number=154, text="GPU reset", since_s=6.0)),
    ]
    owner.events.clear()
    made.readings([GpuReading(uuid=A, util=40, warnings=("rising",)), GpuReading(uuid=B)])
    assert owner.events == []
    assert owner.used == [(A, 0.4), (B, None)]
    made.readings([GpuReading(uuid=A, util=0)])
    assert {event.kind for event in owner.events} == {m.GpuTrouble.ECC, m.GpuTrouble.PCIE, m.GpuTrouble.LOST}
    assert [event["event"] for event in (vars_of(each) for each in journal.since(None))] == ["gpu.ecc", "gpu.recovery"]
    journal.close()


def vars_of(event: Any) -> dict[str, Any]:
    return {"event": event.event}


def test_a_slot_of_eight_lanes_has_lost_none(tmp_path: Path) -> None:
    made, owner, journal = desk(tmp_path)
    made.readings([GpuReading(uuid=A, pcie_width=8, pcie_width_max=16, warnings=("x8",))])
    made.news(GpuNews(uuid=A, kind=GpuNewsKind.PCIE, number=8, text="x8 of x16", at_s=1.0))
    assert owner.events == []
    made.news(GpuNews(uuid=A, kind=GpuNewsKind.PCIE, number=4, text="x4 of x16", at_s=2.0))
    assert len(owner.events) == 1
    journal.close()
