"""What follows from which failure, and what becomes of workers whose GPUs are in trouble. An injected clock, no GPU."""

from __future__ import annotations

import signal

import pytest
from policy_world import World

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy import severity
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.messages import GpuNotice, GpuTrouble
from shadowsup.supervisor.policy.model import NurseryState, WorkerSettings, WorkerState
from shadowsup.supervisor.policy.severity import Decision
from shadowsup.wire.engine import EngineState, Failed, Phase, Promote, Release
from shadowsup.wire.faults import CUDA_ERRORS, Fault, fault_of, fault_of_text

A, B, C = "GPU-a", "GPU-b", "GPU-c"


def world(*, gpus: tuple[str, ...] = (A,), spares: tuple[str, ...] = (), shadows: int = 1, obeys: bool = True, **more: object) -> World:
    settings = WorkerSettings(name="chat", gpus=gpus, spares=spares, shadows=shadows, hang=HangLimits(floor_s=30.0), **more)  # type: ignore[arg-type]
    return World(settings, nursery=NurseryState.READY, obeys=obeys)


def fail(w: World, engine: str, fault: Fault, **evidence: object) -> None:
    w.tell(m.Reported(Failed(engine=engine, stage="step", message="it broke", fault=fault.value, evidence=evidence)))


def xid(number: int, uuid: str = A, text: str = "", since_s: float = 0.0) -> m.GpuWarned:
    return m.GpuWarned(GpuNotice(uuid=uuid, kind=GpuTrouble.XID, number=number, text=text, since_s=since_s))


def lanes(uuid: str = A) -> m.GpuWarned:
    return m.GpuWarned(GpuNotice(uuid=uuid, kind=GpuTrouble.PCIE, number=8, text="PCIe x8 of x16"))


# --- the table --------------------------------------------------------------------------------------------------------------------


def test_every_failure_has_a_severity() -> None:
    assert set(severity.SEVERITY) == set(Fault)
    assert set(severity.TROUBLES) == set(GpuTrouble)


@pytest.mark.parametrize(
    ("text", "fault", "decision"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …", Fault.CUDA_OOM, Decision.KEEP),
        ("CUDA error: an illegal memory access was encountered", Fault.CUDA_ILLEGAL_ACCESS, Decision.KEEP),
        ("CUDA error: device-side assert triggered", Fault.CUDA_ASSERT, Decision.KEEP),
        ("CUDA error: unspecified launch failure", Fault.CUDA_LAUNCH, Decision.KEEP),
        ("CUDA error: uncorrectable ECC error encountered", Fault.CUDA_ECC, Decision.RELOAD),
        ("CUDA error: uncorrectable NVLink error detected during the execution", Fault.CUDA_NVLINK, Decision.QUARANTINE),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", Fault.CUDA_LOST, Decision.QUARANTINE),
        ("Unable to determine the device handle: GPU is lost. Reboot the system", Fault.CUDA_LOST, Decision.QUARANTINE),
        ("CUDA error: unknown error", Fault.CUDA_DRIVER, Decision.DISCARD),
        ("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", Fault.CUDA_OTHER, Decision.KEEP),
    ],
)
def test_cuda_errors_are_told_by_their_texts(text: str, fault: Fault, decision: Decision) -> None:
    assert fault_of(RuntimeError(text)) is fault
    assert severity.of(fault).decision is decision


