"""The last line: the keys that matter where one is, out of the bindings that are active there. One widget, where a footer is a dozen."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from textual.app import RenderResult
from textual.screen import Screen
from textual.widget import Widget

from shadowsup.tui import tones


class KeyLine(Widget):
    """Follows the bindings of its screen. A click on a key does what the key does."""

    DEFAULT_CSS = """
    KeyLine { dock: bottom; height: 1; background: $panel; padding: 0 1; }
    KeyLine { link-style: none; link-background: $panel; link-color: $foreground; }
    """

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._updated)

    def _updated(self, screen: Screen[object]) -> None:
        self.refresh()

    def render(self) -> RenderResult:
        styles = tones.palette(self.app)
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for key, description, action in self._keys():
            if text:
                text.append("  ")
            begin = len(text)
            text.append(key, styles["key"])
            text.append(f" {description}")
            text.apply_meta({"@click": f"app.run_key({action!r})"}, begin)
        return text

    def _keys(self) -> Iterable[tuple[str, str, str]]:
        """Yield what is shown: key, description, the key to press."""
        seen: set[str] = set()
        for active in self.screen.active_bindings.values():
            binding = active.binding
            if binding.show and active.enabled and binding.action not in seen:
                seen.add(binding.action)
                yield self.app.get_key_display(binding), binding.description, binding.key
