"""What keeps a GPU out of use, and what workers are told of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.wire.sensor import GpuReading

A, B = "GPU-a", "GPU-b"


class Owner:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.policy = SimpleNamespace(engines={})

    def put(self, event: Any) -> None:
        self.events.append(event)


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
    made.quarantine((A,), "xid 48", "DBE")
    made.forgive()
    assert made.held() == ((A, "stuck"),)
    assert [gpu["state"] for gpu in made.gpus] == ["quarantined", "ok"]
    journal.close()


def test_a_slot_of_eight_lanes_has_lost_none(tmp_path: Path) -> None:
    made, _, journal = desk(tmp_path)
    made.saw([GpuReading(uuid=A, pcie_width=8, pcie_width_max=16), GpuReading(uuid=B)])
    assert not made.is_loss(m.GpuNotice(uuid=A, kind=m.GpuTrouble.PCIE, number=8))
    assert made.is_loss(m.GpuNotice(uuid=A, kind=m.GpuTrouble.PCIE, number=4))
    assert made.is_loss(m.GpuNotice(uuid=A, kind=m.GpuTrouble.ECC, number=1))
    journal.close()