def test_a_text_that_says_nothing_of_cuda_is_no_cuda_error() -> None:
    assert fault_of_text("list index out of range") is None
    assert fault_of(ValueError("the answer is contained in the prompt")) is Fault.EXCEPTION
    assert fault_of(MemoryError()) is Fault.HOST_OOM
    assert fault_of(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")) is Fault.HOST_OOM
    assert len({fault for fault, _, _ in CUDA_ERRORS}) == len(CUDA_ERRORS)


def test_errors_of_torch_are_told_by_their_classes() -> None:
    import torch

    assert fault_of(torch.OutOfMemoryError("Tried to allocate 2.00 GiB")) is Fault.CUDA_OOM
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None:
        assert fault_of(accelerator("something new")) is Fault.CUDA_OTHER


@pytest.mark.parametrize(
    ("status", "oom", "fault", "own"),
    [
        (-signal.SIGKILL, False, Fault.KILLED, False),
        (-signal.SIGKILL, True, Fault.OOM_KILLED, True),
        (-signal.SIGSEGV, False, Fault.SEGFAULT, True),
        (-signal.SIGABRT, False, Fault.ABORT, True),
        (-signal.SIGTERM, False, Fault.KILLED, False),
        (139, False, Fault.SEGFAULT, True),
        (0, False, Fault.EXIT, True),
        (1, False, Fault.EXIT, True),
        (3, False, Fault.LEDGER_LOST, False),
        (None, False, Fault.UNKNOWN, False),
    ],
)
def test_ends_are_told_by_status_and_signal(status: int | None, oom: bool, fault: Fault, own: bool) -> None:
    found = severity.fault_of_end(status, oom=oom)
    assert found is fault
    assert severity.of(found).own is own


def test_xids_follow_their_catalogue() -> None:
    def decision(number: int, text: str = "") -> Decision:
        return severity.of_notice(GpuNotice(uuid=A, kind=GpuTrouble.XID, number=number, text=text)).decision

    assert {decision(number) for number in (48, 64, 79, 95, 109, 119, 120, 140, 143)} == {Decision.QUARANTINE}
    assert {decision(number) for number in (13, 31, 43, 45, 63, 92)} == {Decision.NOTE}
    assert decision(94) is Decision.RELOAD
    assert decision(999) is Decision.HAND_OVER
    assert decision(154, "recovery action: GPU reset") is Decision.QUARANTINE
    assert decision(154, "recovery action: drain and reset") is Decision.HAND_OVER
    assert decision(154, "recovery action: none") is Decision.NOTE


# --- what is recorded -------------------------------------------------------------------------------------------------------------


def test_class_evidence_and_decision_are_in_the_record_of_the_recovery() -> None:
    w = world()
    w.serve()
    w.tell(xid(31, text="MMU fault"))
    fail(w, "chat.1", Fault.CUDA_OOM, batch=3, lengths=[10, 20, 30], memory={"weights": 5, "kv": 7})
    (recovery,) = w.recoveries
    assert (recovery.fault, recovery.decision) == ("cuda_oom", "restart with KV")
    assert recovery.evidence["lengths"] == [10, 20, 30]
    assert recovery.evidence["gpu"] == ["page fault of a kernel: MMU fault"]
    (verdict,) = w.announced("engine.verdict")
    assert (verdict.data["fault"], verdict.data["decision"]) == ("cuda_oom", "restart with KV")


def test_the_end_of_the_process_tells_what_its_death_alone_did_not() -> None:
    w = world(obeys=False)
    w.serve()
    w.freeze("chat.1")
    assert w.recoveries[0].fault == "unknown"
    w.gone("chat.1", -signal.SIGSEGV)
    assert (w.recoveries[0].fault, w.recoveries[0].exit) == ("segfault", "signal 11")


def test_a_status_that_comes_late_is_taken_all_the_same() -> None:
    w = world(obeys=False)
    w.serve()
    w.freeze("chat.1")
    w.bodies["chat.1"].frozen = True
    w.tell(m.Gone("chat.1", None))
    w.bodies.pop("chat.1")
    assert [death.own for death in w.policy.deaths(w.now_s)] == [None]
    w.tell(m.Explained("chat.1", -signal.SIGSEGV))
    assert [death.own for death in w.policy.deaths(w.now_s)] == [True]
    assert (w.recoveries[0].fault, w.recoveries[0].exit) == ("segfault", "signal 11")


def test_two_losses_in_a_row_have_their_causes_each() -> None:
    w = world(shadows=2, obeys=False)
    w.serve()
    w.freeze("chat.1")
    w.promoted("chat.2")
    w.freeze("chat.2")
    w.gone("chat.1", -signal.SIGSEGV)
    w.gone("chat.2", -signal.SIGABRT)
    assert [recovery.fault for recovery in w.recoveries] == ["segfault", "abort"]
    assert w.recoveries[0] in w.done


def test_deaths_are_told_with_their_causes_as_soon_as_those_are_known() -> None:
    w = world(gpus=(), obeys=False)
    w.serve()
    w.freeze("chat.1")
    (death,) = w.policy.deaths(w.now_s)
    assert (death.epoch, death.own) == (1, None)
    w.gone("chat.1", -signal.SIGABRT)
    (death,) = w.policy.deaths(w.now_s)
    assert (death.epoch, death.engine, death.fault, death.own) == (1, "chat.1", "abort", True)
    w.promoted("chat.2")
    w.tell(m.Drill("chat.2", signal.SIGSEGV))
    w.freeze("chat.2")
    w.gone("chat.2", -signal.SIGSEGV)
    assert [death.own for death in w.policy.deaths(w.now_s)] == [True, False], "a drill is nobody's fault"
    assert w.policy.deaths(w.now_s + 601.0) == ()


# --- what is done -----------------------------------------------------------------------------------------------------------------


def test_an_illegal_access_costs_no_block() -> None:
    w = world()
    w.serve()
    fail(w, "chat.1", Fault.CUDA_ILLEGAL_ACCESS)
    assert w.promotions[-1][1].keep_kv is True


def test_a_driver_that_failed_costs_the_kv() -> None:
    w = world()
    w.serve()
    fail(w, "chat.1", Fault.CUDA_DRIVER)
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=False, fenced=True))
    assert "give" in w.announced("worker.kv_dropped")[0].message


