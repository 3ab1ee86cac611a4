"""The keeper process: ``python -m shadowsup.memkeeper --socket PATH --backend host [--restore] [--ready-fd N]``.

Exits 0 on SIGTERM or SIGINT and removes its socket; memory that others hold stays theirs. Exits 1 with a message when it cannot start.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from shadowsup.memkeeper.allocation import Allocator, open_fd_limit
from shadowsup.memkeeper.backends import load_backend
from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.server import Keeper

log = logging.getLogger("shadowsup.memkeeper")


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at ``path``, for this user only. A socket file that nobody listens on is replaced.

    Raises:
        KeeperError: somebody listens there, or the path cannot be used.
    """
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise KeeperError(f"cannot use the socket {path}: {error}", "choose a shorter runtime directory that this user may write") from None
    else:
        raise KeeperError(f"a keeper serves {path} already", "stop it first, or connect to it")
    finally:
        probe.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise KeeperError(f"cannot listen on {path}: {error}", "does the runtime directory exist?") from None
    finally:
        os.umask(before)
    return listener


def main(argv: list[str] | None = None) -> int:
    """Run the keeper; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shadowsup.memkeeper", description="Creates memory and hands it out as file descriptors."
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--backend", default="auto", help="host, or another one of this machine; auto: the best that works")
    parser.add_argument("--restore", action="store_true", help="serve nobody before a vault has given back what an earlier keeper had")
    parser.add_argument("--ready-fd", type=int, default=-1, help="write one byte to this fd when serving")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        allocator = Allocator(load_backend(options.backend))
        listener = listen(options.socket)
    except KeeperError as error:
        print(f"memkeeper: {error}", file=sys.stderr)
        return 1
    open_fd_limit()
    ours = options.socket.stat().st_ino
    keeper = Keeper(listener, allocator, restoring=options.restore)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    log.info("serving %s, backend %s, generation %d", options.socket, allocator.backend.name, keeper.generation)
    if options.ready_fd >= 0:
        os.write(options.ready_fd, b"1")
        os.close(options.ready_fd)
    try:
        keeper.run()
    finally:
        listener.close()
        if options.socket.exists() and options.socket.stat().st_ino == ours:  # and not that of a keeper after us
            options.socket.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
