"""Orphans of our trees are ours: PR_SET_CHILD_SUBREAPER, and reaping what nobody else waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shadowsup.supervisor.identity import Identity


def become_subreaper() -> None:
    """Make orphaned descendants our children instead of init's.

    Raises:
        SupervisorError: the kernel refuses (not Linux 3.4+).
    """
    raise NotImplementedError


def children() -> list[int]:
    """Return the pids of our direct children, zombies too."""
    raise NotImplementedError


class Reaper:
    """Reaps orphans that were reparented to us, never a process that someone here waits for.

    ``known`` returns the pids of supervised children (`Child`): they are left to their pidfds.
    """

    def __init__(self, known: Callable[[], Collection[int]], on_orphan: Callable[[Identity, int], None] | None = None) -> None: ...

    def start(self) -> None:
        """Begin on the running loop (SIGCHLD handler; main thread)."""

    def strays(self) -> list[Identity]:
        """Return living children that are not known: daemonised helpers of engines whose parent is gone."""
        raise NotImplementedError

    def close(self) -> None: ...
