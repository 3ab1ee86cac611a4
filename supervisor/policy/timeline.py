"""The timeline of one failover, as it happens."""

from __future__ import annotations

from shadowsup.supervisor.policy.model import EngineRecord, RecoveryKind
from shadowsup.supervisor.protocol import Recovery
from shadowsup.wire.engine import FirstToken, Promoted


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)


class Timeline:
    """From the verdict over an active engine to the refilled shadow. All arguments are monotonic seconds.

    ``recovery`` is what is shown and stored; ``n`` and ``ts`` are given by whoever numbers the recoveries of the node.
    """

    def __init__(self, worker: str, old: EngineRecord, epoch: int, now_s: float, *, wants_refill: bool, gpus: tuple[str, ...] = ()) -> None:
        self.verdict_s = now_s
        self.served = False
        """The successor has sent a token, or has been active long enough that there is plainly nothing to send."""
        self.old = old.id
        self._wants_refill = wants_refill
        self._gpus = gpus
        self.fenced = False
        self.refilled = not wants_refill
        sign_s = old.sign_s or old.vitals.last_sign_s()
        self.recovery = Recovery(
            n=0,
            worker=worker,
            kind=RecoveryKind.COLD.value,
            cause=old.cause,
            ts=0.0,
            epoch=epoch,
            from_engine=old.id,
            detect_ms=_ms(now_s - sign_s) if sign_s else None,
        )
        self.learn(old)

    def learn(self, old: EngineRecord) -> None:
        """Take what is known now of the end of the lost engine."""
        self.recovery.exit = old.exit
        self.recovery.fault = old.fault.value
        self.recovery.decision = old.decision
        self.recovery.evidence = dict(old.evidence)

    @property
    def done(self) -> bool:
        return self.served and self.fenced and self.refilled

    def frozen(self, now_s: float) -> None:
        if self.recovery.freeze_ms is None:
            self.recovery.freeze_ms = _ms(now_s - self.verdict_s)

    def ordered(self, successor: EngineRecord, epoch: int, gpus: tuple[str, ...] = ()) -> None:
        """A successor was chosen. A later rung of the same failover replaces the figures of an earlier one."""
        if gpus != self._gpus:
            kind = RecoveryKind.SPARE
        elif successor.parked_s is not None and successor.parked_s < self.verdict_s:
            kind = RecoveryKind.SHADOW
        else:
            kind = RecoveryKind.RESPAWN if successor.how.value == "nursery" else RecoveryKind.COLD
        self.recovery.kind = kind.value
        self.recovery.to_engine = successor.id
        self.recovery.epoch = epoch

    def promoted(self, report: Promoted | None, now_s: float) -> None:
        self.recovery.promote_ms = _ms(now_s - self.verdict_s)
        if report is not None:
            self.recovery.blocks_kept = report.blocks_kept
            self.recovery.blocks_dropped = report.blocks_dropped

    def first_token(self, report: FirstToken) -> None:
        self.served = True
        self.recovery.first_token_ms = _ms(report.sent_s - self.verdict_s)
        self.recovery.requests_resumed = report.resumed

    def fence(self, now_s: float) -> None:
        self.fenced = True
        if self.recovery.fence_ms is None:
            self.recovery.fence_ms = _ms(now_s - self.verdict_s)

    def refill(self, now_s: float) -> None:
        if not self.refilled:
            self.refilled = True
            self.recovery.refill_ms = _ms(now_s - self.verdict_s)
