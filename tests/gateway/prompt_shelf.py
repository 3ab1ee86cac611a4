"""What an engine does with staged prompts, so that other tests see whole replays."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shadowsup.wire.link import Stage, Submit, ToEngine, Unstage


class PromptShelf:
    """One engine's staged prompts, for one connection. ``frames``: each frame as it came."""

    def __init__(self) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}

    def take(self, frame: Sequence[ToEngine]) -> list[ToEngine]:
        """Return what is left of a frame: requests with their prompts, and cancels. Raises KeyError: a prompt was never staged."""
        rest: list[ToEngine] = []
        for message in frame:
            if isinstance(message, Stage):
                self.prompts[message.rid] = message.prompt_ids
            elif isinstance(message, Unstage):
                for rid in message.rids:
                    self.prompts.pop(rid, None)
            elif isinstance(message, Submit) and message.replay is not None and message.replay.staged:
                ids = self.prompts.pop(message.replay.staged)
                replay = msgspec.structs.replace(message.replay, prompt_ids=ids, staged="")
                rest.append(msgspec.structs.replace(message, prompt_ids=ids, replay=replay))
            else:
                rest.append(message)
        return rest
