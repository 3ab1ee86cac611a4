"""Running a node in the foreground: what `shadowsup start` calls. Its directory, its sockets and its signals; the rest is the `Node`'s."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shadowsup.supervisor import node_setup, voice
from shadowsup.supervisor.config import LoadedConfig
from shadowsup.supervisor.node import Node
from shadowsup.supervisor.sd_notify import ServiceManager
from shadowsup.supervisor.service import Service


def run(loaded: LoadedConfig, runtime_dir: Any, *, reporter: Callable[[str], None], adapters: Mapping[str, str] | None = None) -> int:
    """Run the node that ``loaded`` describes in the foreground until it is stopped; return the exit code.

    Raises:
        SupervisorError: it is supervised already, parts of it are alive, or it could not be brought up.
    """
    with node_setup.claimed(runtime_dir, loaded.config) as claim:
        node_setup.prepare_process()
        found = claim.found
        service = Service(ServiceManager.from_environment(os.environ), claim.paths.runtime, claim.index)
        sockets = service.take_sockets()
        if claim.listened != claim.config.gateway.listen:  # kept for another address
            while sockets:
                sockets.pop().close()
        if not sockets:
            sockets = node_setup.listen(claim.config) if found is None else found.sockets(node_setup.bind)
        return asyncio.run(_run(loaded, claim, sockets, service, reporter, adapters))


async def _run(
    loaded: LoadedConfig,
    claim: node_setup.Claim,
    sockets: list[socket.socket],
    service: Service,
    reporter: Callable[[str], None],
    adapters: Mapping[str, str] | None,
) -> int:
    found = claim.found
    path = str(Path(loaded.path).absolute()) if found is None else found.record.config_path
    with voice.apart(reporter) as say:
        if found is not None:
            found.tell(loaded, say)
        text = loaded.text if found is None or claim.config == loaded.config else ""
        node = Node(
            claim.config,
            claim.paths,
            reporter=say,
            sockets=sockets,
            adapters=adapters,
            config_path=path,
            config_text=text,
            found=found,
            service=service,
            marks=claim.marks,
        )
        node.tells_events = getattr(reporter, "wants_events", False)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.request_stop, signal.Signals(number).name)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup and `start -d` have it
            loop.add_signal_handler(signal.SIGHUP, node.hung_up)
        return await node.serve()
