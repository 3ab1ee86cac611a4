"""The kinds of engine, and which keys of a worker each of them has."""

from __future__ import annotations

import enum


class EngineKind(str, enum.Enum):
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    LOOP = "loop"
    COMMAND = "command"

    @property
    def keeps_memory(self) -> bool:
        """Whether the engine's weights and KV are kept memory."""
        return self is not EngineKind.COMMAND

    @property
    def has_nursery(self) -> bool:
        """Whether engines are forked from a process that has imported all they need; a program of the user's own is spawned."""
        return self.keeps_memory and self is not EngineKind.LOOP

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of a worker that this kind needs."""
        return _REQUIRED_KEYS.get(self, ("model",))

    @property
    def foreign_keys(self) -> tuple[str, ...]:
        """Keys of a worker that this kind does not have."""
        return _FOREIGN_KEYS.get(self, ("command", "ready", "metrics", "port", "cwd"))


_REQUIRED_KEYS = {EngineKind.LOOP: ("command",), EngineKind.COMMAND: ("command", "ready")}
_FOREIGN_KEYS = {
    EngineKind.LOOP: ("revision", "ready", "metrics", "port"),
    EngineKind.COMMAND: ("model", "revision", "args", "tensor_parallel", "kv", "verify", "python"),
}