def test_a_memory_error_costs_the_kv_and_has_the_weights_verified_by_a_new_engine() -> None:
    w = world()
    w.serve()
    fail(w, "chat.1", Fault.CUDA_ECC)
    assert "chat.2" not in w.bodies, "it has mapped the same weights"
    assert w.spawns[-1].verify
    w.park("chat.3")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=2, keep_kv=False, fenced=True))
    w.promoted("chat.3")
    w.first_token("chat.3")
    assert not w.spawns[-1].verify, "once is enough"
    assert w.recoveries[0].decision == Decision.RELOAD


def test_reloading_is_capped_and_then_the_gpu_is_quarantined() -> None:
    w = world(shadows=0, spares=(B,))
    w.serve()
    for _ in range(3):
        active = w.policy.active
        assert active is not None
        fail(w, active.id, Fault.CUDA_CONTAINED)
        w.park(w.spawns[-1].engine)
        w.promoted(w.spawns[-1].engine)
        w.first_token(w.spawns[-1].engine)
    assert w.spawns[-1].gpus == (B,)
    assert w.recoveries[-1].kind == "spare"


def test_without_a_gpu_there_is_nothing_to_quarantine() -> None:
    w = world(gpus=())
    w.serve()
    fail(w, "chat.1", Fault.CUDA_LOST)
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=False, fenced=True))


def test_a_lost_gpu_is_quarantined_and_the_worker_moves_to_its_spare() -> None:
    w = world(spares=(B, C))
    w.serve()
    w.tell(m.GpuWarned(GpuNotice(uuid=B, kind=GpuTrouble.ECC, text="3 errors")))
    w.tell(xid(79, text="GPU has fallen off the bus"))
    assert m.Quarantine("xid 79", (A,), "xid 79: GPU has fallen off the bus") in w.actions
    assert sorted(w.bodies) == ["chat.3"]
    assert w.spawns[-1].gpus == (C,), "the first spare is in trouble itself"
    assert w.policy.state is WorkerState.RECOVERING
    w.park("chat.3")
    assert w.promotions[-1][0] == "chat.3" and w.promotions[-1][1].fenced
    w.promoted("chat.3")
    w.first_token("chat.3")
    w.park("chat.4")
    assert w.policy.state is WorkerState.HEALTHY
    (recovery,) = w.done
    assert (recovery.kind, recovery.fault) == ("spare", "gpu_error")
    assert w.spawns[-1].gpus == (C,)


def test_a_worker_with_a_spare_is_restarted_there_while_another_ones_process_holds_its_gpu() -> None:
    w = world(shadows=0, spares=(B,))
    w.tell(m.GpusQuarantined(frozenset({A, B}), "other.1 holds it"))
    w.run()
    assert w.policy.state is WorkerState.DOWN
    assert w.policy.refusal(m.RestartWorker(((A, "other.1 holds it"), (B, "other.1 holds it")))) is not None
    order = m.RestartWorker(((A, "other.1 holds it"),))
    assert w.policy.refusal(order) is None
    w.tell(order)
    assert w.spawns[-1].gpus == (B,)


