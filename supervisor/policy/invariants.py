"""What must hold after every event, whatever came before. Tests call it after each; nothing in production does."""

from __future__ import annotations

from shadowsup.supervisor.policy.model import Desired
from shadowsup.supervisor.policy.upkeep import Upkeep


def validate(policy: Upkeep) -> None:
    """Raises AssertionError: the policy has contradicted itself."""
    engines = list(policy.engines.values())
    active = policy.active
    owners = [e for e in engines if e.epoch > 0 and e.epoch == policy.epoch]
    assert len(owners) <= 1, f"two engines of epoch {policy.epoch}: {owners}"
    assert all(e.epoch <= policy.epoch for e in engines), "an engine of an epoch that was never opened"
    if active is not None:
        assert not active.dying, "a condemned engine is active"
        assert active.epoch > 0 and active.promote_sent_s is not None, "active without an order"
    live = [e for e in engines if e.live]
    rollout = policy.rollout
    shadows = policy.settings.shadows if rollout is None else max(s.shadows for s in (policy.settings, rollout.origin, rollout.target))
    places = 1 + shadows + (active is None)  # shadows of before the loss are still there when a start is tried
    places += rollout is not None and rollout.open  # one with the new settings, or, when it is taken back, with the old ones
    assert len(live) <= places, f"spawned twice: {live}"
    assert sum(e.loading for e in live) <= 1, f"two starts at once: {live}"
    if policy.desired is Desired.STOP or policy.down_reason:
        assert not live, f"told to stop, but nothing was told to {live}"
    if rollout is not None and rollout.open:
        known = {rollout.origin.revision, rollout.target.revision}
        assert policy.settings.revision in known, "settings of neither side are in force"
        assert rollout.stage.committed == (policy.settings.revision == rollout.target.revision), f"{rollout.stage} with the wrong settings"
    for engine in engines:
        assert not engine.dying or engine.killed_s is not None, f"{engine.id} is condemned but was not killed"
        assert engine.id == f"{policy.settings.name}.{engine.seq}"
