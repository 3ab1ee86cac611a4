"""What keeps a GPU out of use, and what workers are told of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import WorkerSettings
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.registry import Registry
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
    registry = Registry(tmp_path / "processes.json")
    registry.resume()
    return GpuDesk(gpus, {"chat": owner}, journal, registry), owner, journal  # type: ignore[dict-item]


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


def test_another_supervisor_goes_on_with_what_is_quarantined_and_why(tmp_path: Path) -> None:
    made, owner, journal = desk(tmp_path)
    owner.policy.engines = {"chat.1": object(), "chat.2": object()}
    made.quarantine((A,), "chat.1", "stuck")
    made.quarantine((A,), "chat.2", "stuck too")
    made.quarantine((B,), "xid 79", "off the bus")
    journal.close()
    successor, owner, journal = desk(tmp_path)
    successor.resume({"chat.1"})  # the other one has ended meanwhile
    assert [(gpu["state"], gpu["reason"]) for gpu in successor.gpus] == [("quarantined", "stuck"), ("quarantined", "off the bus")]
    policy = WorkerPolicy(WorkerSettings(name="late", gpus=(B,)))
    successor.introduce(policy)
    policy.handle(m.RunWorker(), 1.0)
    assert "off the bus" in policy.reason
    # Something else is recorded before its engine is known to the successor.
    successor.quarantine((B,), "xid 64", "no row is left")
    third, _, other = desk(tmp_path)
    third.resume(())
    assert [gpu["state"] for gpu in third.gpus] == ["ok", "quarantined"], "who held it is gone"
    owner.policy.engines = {"chat.1": object()}
    successor.forgive()
    assert [gpu["state"] for gpu in successor.gpus] == ["quarantined", "ok"]
    successor.release("chat.1")
    assert [gpu["state"] for gpu in successor.gpus] == ["ok", "ok"]
    journal.close()
    other.close()
