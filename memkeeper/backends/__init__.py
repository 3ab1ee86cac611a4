"""Where segments come from. A backend is one module here and one line in `BACKENDS`; the keeper knows only `base.Backend`."""

from __future__ import annotations

import importlib

from shadowsup.memkeeper.backends.base import Backend
from shadowsup.memkeeper.errors import KeeperError

BACKENDS: dict[str, str] = {
    "cuda": "shadowsup.memkeeper.backends.cuda_vmm:CudaVmmBackend",
    "host": "shadowsup.memkeeper.backends.host:HostBackend",
}
"""Name → ``module:class``. ``auto`` takes the first that this machine can."""


def load_backend(name: str) -> Backend:
    """Return the backend ``name``, probed; ``auto``: the first of `BACKENDS` that works here.

    Raises:
        KeeperError: no such backend, or this machine cannot.
    """
    if name != "auto" and name not in BACKENDS:
        raise KeeperError(f"unknown memory backend {name!r}", f"one of: auto, {', '.join(BACKENDS)}")
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        module, _, attribute = BACKENDS[candidate].partition(":")
        try:
            backend: Backend = getattr(importlib.import_module(module), attribute)()
            backend.probe()
        except (KeeperError, ImportError) as error:
            reasons.append(f"{candidate}: {error}")
        else:
            return backend
    raise KeeperError(f"no memory backend works on this machine: {'; '.join(reasons)}")
