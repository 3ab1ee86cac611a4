"""What real engine processes show of their progress: steps under way, canaries, compiling."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sdk_world import World, submit
from sdk_world import world as world

from shadowsup.wire.engine import Beat, Canaried, Canary, Phase
from shadowsup.workers import compiling

SLOW = {"step_s": 0.02}


def test_a_step_that_stands_still_is_told_with_its_beginning_and_no_canary_is_answered(world: World) -> None:
    wedge = world.path / "wedge"
    engine, gateway = world.active(1, args={"wedge": str(wedge), **SLOW})
    world.supervisor.order(engine, Canary(number=1))
    world.supervisor.expect(lambda report: isinstance(report, Canaried) and report.number == 1)
    gateway.send(submit("a", "Once upon a time", max_tokens=3000))
    moving = world.supervisor.expect(lambda report: isinstance(report, Beat) and report.gap_phase is Phase.DECODE and report.gap_s > 0.0)
    assert moving.since_s > 0.0 and moving.gap_s < 5.0 and moving.gap_tokens == 1
    wedge.touch()
    first = world.supervisor.expect(
        lambda report: isinstance(report, Beat) and report.since_s > 0.0 and report.sent_s - report.since_s > 0.3
    )
    world.supervisor.order(engine, Canary(number=2))
    later = world.supervisor.expect(lambda report: isinstance(report, Beat) and report.sent_s > first.sent_s + 0.5)
    assert (later.since_s, later.step, later.gap_s) == (first.since_s, first.step, 0.0)
    wedge.unlink()
    world.supervisor.expect(lambda report: isinstance(report, Canaried) and report.number == 2)


def test_what_torch_compiles_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    compiling.tell(told.append)
    starts, ends = [], []

    class Handler:
        register_start_callback = staticmethod(starts.append)
        register_end_callback = staticmethod(ends.append)

    module = ModuleType("torch._dynamo.callback")
    module.callback_handler = Handler  # type: ignore[attr-defined]
    monkeypatch.setattr(compiling, "_hooked", False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    compiling.watch_torch()
    compiling.watch_torch()
    assert (len(starts), len(ends)) == (1, 1)
    with compiling.compiling("a CUDA graph"):
        starts[0](None)
        ends[0](None)
        assert told == ["a CUDA graph"], "one within the other is one"
    assert told == ["a CUDA graph", ""]
    starts[0](None)
    assert told[-1] == "a graph of torch.compile"
    ends[0](None)
    assert told[-1] == ""
    compiling.tell(lambda what: None)


def test_the_hooks_that_torch_offers_are_there() -> None:
    """Read, not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    source = (Path(spec.submodule_search_locations[0]) / "_dynamo" / "callback.py").read_text()
    assert all(f"def {name}(" in source for name in ("register_start_callback", "register_end_callback"))
    assert "callback_handler = " in source
