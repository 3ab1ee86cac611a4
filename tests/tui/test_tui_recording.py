"""A recording shows again what was seen, as far as it goes, and changes nothing."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tui_driver import driving
from tui_node import BEGAN, FakeNode, event, worker

from shadowsup.tui.errors import TuiError
from shadowsup.tui.feed import LiveFeed
from shadowsup.tui.recording import Recorder, Replay
from shadowsup.tui.story import Observation


class Scripted:
    """A feed that tells what a test says, when it says it."""

    name, live, note = "scripted", True, ""

    def start(self, told: Callable[[Observation], None], missed: Callable[[str, str], None]) -> None:
        self.told, self.missed = told, missed

    def ask(self, verb: str, timeout_s: float = 1.0, /, **args: Any) -> Any:
        return {"verb": verb, **args}

    def log_lines(self) -> list[bytes]:
        return [b"2023-11-14T22:13:20.000Z chat.1 | hello"]

    def close(self) -> None: ...


def recorded(path: Path, looks: int = 100) -> Path:
    """Write a recording of one look a second; ``epoch`` counts them, every tenth has an event."""
    feed = Scripted()
    recorder = Recorder(feed, path)
    recorder.start(lambda _: None, lambda *_: None)
    for n in range(looks):
        status = {"event": n, "time_s": BEGAN + n, "mono_s": float(n), "node": {"name": "demo"}, "workers": [worker(epoch=n)]}
        events = (event(n + 1, "engine.state", f"event {n}"),) if n % 10 == 0 else ()
        feed.told(Observation(status, events, fresh=n == 0, ts=BEGAN + n))
    recorder.close()
    return path


def test_what_was_told_comes_again_in_its_time(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path / "r"))
    assert replay.note.startswith("replay 2023-11-14 22:13:20")
    seen: list[Observation] = []
    replay._jump(BEGAN + 55, seen.append)
    # A jump brings all that happened before, in one go, and nothing from after.
    assert seen[0].rewound and seen[-1].status["workers"][0]["epoch"] == 55
    assert [e["message"] for o in seen for e in o.events] == [f"event {n}" for n in range(0, 60, 10)]
    replay._play(BEGAN + 60, seen.append, lambda *_: None)
    assert [o.status["workers"][0]["epoch"] for o in seen[-5:]] == [56, 57, 58, 59, 60]
    seen.clear()
    replay._jump(BEGAN + 5, seen.append)
    assert seen[0].rewound and [o.status["workers"][0]["epoch"] for o in seen] == [0, 1, 2, 3, 4, 5]


def test_answers_are_those_of_the_moment(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path / "r"))
    with pytest.raises(TuiError, match="not in the recording"):
        replay.ask("blocks", worker="chat")
    replay._jump(BEGAN + 55, lambda _: None)
    assert replay.ask("blocks", worker="chat", cells=77) == {"verb": "blocks", "worker": "chat"}
    with pytest.raises(TuiError, match="not in the recording"):
        replay.ask("stop")


def test_a_recording_that_was_cut_off_plays_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole", looks=400).read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[: len(whole) // 2])
    looks = sum(b'"kind":"look"' in raw for _, raw in Replay(cut)._records)
    assert 50 < looks < 400


def test_the_file_is_private_and_no_other_is_overwritten(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", looks=1)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TuiError, match="there already"):
        Recorder(Scripted(), path)
    with pytest.raises(TuiError, match="No such file"):
        Recorder(Scripted(), tmp_path / "none" / "r")


@pytest.mark.parametrize(
    "data", [b"", b"hello", gzip.compress(b"{}\n"), gzip.compress(b'{"shadowsup_recording":1}\n'), gzip.compress(b"x\n")]
)
def test_what_is_no_recording_is_refused_in_words(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(TuiError):
        Replay(tmp_path / "r")


async def test_an_incident_is_recorded_and_looked_at_later(node: FakeNode, tmp_path: Path) -> None:
    path = tmp_path / "incident"
    node.write("2023-11-14T22:13:20.000Z chat.1 | its last words")
    async with driving(Recorder(LiveFeed(node.folder, look_s=0.05), path), size=(150, 40)) as d:
        await d.sees("└ chat.1", "recording")
        await d.until(lambda: len(d.app.logs) == 1)
        node.status["workers"] = [worker(state="down", reason="it broke")]
        node.happen(event(1, "worker.state", "chat is down: it broke", worker="chat", level="error"))
        await d.sees("✖ down", "chat is down: it broke")
    node.stop()
    async with driving(Replay(path), size=(150, 40)) as d:
        await d.sees("replay", "Pause")
        assert "Kill" not in d.text() and not d.app.writable
        await d.press("f10", "f10")
        await d.sees("✖ down", "ended 100%")
        await d.press("f5", "f6")
        await d.sees("● healthy", "paused 0%")
        assert "it broke" not in d.text()
        await d.press("f7")
        await d.sees("✖ down")
        await d.press("3")
        await d.sees("its last words")
        await d.press("2", "right_square_bracket")
        await d.sees("62% valid")
