"""From chunks to marked lines, and from lines to files that rotate."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowsup.supervisor.scribe_file import LogFile, stamp
from shadowsup.supervisor.scribe_stream import LINE_MAX, TAIL_LINE_MAX, Lines

MARK = b"1970-01-01T00:00:01.500Z chat.3 | "


def lines(count: int = 5) -> Lines:
    return Lines("chat.3", count)


def pattern(text: bytes) -> re.Pattern[bytes]:
    return re.compile(text, re.MULTILINE)


def test_time_is_utc_with_milliseconds() -> None:
    assert stamp(1_767_225_599.9994) == b"2025-12-31T23:59:59.999Z"


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"")), max_size=20))
def test_chunk_boundaries_do_not_matter(chunks: list[bytes]) -> None:
    whole, pieces = lines(), lines()
    text = b"".join(chunks)
    expected = whole.feed(text, 1.5) + whole.finish(1.5)
    got = b"".join(pieces.feed(chunk, 1.5) for chunk in chunks) + pieces.finish(1.5)
    assert got == expected
    assert whole.tail(5) == pieces.tail(5)
    body = text if text.endswith(b"\n") or not text else text + b"\n"
    assert expected.replace(MARK, b"") == body.replace(MARK, b"")
    assert expected.count(b"\n") == body.count(b"\n")


def test_each_line_is_marked_and_the_last_ones_are_kept() -> None:
    stream = lines(2)
    assert stream.feed(b"a\nb\n\nc", 1.5) == MARK + b"a\n" + MARK + b"b\n" + MARK + b"\n"
    assert stream.tail(9) == ["b", "", "c"]
    assert stream.tail(1) == ["c"]
    assert stream.tail(0) == []
    assert stream.finish(1.5) == MARK + b"c\n"
    assert stream.finish(1.5) == b""
    assert Lines("chat.3", 3, stream.kept).tail(9) == ["", "c"]


def test_progress_bar_leaves_only_what_can_be_seen() -> None:
    stream = lines()
    assert stream.feed(b"load:  1%\rload: 50%", 1.5) == b""
    assert stream.tail(1) == ["load: 50%"]
    assert stream.feed(b"\rload: 100%\r", 1.5) == b""
    assert stream.feed(b"\ndone\r\n", 1.5) == MARK + b"load: 100%\n" + MARK + b"done\n"
    for percent in range(100_000):
        stream.feed(b"\r%d" % percent, 1.5)
    assert stream.finish(1.5) == MARK + b"99999\n"


def test_endless_line_is_cut_and_memory_stays_bounded() -> None:
    stream = lines()
    written = b"".join(stream.feed(b"x" * 1000, 1.5) for _ in range(100))
    assert written.count(b"\n") == 5, "each 17 chunks of 1000 bytes exceed LINE_MAX"
    assert max(map(len, written.split(b"\n"))) <= LINE_MAX + 1000 + len(MARK)
    assert all(len(line) <= TAIL_LINE_MAX for line in stream.tail(5))


def test_carriage_returns_in_a_flood_cost_linear_time() -> None:
    stream = lines()
    started = time.process_time()
    stream.feed(b"x" * 60_000 + b"\n" + b"y\rz\n" * 1000, 1.5)
    assert time.process_time() - started < 1.0


def test_first_matching_line_is_reported_once_and_kept_ones_count() -> None:
    stream, found = lines(), []
    stream.feed(b"Uvicorn running on :80\n", 1.5)
    stream.watch(1, pattern(rb"running on :(\d+)"), found.append)
    assert found == ["Uvicorn running on :80"]
    stream.watch(2, pattern(rb"^ready\s+now$"), found.append)
    stream.feed(b"not ready now\nready\nnow\n", 1.5)
    assert found == ["Uvicorn running on :80"], "a match across lines is none"
    stream.feed(b"rea", 1.5)
    stream.feed(b"dy  now\nready now\n", 1.5)
    assert found[1:] == ["ready  now"]
    stream.watch(3, pattern(b"never"), found.append)
    assert stream.watched == (3,)
    stream.unwatch(3)
    stream.unwatch(3)
    assert stream.watched == ()


def files(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def test_file_rotates_by_size_at_line_ends_and_keeps_so_many(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "chat.log", max_size=10, keep=2)
    assert log.write(b"11\n22\n33\n44\n") == 0
    assert files(tmp_path) == {"chat.log": b"44\n", "chat.log.1": b"11\n22\n33\n"}
    log.write(b"a line longer than the file may be\n5\n")
    assert files(tmp_path)["chat.log.1"] == b"a line longer than the file may be\n"
    log.write(b"666666666\n")
    assert files(tmp_path) == {"chat.log": b"666666666\n", "chat.log.1": b"5\n", "chat.log.2": b"a line longer than the file may be\n"}
    assert (tmp_path / "chat.log").stat().st_mode & 0o777 == 0o600
    log.close()


def test_file_without_rotated_ones_starts_anew(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "chat.log", max_size=4, keep=0)
    for number in range(5):
        log.write(b"%d\n" % number)
    assert files(tmp_path) == {"chat.log": b"4\n"}
    log.close()


@pytest.mark.parametrize("how", ["removed", "renamed", "folder removed", "truncated"])
def test_file_that_went_away_is_made_again_at_once(tmp_path: Path, how: str) -> None:
    path = tmp_path / "logs" / "chat.log"
    log = LogFile(path, max_size=100, keep=1)
    log.write(b"before\n")
    match how:
        case "removed":
            path.unlink()
        case "renamed":
            path.rename(path.with_name("elsewhere"))
        case "folder removed":
            path.unlink()
            path.parent.rmdir()
        case _:
            os.truncate(path, 0)
    log.maintain()
    assert path.read_bytes() == b""
    log.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    log.close()


def test_what_a_full_disk_refused_is_counted_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "chat.log", max_size=1000, keep=1)
    log.write(b"one\n")
    space = 3
    real = os.write

    def write(fd: int, data: bytes | memoryview) -> int:
        nonlocal space
        if space == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(fd, bytes(data[:space]))
        space -= done
        return done

    monkeypatch.setattr(os, "write", write)
    assert log.write(b"two lines\nof text\n") == 15
    assert log.write(b"more\n") == 5
    assert log.error == os.strerror(errno.ENOSPC)
    space = 1 << 20
    log.maintain()
    assert log.error == ""
    assert log.write(b"three\n") == 0
    text = (tmp_path / "chat.log").read_text()
    assert re.fullmatch(r"one\ntwo\n\S+Z scribe \| dropped 20 bytes \(No space left on device\)\nthree\n", text)
    log.close()
