"""The nursery's stand-in: a fork of it that has everything imported and waits for its death.

Importing takes seconds, in which the next engine to die would be replaced by a cold spawn. The spare shares the nursery's pages, so it
costs next to nothing. It ends with its line to the supervisor: nothing of it is left when both are gone.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import NoReturn

from shadowsup.workers import fork_child, process
from shadowsup.workers.errors import ExitCode


def stand_by(given: fork_child.Inheritance, serve: Callable[[int], None]) -> NoReturn:
    """Be the spare. ``serve`` is called with the ready fd when the nursery's place is to be taken; it returns when the nursery ends."""
    code = ExitCode.FAILED
    try:
        os.setsid()
        process.default_signals()
        with socket.socket(fileno=fork_child.take_descriptors(given)) as line:
            word, fds, _, _ = socket.recv_fds(line, 1, 1)
        if word:
            serve(fds[0])
        code = ExitCode.STOPPED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
