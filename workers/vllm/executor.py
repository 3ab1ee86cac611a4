"""Seam: ``--distributed-executor-backend`` with several ranks (0.26, 0.32): vLLM's own executor of worker processes, whose calls tell where
their start has got to.

The calls are looked at, not the executor's methods: 0.26 lays the KV cache out and warms up in one method, 0.32 in two.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from shadowsup.workers.vllm import current, front, rank
from shadowsup.workers.vllm.ranks import Ranks


class KeptExecutor(MultiprocExecutor):
    """In EngineCore."""

    def _init_executor(self) -> None:
        front.insist_on_fork()
        self._kept = current.life()
        self._kept.ranks = Ranks(self._kept.spec, self._call)
        rank.install()
        super()._init_executor()

    @staticmethod
    def _ensure_worker_termination(worker_procs: Any) -> None:
        """Wait for nobody: whoever ends takes the whole tree along, and what this process has to say of it is to be heard first."""

    def _call(self, method: str, timeout_s: float | None, *args: Any) -> list[Any]:
        answers: list[Any] = super().collective_rpc(method, timeout=timeout_s, args=args)
        return answers

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().collective_rpc(method, *args, **kwargs)
        if method == "initialize_from_config":
            self._kept.hold_ranks()
        elif method == "compile_or_warm_up_model":
            self._kept.warmed()
        return answer
