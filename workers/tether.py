"""The engine's end of its tether: a robust mutex that its main thread holds for life (see `shadowsup.robust_mutex`).

The supervisor is woken by the kernel when that thread dies, before the address space is torn down. The lifeline tells the same, later, and
for sure.
"""

from __future__ import annotations

import logging

from shadowsup.robust_mutex import RobustMutex


def hold(path: str) -> None:
    """Hold the tether at ``path`` until this thread ends; an empty path (an engine started by hand) does nothing."""
    if not path:
        return
    try:
        RobustMutex(path).hold()
    except OSError as error:
        logging.getLogger("shadowsup.engine").warning("no tether at %s, its lifeline alone will tell of the end: %s", path, error)
