"""The command line: one file a verb, one line each in `verbs`. Nothing is imported before the verb is known, so `status` starts fast."""

from __future__ import annotations


def main() -> None:
    """Run ``shadowsup`` and exit with its status."""
    import sys

    from shadowsup.supervisor.cli.app import run

    sys.exit(run())