def test_two_workers_never_move_to_one_spare() -> None:
    one, other = world(spares=(B,)), world(spares=(B, C))
    other.policy.settings.__dict__["name"] = "chat"
    one.policy.spares_taken = other.policy.spares_taken = {}
    one.serve()
    one.tell(xid(79))
    assert one.spawns[-1].gpus == (B,)
    one.policy.spares_taken[B] = "another"
    other.serve()
    other.tell(xid(79))
    assert other.spawns[-1].gpus == (C,)


def test_without_a_spare_a_quarantine_takes_the_worker_down_and_says_why() -> None:
    w = world(spares=(B,))
    w.serve()
    w.tell(xid(79, uuid=B))
    assert w.policy.state is WorkerState.HEALTHY, "only its spare is gone"
    w.tell(xid(48, text="DBE"))
    assert w.policy.state is WorkerState.DOWN
    assert "xid 48: DBE" in w.policy.reason and "no spare is left" in w.policy.reason
    w.tell(m.RestartWorker())
    assert w.spawns[-1].engine == "chat.3", "the operator says that it is well again"


def test_p06_a_worker_with_a_spare_goes_there_when_a_stuck_process_holds_its_gpu() -> None:
    w = world(shadows=0, spares=(B,), obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.advance(11.0)
    assert w.policy.engines["chat.1"].state is EngineState.QUARANTINED
    newest = w.spawns[-1]
    assert newest.gpus == (B,)
    w.park(newest.engine)
    assert w.promotions[-1][0] == newest.engine


def test_p06_the_quarantine_is_lifted_when_the_stuck_process_ends_after_all() -> None:
    w = world(shadows=0, obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.advance(11.0)
    for name in list(w.bodies):
        if name != "chat.1":
            w.bodies[name].frozen = True
            w.gone(name)
    assert w.policy.state is WorkerState.DOWN
    w.bodies["chat.1"].frozen = True
    w.gone("chat.1")
    assert m.Unquarantine("chat.1") in w.actions
    spawns = len(w.spawns)
    w.tell(m.GpusReleased(frozenset({A})))
    assert len(w.spawns) == spawns + 1
    assert w.policy.state is not WorkerState.DOWN


# --- warnings ---------------------------------------------------------------------------------------------------------------------


def test_a_warning_that_passes_changes_nothing() -> None:
    w = world()
    w.serve()
    w.tell(lanes())
    w.advance(1.4)
    w.tell(m.GpuCleared(A, GpuTrouble.PCIE))
    w.advance(10.0)
    assert w.policy.paused_s is None
    assert w.sent(Release) == []


def test_a_warning_that_lasts_pauses_admission_lets_requests_finish_and_hands_over_as_planned() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.beat("chat.1", phase=Phase.DECODE, step=1)
    w.tell(lanes())
    w.advance(1.6)
    assert w.policy.paused_s is not None
    assert w.announced("worker.paused")
    for step in range(20):
        w.beat("chat.1", phase=Phase.DECODE, step=2 + step)
        w.advance(0.2)
    assert w.sent(Release) == [], "they run"
    w.bodies["chat.1"].inflight = 0
    w.beat("chat.1", phase=Phase.IDLE)
    w.advance(0.3)
    assert w.sent(Release) == [m.Send("chat.1", Release())]
    assert w.promotions[-1][0] == "chat.2"
    assert w.policy.paused_s is not None, "until somebody serves"
    w.promoted("chat.2")
    assert w.policy.paused_s is None
    assert w.recoveries[-1].cause == "planned hand-over: its GPU is in trouble"
    w.first_token("chat.2")
    w.park("chat.3")
    for _ in range(50):
        w.advance(1.0)
        for engine in ("chat.2", "chat.3"):
            w.beat(engine, phase=Phase.PARKED if engine == "chat.3" else Phase.IDLE)
    assert len(w.sent(Release)) == 1, "once for each trouble"


def test_requests_that_do_not_finish_are_taken_along() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.tell(lanes())
    for step in range(170):
        w.beat("chat.1", phase=Phase.DECODE, step=step)
        w.beat("chat.2", phase=Phase.PARKED)
        w.advance(0.2)
        if w.sent(Release):
            break
    assert 31.0 <= w.now_s - 1000.5 <= 32.5


def test_a_warned_worker_with_a_spare_moves_there() -> None:
    w = world(spares=(B,))
    w.serve()
    w.tell(lanes())
    w.advance(1.6)
    w.advance(0.6)
    w.beat("chat.1", phase=Phase.IDLE)
    w.advance(0.3)
    assert "chat.2" not in w.bodies, "it is on the device in trouble"
    assert w.spawns[-1].gpus == (B,)
    w.park(w.spawns[-1].engine)
    w.promoted(w.spawns[-1].engine)
    assert w.recoveries[-1].kind == "spare"
    assert w.policy.paused_s is None


def test_with_nobody_to_hand_over_to_the_service_goes_on() -> None:
    w = world(shadows=0)
    w.serve()
    w.tell(lanes())
    w.advance(20.0)
    assert w.policy.paused_s is None
    assert w.sent(Release) == []


def test_a_pause_of_admission_ends_when_nobody_is_left_to_hand_over_to() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.beat("chat.1", phase=Phase.DECODE)
    w.tell(lanes())
    w.advance(2.0)
    assert w.policy.paused_s is not None
    w.fail("chat.2", "no such kernel", fatal=True)
    assert w.policy.shadow_reason and w.policy.state is WorkerState.DEGRADED
    assert w.policy.paused_s is None, "new requests would wait for ever beside an engine that serves"
    assert "nobody to hand over to" in w.announced("worker.resumed")[-1].message
    w.tell(m.RestartWorker())
    w.park("chat.3")
    assert w.policy.paused_s is not None, "it is still to be done"


def test_a_lost_gpu_stays_out_of_use_when_the_process_that_was_stuck_on_it_ends_after_all() -> None:
    w = world(shadows=0, obeys=False)
    w.serve()
    fail(w, "chat.1", Fault.CUDA_LOST)
    w.advance(11.0)
    assert w.policy.engines["chat.1"].state is EngineState.QUARANTINED
    w.gone("chat.1")
    held = {a.engine for a in w.actions if isinstance(a, m.Quarantine)}
    ended = {a.engine for a in w.actions if isinstance(a, m.Unquarantine)}
    assert held - ended, "its process was one reason, the device is the other"


# --- memory that is in doubt, and nobody died -------------------------------------------------------------------------------------


def quiet(w: World, engine: str) -> None:
    """Until the pause of admission is over, with nothing in flight."""
    w.advance(2.2)
    w.beat(engine, phase=Phase.IDLE)
    w.advance(0.3)


def test_a_memory_error_that_ended_nobody_costs_kv_and_weights_all_the_same() -> None:
    w = world()
    w.serve()
    w.tell(xid(94, text="contained"))
    quiet(w, "chat.1")
    assert w.sent(Release) == [m.Send("chat.1", Release())], "its requests ended in order"
    assert "chat.2" not in w.bodies, "it has mapped the same weights"
    assert w.spawns[-1].engine == "chat.3" and w.spawns[-1].verify
    w.park("chat.3")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=2, keep_kv=False, fenced=True))
    w.promoted("chat.3")
    w.first_token("chat.3")
    assert w.policy.paused_s is None
    assert w.recoveries[-1].decision == Decision.RELOAD
    w.park(w.spawns[-1].engine)
    for _ in range(20):
        w.advance(1.0)
        w.beat("chat.3", phase=Phase.IDLE)
        w.beat("chat.4", phase=Phase.PARKED)
    assert len(w.sent(Release)) == 1, "once for each error"


