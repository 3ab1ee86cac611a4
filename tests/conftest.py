"""Fixtures for every test: nothing may leak, and torch stays on one thread unless a test says otherwise."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# Before torch is imported anywhere: two cores are shared by several processes in these tests.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

settings.register_profile("long", max_examples=100_000, deadline=None)
if "HYPOTHESIS_PROFILE" in os.environ:
    settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])

# A test run in the background of a shell ignores SIGINT, and so would every process that a test starts to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What the helpers of the tests assert is told in full, as in the tests themselves.
_HELPERS = [path.stem for path in Path(__file__).parent.rglob("*.py") if not path.stem.startswith(("test_", "conftest"))]
pytest.register_assert_rewrite(*_HELPERS)

_ALONE = (
    "bench",
    "docs",
    "e2e",
    "packaging",
    "supervisor/test_cgroup",
    "supervisor/test_node_",
    "supervisor/test_process_tree",  # makes files in /dev/shm, where others would take them for theirs
    "supervisor/test_service",
    "tui/test_tui_load",
    "tui/test_tui_terminal",
    "vllm",
)
"""Tests that start whole nodes, or compare times: each has the machine for itself. The others may run two at a time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what must run alone."""
    here = Path(__file__).parent
    for item in items:
        place = str(item.path.relative_to(here)) if here in item.path.parents else ""
        if place.startswith(_ALONE):
            item.add_marker(pytest.mark.alone)


def _open_fds() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:  # the fd of the listing itself
            continue
    return found


def _children() -> dict[int, str]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())[:120] or child.status()
        except psutil.Error:
            continue
    return found


def _shm() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


LEAK_S = 5.0
"""What is still there after this long is left behind. Sockets are closed by threads a moment later, and /dev/shm is everybody's."""


@pytest.fixture(autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A runtime directory is refused below a folder that others may write to, and some tests let other users in."""
    tmp_path_factory.getbasetemp().chmod(0o700)


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a memfd, socket or pidfd, or a shared-memory file behind."""
    if request.node.get_closest_marker("e2e"):
        # A node outlives one test there, and replaces its parts; the fixture that owns the node checks what is left after its stop.
        yield
        return
    before_fds, before_children, before_shm = _open_fds(), _children(), _shm()
    yield
    gc.collect()
    watched = ("memfd:", "socket:", "pidfd")
    deadline = time.monotonic() + LEAK_S
    while True:
        left_children = {pid: what for pid, what in _children().items() if pid not in before_children and "resource_tracker" not in what}
        left_fds = {fd: to for fd, to in _open_fds().items() if before_fds.get(fd) != to and any(word in to for word in watched)}
        left_shm = _shm() - before_shm
        if not (left_children or left_fds or left_shm):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: processes {left_children}, fds {left_fds}, shm {left_shm}")
        time.sleep(0.05)  # nothing tells of it
