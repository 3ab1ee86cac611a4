"""Who may connect: every Unix socket of a node asks the kernel who is there, for the case that its mode or folder does not hold."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_user import NOBODY, as_nobody, needs_root

from shadowsup.memkeeper.__main__ import listen as keeper_listen
from shadowsup.memkeeper.hub import Hub
from shadowsup.supervisor import runtime_dir
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.scribe import Scribe
from shadowsup.supervisor.scribe import listen as scribe_listen
from shadowsup.wire import credentials
from shadowsup.wire.engine import EngineState
from shadowsup.wire.link import Hello
from shadowsup.workers.link import LinkServer

pytestmark = needs_root

HELLO = Hello(worker="chat", engine="chat.1", state=EngineState.PARKED, epoch=0, model="toy", max_context=1)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="shadowsup-peers-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def is_refused(path: Path) -> bool:
    """Connect as another user, with nothing in the way but the server itself; return whether it hangs up."""
    path.chmod(0o666)

    def knock() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10.0)
            sock.connect(str(path))
            try:
                return sock.recv(1) == b""
            except ConnectionResetError:
                return True

    return as_nobody(knock)


def test_the_kernel_tells_who_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert credentials.peer(ours) == (os.getpid(), os.geteuid(), os.getegid())
        assert credentials.peer(ours).ours
    assert credentials.Peer(1, 0, 0).ours
    assert not credentials.Peer(1, NOBODY, 0).ours


def test_the_keeper_hangs_up_on_another_user(folder: Path) -> None:
    listener = keeper_listen(folder / "keeper.sock")
    hub = Hub(listener, clock=lambda: 0.0, on_request=lambda _: None, on_closed=lambda _: None)
    serving = threading.Thread(target=hub.select, args=(None,))
    serving.start()
    try:
        assert is_refused(folder / "keeper.sock")
        serving.join(10.0)
        assert hub.connections == {}
    finally:
        hub.close_all()
        listener.close()


def test_the_scribe_hangs_up_on_another_user(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    listener = scribe_listen(folder / "scribe.sock")
    scribe = Scribe(listener)
    wake, signalled = socket.socketpair()
    serving = threading.Thread(target=scribe.run, args=(wake,))
    serving.start()
    try:
        assert is_refused(folder / "scribe.sock")
        assert f"refused a connection of uid {NOBODY}" in capfd.readouterr().err
    finally:
        scribe.stop()
        signalled.send(b"x")
        serving.join(10.0)
        for each in (listener, wake, signalled):
            each.close()


def test_an_engines_link_hangs_up_on_another_user_and_keeps_its_gateway(folder: Path) -> None:
    path = folder / "link.sock"
    server = LinkServer(str(path), hello=HELLO, deliver=lambda _: None)
    server.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gateway:
            gateway.connect(str(path))
            assert gateway.recv(1)
            assert is_refused(path)
            assert server.connected
    finally:
        server.close()


def test_the_nursery_hangs_up_on_another_user(folder: Path) -> None:
    path = folder / "nursery.sock"
    ready, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "shadowsup.workers.nursery", "--socket", str(path), "--ready-fd", str(write)],
        pass_fds=(write,),
        stderr=subprocess.PIPE,
    )
    os.close(write)
    try:
        assert os.read(ready, 1)
        assert is_refused(path)
    finally:
        child.terminate()
        _, said = child.communicate(timeout=60)
        os.close(ready)
    assert b"refused a connection of uid" in said


# --- the runtime directory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: (path.mkdir(), os.chown(path, NOBODY, NOBODY)), "belongs to another user"),
        (lambda path: path.mkdir(mode=0o755), "open to other users"),
        (lambda path: path.symlink_to("/root"), "symbolic link"),
        (lambda path: path.touch(), "not a folder"),
    ],
)
def test_a_runtime_directory_that_somebody_else_could_have_made_is_refused(
    folder: Path, prepare: Callable[[Path], object], words: str
) -> None:
    folder.chmod(0o1777)
    prepare(folder / "node")
    with pytest.raises(SupervisorError, match=words):
        runtime_dir.create(folder / "node")


def test_another_users_link_on_the_way_to_it_is_refused(folder: Path) -> None:
    folder.chmod(0o1777)
    (folder / "way").symlink_to("/root")
    os.chown(folder / "way", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(SupervisorError, match="symbolic link"):
        runtime_dir.create(folder / "way" / "node")


@pytest.mark.parametrize("spoil", [lambda path: os.chown(path, NOBODY, NOBODY), lambda path: path.chmod(0o777)])
def test_a_state_directory_that_somebody_else_can_write_to_is_refused(folder: Path, spoil: Callable[[Path], None]) -> None:
    paths = NodePaths(runtime=folder, state=folder / "state")
    paths.prepare()
    spoil(paths.state)
    with pytest.raises(OSError, match="another user, or everybody"):
        paths.prepare()