def test_memory_in_doubt_is_left_also_where_nobody_could_take_over() -> None:
    w = world(shadows=0)
    w.serve()
    w.tell(xid(94))
    quiet(w, "chat.1")
    assert w.spawns[-1].engine == "chat.2" and w.spawns[-1].verify
    w.park("chat.2")
    assert w.promotions[-1][1].keep_kv is False


def test_an_operators_hand_over_does_not_save_memory_that_is_in_doubt() -> None:
    w = world()
    w.serve()
    w.tell(xid(94))
    w.tell(m.FailOver())
    assert "chat.2" not in w.bodies
    w.park("chat.3")
    assert w.spawns[-1].verify and w.promotions[-1] == ("chat.3", Promote(epoch=2, keep_kv=False, fenced=True))


def test_a_death_while_requests_are_let_finish_does_not_save_it_either() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 1
    w.tell(xid(94))
    for step in range(75):
        w.beat("chat.1", phase=Phase.DECODE, step=step)
        w.beat("chat.2", phase=Phase.PARKED)
        w.advance(0.2)
    w.die("chat.1")
    w.park("chat.3")
    assert w.spawns[-1].verify and w.promotions[-1][1].keep_kv is False


def test_an_engine_that_does_not_leave_in_time_leaves_no_more_than_others() -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(xid(94))
    quiet(w, "chat.1")
    w.advance(33.0)
    assert m.KillTree("chat.1") in w.actions
    w.gone("chat.2")
    w.freeze("chat.1")
    w.gone("chat.1")
    w.park(w.spawns[-1].engine)
    assert w.spawns[-1].verify and w.promotions[-1][1].keep_kv is False


