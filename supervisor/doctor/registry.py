"""Every check, in the order in which they are shown. Adding one is adding a function and a line here."""

from __future__ import annotations

from collections.abc import Iterable

from shadowsup.supervisor.doctor import gpus, host, software
from shadowsup.supervisor.doctor.finding import Check, Finding, Level, Wants
from shadowsup.supervisor.doctor.machine import Machine

CHECKS: tuple[Check, ...] = (
    host.python,
    host.kernel,
    host.nofile,
    host.memlock,
    host.core,
    host.other_limits,
    host.shm,
    host.memory,
    host.disk,
    host.cgroup,
    host.systemd,
    gpus.driver,
    gpus.fd_export,
    gpus.persistence,
    gpus.compute_mode,
    gpus.mps,
    gpus.mig,
    gpus.wanted_gpus,
    gpus.gpu_memory,
    software.engines,
    software.hub_cache,
    software.port,
)


def examine(machine: Machine, wants: Wants, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run the checks. One that breaks is a finding, too: the others are worth as much without it."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(machine, wants)
        except Exception as error:
            name = check.__name__.replace("_", "-")
            found.append(Finding(name, Level.WARNING, f"could not be checked: {type(error).__name__}: {error}", "please report it"))
    return found
