"""A loop of one's own as its life sees it: blocks that are followed and promoted, and somebody who takes the requests."""

from __future__ import annotations

from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter
from shadowsup.wire.engine import KvCounts
from shadowsup.wire.link import Cancel, Rejected, Submit
from shadowsup.workers.loop_blocks import Blocks
from shadowsup.workers.loop_steps import Serving


class Inbox:
    """Requests as they came, for who schedules them. ``refuses``: nobody ever will."""

    def __init__(self) -> None:
        self.inflight = 0
        self.refuses = True
        self._messages: list[Submit | Cancel] = []

    @property
    def queued(self) -> int:
        return len(self._messages)

    def submit(self, request: Submit) -> None:
        self._messages.append(request)

    def cancel(self, rid: str) -> None:
        self._messages.append(Cancel(rid=rid))

    def take(self) -> list[Submit | Cancel]:
        taken, self._messages = self._messages, []
        return taken

    def refusals(self) -> list[Rejected]:
        """Return the answers to what nobody takes."""
        if not self.refuses:
            return []
        words = "this worker runs a loop of its own and takes no requests"
        return [Rejected(rid=one.rid, epoch=one.epoch, status=404, message=words) for one in self.take() if isinstance(one, Submit)]


class Front:
    """See `shadowsup.workers.api.Served`."""

    def __init__(self, blocks: Blocks, max_context: int, receiver: Inbox) -> None:
        self.blocks = blocks
        self.max_context = max_context
        self.receiver: Inbox | Serving = receiver
        self.about = ""

    def follow(self, ledger: LedgerReader) -> None:
        self.blocks.follow(ledger)

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        return self.blocks.promote(ledger, fenced=fenced)

    def fence(self) -> int:
        return self.blocks.pool.fence()

    def submit(self, request: Submit) -> None:
        self.receiver.submit(request)

    def canary(self, request: Submit) -> None:
        """A request of the engine's own. Who schedules himself is not given it: his next `beat` answers."""
        if isinstance(self.receiver, Serving):
            self.receiver.submit(request)

    def cancel(self, rid: str) -> None:
        self.receiver.cancel(rid)

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None:
        """Nothing can be prepared for a loop that hashes its blocks itself."""

    def forget(self, rid: str) -> None: ...

    @property
    def inflight(self) -> int:
        return self.receiver.inflight

    @property
    def queued(self) -> int:
        return self.receiver.queued

    def kv_counts(self) -> KvCounts | None:
        return self.blocks.counts()
