"""Continuous batching for a loop of one's own: what of which requests the next step computes, and what becomes of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shadowsup.wire.engine import Phase
from shadowsup.wire.link import Accepted, Rejected, Sampling, Submit, Token
from shadowsup.workers.detokenize import Detokenizer
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.faults import Faults
from shadowsup.workers.loop_blocks import Blocks, slots
from shadowsup.workers.requests import Request
from shadowsup.workers.scheduler import Chunk, Limits, Scheduler


class Tokenizer(Protocol):
    """Text to ids and back; a tokenizer of transformers is one."""

    def encode(self, text: str, /) -> Sequence[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


Chat = Callable[[Sequence[dict[str, Any]]], Sequence[int]]
"""Messages (``role``, ``content``) to the ids of a prompt."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request has in a step: compute the KV of the tokens ``ids``, which come at ``start`` in its sequence.

    The KV of the tokens before ``start`` is there, by this engine or by one before it. Good until `Batch.finish`.
    """

    rid: str
    ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    """The request's block table: position p lies in ``blocks[p // block_tokens]`` at ``p % block_tokens``."""
    block_tokens: int
    samples: bool
    """Whether the logits of the last token give the request's next one. False: more of its prompt comes in the next step."""
    sampling: Sampling
    output: Sequence[int]
    """What has been generated so far, by whichever engine."""

    @property
    def end(self) -> int:
        """Length of the sequence after this step."""
        return self.start + len(self.ids)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slot (block × ``block_tokens`` + offset) of every position up to `end`, (end,): write ``slots[start:]``, read ``slots``."""
        return slots(self.blocks, self.block_tokens, self.end)


class Batch(Sequence[Piece]):
    """One step. Compute every piece, then `finish`."""

    def __init__(self, plan: Sequence[Chunk], scheduler: Scheduler, blocks: Blocks, eos: Collection[int]) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._blocks = blocks
        self._eos = eos
        self._pieces = [_piece(chunk, blocks.block_tokens) for chunk in plan]
        self.finished = False

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, at: Any) -> Any:
        return self._pieces[at]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @property
    def sampling(self) -> list[Piece]:
        """The pieces that take a token each, in order."""
        return [piece for piece in self._pieces if piece.samples]

    def sample(self, logits: Any) -> list[int]:
        """Choose a token for each of `sampling` as its request wants it, the same whichever engine goes on with it.

        Args:
            logits: torch, (len(sampling), vocabulary), of any float type, overwritten where it is float32; or as many rows.

        Raises:
            WorkerError: another number of rows.
        """
        import torch

        from shadowsup.workers.sampling import Row, sample

        rows = [Row(piece.sampling, piece.output, piece.end, self._eos) for piece in self.sampling]
        if len(logits) != len(rows):
            raise WorkerError(f"{len(rows)} pieces of this step sample, there are logits of {len(logits)}", fatal=True)
        if not rows:
            return []
        return sample(logits if hasattr(logits, "dtype") else torch.stack(list(logits)), rows)

    def finish(self, tokens: Sequence[int]) -> None:
        """The step is done: what it filled is published, and each of `sampling` goes on with its token.

        Raises:
            WorkerError: not as many tokens as pieces that sample, or called twice.
            LedgerLost: another engine owns the ledger.
        """
        wanted = len(self.sampling)
        if self.finished or len(tokens) != wanted:
            raise WorkerError(
                f"this step takes {wanted} tokens, once; it was given {len(tokens)}",
                "finish(tokens) wants one for each of batch.sampling",
                fatal=True,
            )
        self.finished = True
        self._blocks.settle()
        self._scheduler.commit(self._plan, [int(token) for token in tokens])


def _piece(chunk: Chunk, block_tokens: int) -> Piece:
    request = chunk.request
    return Piece(
        rid=request.rid,
        ids=request.tokens[chunk.start : chunk.start + chunk.count],
        start=chunk.start,
        blocks=request.blocks,
        block_tokens=block_tokens,
        samples=chunk.samples,
        sampling=request.sampling,
        output=request.output,
    )


class Serving:
    """The requests of one epoch.

    Args:
        vocabulary: ids below this are taken.
        eos: ids that end an answer.
        chat: makes prompts of messages; None: chat requests are refused.
        max_context: tokens of a request, prompt and output together; they fit `Blocks`.
    """

    def __init__(
        self,
        blocks: Blocks,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        vocabulary: int,
        eos: Collection[int],
        chat: Chat | None,
        max_context: int,
    ) -> None:
        self._blocks = blocks
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._chat = chat
        self._max_context = max_context
        self._scheduler = Scheduler(blocks.pool, limits, blocks.salt)
        self._faults = Faults.from_environment(tokenizer.decode)
        self._rejected: list[Rejected] = []

    def next(self) -> Batch | None:
        """Return the next step; None when nothing can be computed now."""
        plan = self._scheduler.plan()
        if self._faults is not None:
            self._faults.look(chunk.request.tokens for chunk in plan)
        return Batch(plan, self._scheduler, self._blocks, self._eos) if plan else None

    def events(self) -> list[Accepted | Token | Rejected]:
        """Return what has come up since the last call."""
        rejected, self._rejected = self._rejected, []
        return [*rejected, *self._scheduler.take_events()]

    @property
    def phase(self) -> Phase:
        return self._scheduler.phase

    @property
    def upcoming(self) -> int:
        """Tokens of the next step, at most."""
        return self._scheduler.upcoming

    @property
    def inflight(self) -> int:
        return self._scheduler.inflight

    @property
    def queued(self) -> int:
        return self._scheduler.queued + len(self._rejected)

    def cancel(self, rid: str) -> None:
        self._scheduler.cancel(rid)

    def submit(self, request: Submit) -> None:
        param = "messages" if request.messages is not None else "prompt"
        try:
            prompt = self._prompt(request)
        except Exception as error:  # of the user's own tokenizer: a request that it cannot take must not end the engine, nor the next
            self._reject(request, f"the {param} cannot be encoded: {error}", param)
            return
        replay, sampling = request.replay, request.sampling
        output = list(replay.output_ids) if replay is not None else []
        if (problem := self._problem(request, prompt, output)) is not None:
            self._reject(request, problem, param)
            return
        delivered = replay.delivered_chars if replay is not None else 0
        self._scheduler.add(
            Request(
                rid=request.rid,
                epoch=request.epoch,
                prompt=prompt,
                output=output,
                sampling=sampling,
                text=Detokenizer(self._tokenizer, stops=sampling.stop, min_tokens=sampling.min_tokens, delivered=delivered),
                max_total=self._max_context,
                eos=self._eos,
                replayed=replay is not None,
            )
        )

    def _prompt(self, request: Submit) -> tuple[int, ...]:
        if request.replay is not None:
            return request.replay.prompt_ids
        if request.messages is not None:
            if self._chat is None:
                raise ValueError("this model has no chat template; use /v1/completions")
            return tuple(self._chat(request.messages))
        if request.prompt is not None:
            return tuple(self._tokenizer.encode(request.prompt))
        return request.prompt_ids or ()

    def _problem(self, request: Submit, prompt: Sequence[int], output: Sequence[int]) -> str | None:
        if not prompt:
            return "the prompt has no tokens"
        wrong = next((token for token in itertools.chain(prompt, output) if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            return f"token id {wrong} is outside the vocabulary of {self._vocabulary}"
        limit, asked = self._max_context, 0 if request.replay is not None else request.sampling.max_tokens or 0
        if len(prompt) >= limit or len(prompt) + asked > limit:
            more = f" and {asked} of max_tokens" if asked else ""
            return f"this model takes {limit} tokens, prompt and output together; the request has {len(prompt)}{more}"
        return None

    def _reject(self, request: Submit, message: str, param: str) -> None:
        self._rejected.append(Rejected(rid=request.rid, epoch=request.epoch, status=400, message=message, param=param))
