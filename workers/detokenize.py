"""Token ids to text, a few at a time: no half characters, no half stop strings, and cut at what a client already has.

The text of a request is a function of its ids alone, however they are chunked; a replay therefore comes to the same text and the
same held-back tail as the engine that died, and `delivered_chars` is all that is needed to continue a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"
_MAX_PENDING = 16
"""Tokens. A UTF-8 character has at most 4 bytes, so a longer tail that still does not decode never will."""


class Decoder(Protocol):
    """What turns ids into text; special tokens come out as nothing."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Text of successive ids. A decoder's text of one id depends on its neighbours (spaces, bytes of one character), so each step decodes
    a short window before and after the new ids and takes the difference, as most incremental detokenizers do."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Take the next ids, return the text that is now certain."""
        if len(ids) > 2:
            # In bulk (a replay): only where it cannot differ from one at a time.
            text = self._feed_bulk(ids)
            if text is not None:
                return text
        return "".join(self._feed_one(token) for token in ids)

    def flush(self) -> str:
        """No more ids will come: return what was held back."""
        return self._take()

    def _feed_one(self, token: int) -> str:
        self._ids.append(token)
        before, after = self._window()
        certain = len(after) > len(before) and not after.endswith(REPLACEMENT)
        return self._take() if certain or len(self._ids) - self._done >= _MAX_PENDING else ""

    def _feed_bulk(self, ids: Sequence[int]) -> str | None:
        if self._done != len(self._ids):
            return None
        mark = len(self._ids)
        self._ids.extend(ids)
        before, after = self._window()
        if REPLACEMENT in after or not after.startswith(before):
            del self._ids[mark:]
            return None
        self._context, self._done = self._last_visible(), len(self._ids)
        return after[len(before) :]

    def _last_visible(self) -> int:
        """Return where the last ids begin that decode to some text: without it a decoder would take what follows for the beginning of
        a text and strip its space."""
        reach = 1
        while reach < len(self._ids):
            if self._decoder.decode(self._ids[-reach:]):
                return len(self._ids) - reach
            reach *= 2
        return 0

    def _take(self) -> str:
        before, after = self._window()
        self._context, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def _window(self) -> tuple[str, str]:
        window = self._ids[self._context :]
        return self._decoder.decode(window[: self._done - self._context]), self._decoder.decode(window)


class StopStrings:
    """Holds back what could become a stop string, and ends the text in front of one.

    Of several stop strings the one that is complete first (at the lowest character) counts; of those complete at the same character
    the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text that may be sent, whether a stop string was completed)."""
        self._held += text
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is not None:
            out, self._held = self._held[: best[1]], ""
            return out, True
        keep = self._longest_prefix_at_end()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return out, False

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out

    def _longest_prefix_at_end(self) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """One request's text.

    Args:
        delivered: characters that the client already has; only text beyond them comes out.
        min_tokens: stop strings are not looked for before this many output tokens.

    Attributes:
        chars: length of all text emitted so far, that which was delivered before included.
        stopped: whether a stop string was completed.
    """

    def __init__(self, decoder: Decoder, *, stops: Sequence[str] = (), min_tokens: int = 0, delivered: int = 0) -> None:
        self._stream = TextStream(decoder)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._delivered = delivered
        self._made = 0
        self.stopped = False

    @property
    def chars(self) -> int:
        return max(self._made, self._delivered)

    def feed(self, ids: Sequence[int]) -> str:
        """Take output ids (end-of-sequence ids excepted); return the text to send."""
        early = max(0, min(len(ids), self._min_tokens - 1 - self._tokens))
        self._tokens += len(ids)
        text = self._stream.feed(ids[:early])  # before min_tokens nothing can stop the text, so nothing is held back
        out, self.stopped = self._stops.feed(self._stream.feed(ids[early:])) if early < len(ids) else ("", False)
        return self._cut(text + out)

    def flush(self) -> str:
        """The request is over: return everything that was held back (nothing after a stop string)."""
        if self.stopped:
            return ""
        out, self.stopped = self._stops.feed(self._stream.flush())
        return self._cut(out if self.stopped else out + self._stops.flush())

    def _cut(self, text: str) -> str:
        start = self._made
        self._made += len(text)
        return text[max(0, self._delivered - start) :]
