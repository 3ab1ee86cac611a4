"""The command palette: every binding of the present screen, by what it does. Nothing is listed twice: the bindings are the commands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from textual.command import DiscoveryHit, Hit, Hits, Provider


class BindingCommands(Provider):
    """Commands out of bindings, those that are disabled or of the text cursor left out."""

    def _commands(self) -> Iterator[tuple[str, str, Any]]:
        seen: set[str] = set()
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if not active.enabled or not binding.description or binding.action in seen or binding.system:
                continue
            seen.add(binding.action)
            key = self.app.get_key_display(binding)
            run = partial(self.app.run_action, binding.action, active.node)
            yield binding.description, f"{active.tooltip or binding.tooltip}  ({key})".strip(), run

    async def discover(self) -> Hits:
        for title, text, run in self._commands():
            yield DiscoveryHit(title, run, help=text)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, text, run in self._commands():
            score = max(matcher.match(title), matcher.match(text) * 0.5)
            if score > 0:
                yield Hit(score, matcher.highlight(title), run, help=text)
