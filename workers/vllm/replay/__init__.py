"""Lets a request begin with output that another engine has generated: what the gateway's replay needs of vLLM.

In the API server (`front`, `parsers`) the ids that a client was given are told once more through vLLM's own output processor and parsers,
so that their states are as they were; a parked engine does that ahead of the failover (`stage`). In EngineCore (`core`, `grammar`) and in
the first of vLLM's two model runners (`runner`) the request begins like one that was preempted and is resumed: nothing computed, its output
already there.
"""

from __future__ import annotations


def install() -> None:
    """Put every seam in place. Idempotent."""
    from shadowsup.workers.vllm.replay import core, front, grammar, parsers, runner, stage

    for seam in (front, parsers, stage, core, grammar, runner):
        seam.install()
