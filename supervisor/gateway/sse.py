"""Server-sent events out of the bytes of a response (HTML standard, 9.2), whole events only."""

from __future__ import annotations

from shadowsup.supervisor.gateway.errors import ApiError

MOST_EVENT_BYTES = 64 * 1024 * 1024


class EventSplitter:
    """Collects bytes and returns each event once it is whole. What is half there when its sender dies is nothing."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that ``chunk`` completes, each with the empty line that ends it.

        Raises:
            ApiError: 502 when an event has no end.
        """
        data = self._rest + chunk if self._rest else chunk
        if b"\n\n" not in data and b"\r" not in data:
            self._rest = data
            if len(data) > MOST_EVENT_BYTES:
                raise ApiError(502, "The engine sent an event without an end")
            return []
        if b"\r" in data:
            # A carriage return at the end may be half a line end: it waits for the other half.
            tail = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(tail)].replace(b"\r\n", b"\n") + tail
        *whole, self._rest = data.split(b"\n\n")
        return [event + b"\n\n" for event in whole if event]