def test_the_driver_telling_late_what_an_engine_died_of_costs_nothing_twice() -> None:
    w = world()
    w.serve()
    fail(w, "chat.1", Fault.CUDA_CONTAINED)
    w.tell(xid(94))
    w.park("chat.3")
    w.promoted("chat.3")
    w.first_token("chat.3")
    w.park("chat.4")
    quiet(w, "chat.3")
    assert w.sent(Release) == [] and w.policy.paused_s is None


def test_memory_errors_that_come_again_are_answered_again_and_end_in_a_quarantine() -> None:
    w = world(shadows=0, spares=(B,), gpus=(A,))
    w.tell(m.GpuWarned(GpuNotice(uuid=B, kind=GpuTrouble.ECC, text="busy")))  # nowhere to go
    w.serve()
    for _ in range(2):
        active = w.policy.active
        assert active is not None
        w.tell(xid(94))
        quiet(w, active.id)
        newest = w.spawns[-1].engine
        assert newest != active.id
        w.park(newest)
        w.promoted(newest)
        w.first_token(newest)
    w.tell(m.GpuCleared(B))
    active = w.policy.active
    assert active is not None
    w.tell(m.GpuWarned(GpuNotice(uuid=B, kind=GpuTrouble.ECC, text="busy")))
    w.tell(xid(94))
    quiet(w, active.id)
    assert A in w.policy.quarantined


# --- what outlives the supervisor -------------------------------------------------------------------------------------------------


def test_memory_that_was_given_up_is_not_taken_by_the_engine_that_another_supervisor_promotes() -> None:
    w = world()
    w.serve()
    fail(w, "chat.1", Fault.CUDA_ECC)
    assert w.spawns[-1].verify
    w.lose_the_supervisor()
    w.park("chat.3")
    assert w.promotions[-1][0] == "chat.3" and w.promotions[-1][1].keep_kv is False


def test_an_xid_that_nothing_was_done_about_is_not_forgotten() -> None:
    w = world()
    w.serve()
    w.tell(xid(94))
    w.lose_the_supervisor()
    w.beat("chat.1", phase=Phase.IDLE)
    w.beat("chat.2", phase=Phase.PARKED)
    quiet(w, "chat.1")
    assert w.sent(Release) == [m.Send("chat.1", Release())]
    assert w.spawns[-1].verify


def test_reloads_and_deaths_are_counted_on() -> None:
    w = world(shadows=0, spares=(B,), obeys=True)
    w.serve()
    for _ in range(2):
        active = w.policy.active
        assert active is not None
        fail(w, active.id, Fault.CUDA_CONTAINED)
        w.park(w.spawns[-1].engine)
        w.promoted(w.spawns[-1].engine)
        w.first_token(w.spawns[-1].engine)
    deaths = w.policy.deaths(w.now_s)
    w.lose_the_supervisor()
    assert w.policy.deaths(w.now_s) == deaths and len(deaths) == 2
    active = w.policy.active
    assert active is not None
    fail(w, active.id, Fault.CUDA_CONTAINED)
    assert w.spawns[-1].gpus == (B,), "the third time"
    # Nothing of it runs while it is on its spare and another supervisor comes.
    w.obeys = False
    w.die(w.spawns[-1].engine)
    w.bodies.clear()
    w.lose_the_supervisor()
    assert w.policy.gpus == (B,)
