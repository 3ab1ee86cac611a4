"""Pictures of whole screens, kept beside the tests. ``SHADOWSUP_SNAPSHOTS=update`` makes them anew; look at them before you commit them.

The figures come from a fake node with a frozen clock, so a picture is the same on every machine. What another release of Textual draws
otherwise (rules, gradients) is not ours: the characters must always be the same, the colours only under the release they were made with.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import textual
from test_tui_worker import FAILOVER
from tui_node import BEGAN, FakeNode, engine, event, gpu, recovery, status, worker

from shadowsup.tui.config_area import ConfigArea

FOLDER = Path(__file__).parent / "snapshots"
MADE_WITH = re.compile(r"<!-- textual (\S+) -->\n")


def pieces(svg: str) -> list[tuple[str, str, str]]:
    """Return every text of a picture with its place, in order."""
    return [(html.unescape(text), x, y) for x, y, text in re.findall(r'<text [^>]*? x="([^"]+)" y="([^"]+)"[^>]*>([^<]*)</text>', svg)]


async def compare(d: Any, name: str) -> None:
    await d.pilot.pause()
    svg = re.sub(r"terminal-\d+", "terminal", d.app.export_screenshot(title="shadowsup"))
    path = FOLDER / f"{name}.svg"
    if os.environ.get("SHADOWSUP_SNAPSHOTS") == "update":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(f"<!-- textual {textual.__version__} -->\n{svg}")
        return
    kept = path.read_text()
    made = MADE_WITH.match(kept)
    assert made is not None
    # Positions are fractions of a cell and the same wherever the characters are.
    assert pieces(svg) == pieces(kept), f"{name} looks otherwise:\n{d.text()}"
    if made[1] == textual.__version__:
        assert svg == kept[made.end() :], f"{name} has other colours"


def busy(**more: Any) -> dict[str, Any]:
    slow = worker(
        "embed", "degraded", [engine("embed", 3), engine("embed", 4, "shadow", "warming", since_s=4.0, detail="capturing graphs")]
    )
    waits = worker(
        "draft",
        "backoff",
        [],
        reason="draft.9 ended with status 1; its last output:\nRuntimeError: CUDA error: out of memory",
        backoff={"what": "start an engine", "in_s": 14.0, "failures": 4},
        restarts=8,
        kv={"blocks": 0, "valid": 0, "free": 0, "quarantined": 0, "reserve": 0},
    )
    return status([worker(), slow | {"since_s": 61.0}, waits], **more)


async def test_overview_compact(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status = busy()
    node.happen(event(1, "worker.state", "draft is backoff: draft.9 ended with status 1", level="warning", worker="draft"))
    async with drive(size=(80, 24)) as d:
        await d.sees("└ embed.4", "draft is backoff", "Logs")
        await compare(d, "overview-compact")


async def test_overview_wide_with_gpus(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status = busy(gpus=[gpu(0), gpu(1, state="warning", warnings=["Xid 63: row remapping"], temperature_c=84)])
    node.happen(event(1, "worker.state", "draft is backoff: draft.9 ended with status 1", level="warning", worker="draft"))
    async with drive(size=(160, 40)) as d:
        await d.sees("└ embed.4", "Xid 63", "draft is backoff", "Logs")
        await compare(d, "overview-wide")


async def test_a_failover_in_progress(node: FakeNode, drive: Callable[..., Any]) -> None:
    for happened in FAILOVER[:-1]:  # the old one is not gone yet
        node.happen(happened)
    going = recovery(first_token_ms=32.0, fence_ms=None, refill_ms=None)
    engines = [
        engine("chat", 1, "retiring", "stopping", cause="engine process died", since_s=30.0),
        engine("chat", 2, since_s=29.9),
        engine("chat", 3, "shadow", "loading", since_s=20.0),
    ]
    node.status["workers"] = [worker(state="degraded", since_s=29.9, epoch=2, engines=engines, last_recovery=going)]
    node.recoveries = [going]
    async with drive(size=(120, 40)) as d:
        await d.sees("└ chat.3")
        await d.press("2")
        await d.sees("first token", "…", "◌ loading", "Quit")
        await compare(d, "failover")


async def test_a_config_with_errors(node: FakeNode, drive: Callable[..., Any], monkeypatch: Any) -> None:
    # Its path is that of the test's folder: the picture has none.
    monkeypatch.chdir(node.folder)
    node.status["node"]["config"] = node.config.name
    node.config.write_text(node.config.read_text().replace("shadows: 1", "shadow: 1").replace("256MiB", "256"))
    async with drive(size=(110, 30)) as d:
        await d.until(lambda: d.app.story.seen)
        await d.press("4")
        area = await d.until(lambda: d.app.screen.query_one(ConfigArea))
        area.cursor_blink = False
        await d.sees("2 errors")
        await d.press("f8")
        await d.sees("Complete", "^s Save")
        await compare(d, "config-errors")


def test_the_pictures_say_what_the_tests_say() -> None:
    """A picture that is compared with itself says nothing: these must be seen in them."""
    seen = {path.stem: " ".join(text.replace("\xa0", " ") for text, _, _ in pieces(path.read_text())) for path in FOLDER.glob("*.svg")}
    assert set(seen) == {"overview-compact", "overview-wide", "failover", "config-errors"}
    assert "start an engine in 14 s" in seen["overview-wide"] and "Xid 63" in seen["overview-wide"]
    assert "◔ backoff" in seen["overview-compact"]
    assert "did you mean" in seen["config-errors"]
    assert BEGAN and "promoted" in seen["failover"]
