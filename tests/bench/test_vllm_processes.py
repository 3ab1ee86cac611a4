"""Which process of an engine the GPU bench kills: wrong ones would make its figures those of something else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest
from bench_world import benchmark

from shadowsup.errors import ShadowsupError

TREE = """
import os, signal, subprocess, sys, time
def fork(then):
    pid = os.fork()
    if pid == 0:
        then()
        signal.pause()
        os._exit(0)
    return pid
def core():
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", "resource" + "_tracker"])
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # nobody reaps it
    ranks = [fork(lambda: None) for _ in range(2)]
    print(os.getpid(), *ranks, flush=True)
fork(core)
signal.pause()
"""


@pytest.fixture(scope="module")
def processes() -> ModuleType:
    return benchmark("vllm_processes")


@pytest.fixture
def tree() -> Iterator[tuple[int, int, list[int]]]:
    """A leader, its EngineCore and the two ranks of that, with multiprocessing's helper and a zombie beside them."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as leader:
        try:
            assert leader.stdout is not None
            core, *ranks = map(int, leader.stdout.readline().split())
            yield leader.pid, core, ranks
        finally:
            for process in (*psutil.Process(leader.pid).children(recursive=True), leader):
                process.kill()


def test_the_core_and_the_ranks_in_order(processes: ModuleType, tree: tuple[int, int, list[int]]) -> None:
    leader, core, ranks = tree
    assert processes.core_of(leader).pid == core
    assert [one.pid for one in processes.ranks_of(leader, 2)] == sorted(ranks)


def test_another_number_of_ranks_than_there_should_be_is_no_guess(processes: ModuleType, tree: tuple[int, int, list[int]]) -> None:
    with pytest.raises(ShadowsupError, match="forked 2 instead of 3"):
        processes.ranks_of(tree[0], 3)
