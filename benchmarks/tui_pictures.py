"""The pictures of the dashboard in ``docs/images``: ``python benchmarks/tui_pictures.py [CONFIG]``.

Everything in them is a real node: it is started in a runtime directory of its own, serves a few streams, its active engine is killed from
the dashboard as a drill, and the screens are exported as they are. CONFIG is ``configs/node.yaml`` unless one is named; the listening
address and the node's name are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shadowsup.supervisor.client import call
from shadowsup.tui.app import Dashboard
from shadowsup.tui.config_area import ConfigArea
from shadowsup.tui.feed import LiveFeed

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDE, NARROW = (140, 36), (80, 24)
STREAMS = 3


@contextlib.contextmanager
def node(config: Path, folder: Path) -> Iterator[Path]:
    """Run a node in the background; yield its runtime directory."""
    text = re.sub(r"name: demo", f"name: demo\n  state_dir: {folder / 'state'}", config.read_text(), count=1)
    text = re.sub(r"listen: \S+", "listen: 127.0.0.1:0", text, count=1)
    # A machine that does other things as well must not strike in the drill's place.
    text = text.replace("    shadows: 1", "    health: {hang: {floor: 30s, ceiling: 60s}}\n    shadows: 1", 1)
    copy = folder / "node.yaml"
    copy.write_text(text)
    runtime = folder / "run"
    cli = [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(runtime)]
    subprocess.run([*cli, "start", str(copy), "-d", "--wait"], check=True)
    try:
        yield runtime
    finally:
        subprocess.run([*cli, "stop"], check=True)


@contextlib.contextmanager
def streams(runtime: Path) -> Iterator[None]:
    """Have clients that ask for one answer after the other."""
    status = call(runtime, "status")
    url, model = f"http://{status['gateway']['listen']}/v1/completions", status["workers"][0]["model"]
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            body = {
                "model": model,
                "prompt": f"Story number {number}: once upon a time",
                "max_tokens": 120,
                "stream": True,
                "ignore_eos": True,
            }
            request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=120) as answer:
                for _ in answer:
                    if stop.is_set():
                        return

    clients = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(STREAMS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(10.0)


class Camera:
    def __init__(self, app: Dashboard, pilot: Any) -> None:
        self.app, self._pilot = app, pilot

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def until(self, condition: Callable[[], object], seconds: float = 600.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 (what a screen shows has no event)
                await asyncio.sleep(0.1)

    async def take(self, name: str) -> None:
        for toast in self.app.screen.query("Toast"):
            await toast.remove()
        await self._pilot.pause()
        svg = re.sub(r"terminal-\d+", f"terminal-{name}", self.app.export_screenshot(title="shadowsup tui"))
        (IMAGES / f"tui-{name}.svg").write_text(svg)


async def wide(runtime: Path) -> None:
    app = Dashboard(LiveFeed(runtime), writable=True)
    async with app.run_test(size=WIDE) as pilot:
        camera = Camera(app, pilot)
        await camera.until(lambda: app.story.seen and app.story.throughput)
        await asyncio.sleep(40)  # histories of a minute say more than those of a second
        await camera.until(lambda: app.story.status.workers[0].state == "healthy")
        first = app.story.status.workers[0]
        await camera.press("x")
        await camera.take("order")
        await camera.press("right", "enter")
        await camera.until(
            lambda: any(r.refill_ms is not None and r.first_token_ms is not None for r in app.story.recoveries_of(first.name))
        )
        await asyncio.sleep(15)
        await camera.take("overview")
        await camera.press("2")
        await asyncio.sleep(2)
        await camera.take("worker")
        await camera.press("right_square_bracket")
        await asyncio.sleep(2)
        await camera.take("blocks")
        await camera.press("3")
        await asyncio.sleep(2)
        await camera.press("e")
        await asyncio.sleep(1)
        await camera.take("logs")
        await camera.press("4")
        area = app.screen.query_one(ConfigArea)
        await camera.until(lambda: area.document.line_count > 3)
        row = next(n for n, line in enumerate(area.document.lines) if "OMP_NUM_THREADS" in line)
        area.move_cursor((row, area.document.get_line(row).index('"') + 2))
        await camera.press("backspace", "1")
        await asyncio.sleep(1)
        await camera.press("ctrl+s")
        await asyncio.sleep(3)
        await camera.take("config")


async def narrow(runtime: Path) -> None:
    app = Dashboard(LiveFeed(runtime))
    async with app.run_test(size=NARROW) as pilot:
        camera = Camera(app, pilot)
        await camera.until(lambda: app.story.seen and app.story.throughput)
        await asyncio.sleep(10)
        await camera.take("compact")


def main() -> None:
    config = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "configs" / "node.yaml"
    IMAGES.mkdir(exist_ok=True)
    # A short path: it is in the picture of the config.
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as name, node(config, Path(name)) as runtime, streams(runtime):
        asyncio.run(wide(runtime))
        asyncio.run(narrow(runtime))


if __name__ == "__main__":
    main()
