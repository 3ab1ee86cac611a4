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
    replay.seek(55.0)
    replay._step(0.0, seen.append, lambda *_: None)
    # A jump brings all that happened before, in one go, and nothing from after.
    assert seen[0].rewound and seen[-1].status["workers"][0]["epoch"] == 55
    assert [e["message"] for o in seen for e in o.events] == [f"event {n}" for n in range(0, 60, 10)]
    replay._step(5.0, seen.append, lambda *_: None)
    assert [o.status["workers"][0]["epoch"] for o in seen[-5:]] == [56, 57, 58, 59, 60]
    seen.clear()
    replay.seek(-55.0)
    replay._step(6.0, seen.append, lambda *_: None)
    assert seen[0].rewound and [o.status["workers"][0]["epoch"] for o in seen] == [0, 1, 2, 3, 4, 5]


def test_a_jump_back_from_the_end_is_shown_at_once_and_by_every_look_that_it_brings(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path / "r"))
    notes: list[str] = []

    def told(_: Observation) -> None:
        notes.append(replay.note)  # a dashboard draws it when something is told, and a replay that is paused tells nothing more

    replay._step(0.0, told, lambda *_: None)
    replay._step(1000.0, told, lambda *_: None)
    assert replay.note.endswith("ended 100%")
    replay.pause()
    replay.seek(-1000.0)
    assert replay.note.endswith("paused 0%"), "before the other thread has run"
    notes.clear()
    replay._step(1000.1, told, lambda *_: None)
    assert len(notes) == 1 and notes[0].endswith("paused 0%")
    replay._step(1001.0, told, lambda *_: None)
    assert len(notes) == 1, "it is paused"


def test_a_jump_while_it_plays_is_not_overtaken_by_what_was_played(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path / "r"))
    seen: list[int] = []

    def told(observation: Observation) -> None:
        seen.append(observation.status["workers"][0]["epoch"])
        if len(seen) == 10:
            replay.seek(-1000.0)

    replay._step(0.0, told, lambda *_: None)
    replay._step(90.0, told, lambda *_: None)
    assert len(seen) == 10, "what it was about to play is of no interest any more"
    replay._step(90.0, told, lambda *_: None)
    assert seen[10:] == [0]
    replay._step(92.5, told, lambda *_: None)
    assert seen[10:] == [0, 1, 2]


def test_a_clock_that_was_set_back_while_it_was_recorded_stops_nothing(tmp_path: Path) -> None:
    feed = Scripted()
    recorder = Recorder(feed, tmp_path / "r")
    recorder.start(lambda _: None, lambda *_: None)
    for n, ts in enumerate((100.0, 101.0, 102.0, 50.0, 51.0)):
        status = {"event": n, "time_s": ts, "mono_s": float(n), "node": {"name": "demo"}, "workers": []}
        feed.told(Observation(status, fresh=n == 0, ts=ts))
    recorder.close()
    replay = Replay(tmp_path / "r")
    seen: list[int] = []
    for now_s in (0.0, 1.0, 2.0, 3.0):
        replay._step(now_s, lambda o: seen.append(o.status["event"]), lambda *_: None)
    assert seen == [0, 1, 2, 3, 4] and replay.note.endswith("ended 100%")


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
    "data", [b"", b"hello", *(gzip.compress(text, mtime=0) for text in (b"{}\n", b'{"shadowsup_recording":1}\n', b"x\n"))], ids=range(5)
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
        await d.until(lambda: "it broke" not in d.text())
        await d.press("f7")
        await d.sees("✖ down")
        await d.press("3")
        await d.sees("its last words")
        await d.press("2", "right_square_bracket")
        await d.sees("62% valid")
