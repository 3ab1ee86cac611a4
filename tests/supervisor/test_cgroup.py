"""Control groups: over a file system laid out for the test, and for real where this machine lets us make some.

The fake one shows what the kernel of this machine does not have: a delegated group, the memory controller and its ``memory.events``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shadowsup.supervisor import cgroup
from shadowsup.supervisor.cgroup import Cgroup, find, own_group
from shadowsup.supervisor.process import Child, SpawnPlan
from shadowsup.supervisor.tree import Tree

UNIFIED = "24 1 0:21 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
HYBRID = "24 1 0:21 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n25 24 0:22 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def lay_out(root: Path, own: str = "/system.slice/node.service", mounts: str = UNIFIED, at: str = "sys/fs/cgroup") -> Path:
    """Make a /proc and a /sys as ``own`` sees them; return the folder of ``own``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("22 1 0:20 / /proc rw - proc proc rw\n" + mounts)
    (root / "proc/self/cgroup").write_text(f"4:memory:/elsewhere\n0::{own}\n")
    folder = root / at / own.lstrip("/")
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return folder


def test_our_group_is_found_in_a_unified_and_in_a_hybrid_hierarchy(tmp_path: Path) -> None:
    assert own_group(tmp_path / "a") is None
    unified = lay_out(tmp_path / "a")
    assert own_group(tmp_path / "a") == unified
    hybrid = lay_out(tmp_path / "b", mounts=HYBRID, at="sys/fs/cgroup/unified")
    assert own_group(tmp_path / "b") == hybrid


def test_without_cgroup_v2_engines_run_without_groups(tmp_path: Path) -> None:
    lay_out(tmp_path, mounts="24 1 0:21 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")
    assert find("demo", "ab12", root=tmp_path) is None


def test_a_group_outside_of_what_is_mounted_is_nobodys(tmp_path: Path) -> None:
    lay_out(tmp_path, mounts="24 1 0:21 /docker/12 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert own_group(tmp_path) is None


def test_where_systemd_runs_root_needs_a_group_that_was_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lay_out(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    marked: dict[Path, bytes] = {}

    def getxattr(path: Path, name: str) -> bytes:
        if name == "user.delegate" and path in marked:
            return marked[path]
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert find("demo", "ab12", root=tmp_path, uid=0) is None
    marked[folder] = b"1"
    found = find("demo", "ab12", root=tmp_path, uid=0)
    assert found is not None and found.path == folder / "shadowsup-demo-ab12"


def test_with_a_subgroup_of_its_own_the_supervisor_uses_the_group_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DelegateSubgroup=supervisor: only so may the memory controller be switched on, and OOM kills be told."""
    folder = lay_out(tmp_path, own="/system.slice/node.service/supervisor")
    (folder.parent / "cgroup.procs").write_text("")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1" if path == folder.parent else b"")
    found = find("demo", "ab12", root=tmp_path, uid=0)
    assert found is not None and found.path == folder.parent / "shadowsup-demo-ab12"
    engine = found.engine("chat.1")
    assert engine is not None
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+memory\n"
    assert (found.path / "cgroup.subtree_control").read_text() == "+memory\n"


def test_an_ordinary_users_group_is_used_and_not_the_one_above_it(tmp_path: Path) -> None:
    """Below user@.service everything is the user's, but what lies above is systemd's to arrange."""
    folder = lay_out(tmp_path, own="/user.slice/user@7.service/app.slice/node.scope")
    (folder.parent / "cgroup.procs").write_text("")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    found = find("demo", "ab12", root=tmp_path, uid=os.geteuid() or None) if os.geteuid() else None
    if os.geteuid() == 0:
        assert find("demo", "ab12", root=tmp_path) is None  # root's, and not delegated
        return
    assert found is not None and found.path.parent == folder


def test_another_users_group_is_not_ours(tmp_path: Path) -> None:
    lay_out(tmp_path)
    assert find("demo", "ab12", root=tmp_path, uid=os.geteuid() + 1 or 1) is None


def test_oom_kills_are_read_from_memory_events(tmp_path: Path) -> None:
    group = Cgroup(tmp_path)
    assert group.oom_kills() is None
    (tmp_path / "memory.events").write_text("low 0\nhigh 12\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert group.oom_kills() == 1


def test_members_of_groups_below_count(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "cgroup.procs").write_text("12\n0\n")
    (tmp_path / "inner/cgroup.procs").write_text("13\n")
    assert Cgroup(tmp_path).pids() == {12, 13}
    assert Cgroup(tmp_path / "gone").pids() == frozenset()


# --- for real -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Cgroup]:
    node = find("test", f"{os.getpid():x}")
    made = node.engine("chat.1") if node is not None else None
    if made is None:
        pytest.skip("no cgroup v2 that we may change; the fake file system above stands for it")
    yield made
    assert made.remove()
    assert not made.path.exists() and not made.path.parent.exists()


MOVED = "import os, time\nwhile '/chat.1' not in open('/proc/self/cgroup').read():\n  time.sleep(0.001)\n"
"""It forks nothing before it is in its group: what it forked earlier would stay outside."""

FORKER = MOVED + "for _ in range(3):\n  if os.fork() == 0:\n    os.setsid()\n    os.environ.clear()\ntime.sleep(3600)"
"""Eight processes, seven of them in sessions of their own."""


async def test_one_write_kills_all_that_is_in_it_and_no_stranger(group: Cgroup) -> None:
    """P04, P10: a process cannot leave its group by a session of its own."""
    child = Child.spawn(SpawnPlan(what="engine", argv=[sys.executable, "-c", FORKER], env={}))
    stranger = Child.spawn(SpawnPlan(what="stranger", argv=["sleep", "3600"], env={"PATH": os.environ["PATH"]}))
    try:
        assert group.add(child.pid)
        async with asyncio.timeout(20):
            while len(group.pids()) < 8:  # noqa: ASYNC110 (they tell nobody)
                await asyncio.sleep(0.01)
        assert stranger.pid not in group.pids()
        assert group.kill()
        assert await child.wait() == -9
        async with asyncio.timeout(20):
            while group.pids():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert stranger.alive
    finally:
        group.kill()
        stranger.signal_group(9)
        await stranger.wait()
        for each in (child, stranger):
            each.close()


async def test_a_tree_finds_by_its_group_who_left_everything_else(group: Cgroup) -> None:
    """P01, P04: neither tag nor session nor parent: the leader is dead, and who it detached is known by the group alone."""
    code = MOVED + "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(3600)\n  os._exit(0)\ntime.sleep(3600)"
    child = Child.spawn(SpawnPlan(what="engine", argv=[sys.executable, "-c", code], env={}))
    try:
        group.add(child.pid)
        async with asyncio.timeout(20):
            while len(group.pids()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while any(pid for pid in group.pids() if pid != child.pid and _parent(pid) == child.pid):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        child.signal(9)
        await child.wait()
        assert len(group.pids()) == 1
        tree = Tree(tag="", leader=child.identity, pgid=child.pid, cgroup=group.path)
        killed = await asyncio.to_thread(tree.kill)
        assert [member.why for member in killed.members] == ["cgroup"]
        assert await killed.gone() == ()
        killed.close()
    finally:
        group.kill()
        child.close()


def test_a_process_that_is_gone_cannot_be_moved(group: Cgroup) -> None:
    assert not group.add(2**22 - 1)
    assert not Cgroup(group.path / "gone").add(os.getpid())
    assert not Cgroup(group.path / "gone").kill()
    assert Cgroup(group.path / "gone").remove()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_the_root_of_the_real_machine_is_the_default() -> None:
    assert Path("/") == cgroup.ROOT
