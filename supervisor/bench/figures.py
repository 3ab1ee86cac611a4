"""What is computed from what clients saw: percentiles, shares, differences. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shadowsup.supervisor.bench.client import Stream


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90, p99 (nearest rank: a value that was measured), max and n; None for no values."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)

    return {"p50": rank(0.5), "p90": rank(0.9), "p99": rank(0.99), "max": round(ordered[-1], 3), "n": len(ordered)}


def cached_share(usage: dict[str, Any] | None, block_tokens: int) -> float | None:
    """Return the share of the prompt's full blocks that were found in kept KV (the last token is always computed again)."""
    if usage is None:
        return None
    full = (usage["prompt_tokens"] - 1) // block_tokens * block_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return cached / full if full else 1.0


def difference(reference: Stream, seen: Stream) -> str | None:
    """Return what is wrong with ``seen``, or None: lost, repeated or changed tokens, an error, an early end."""
    if seen.error:
        return seen.error
    if not seen.done or seen.finish_reason != reference.finish_reason:
        return f"ended with {seen.finish_reason!r}, not {reference.finish_reason!r}"
    return _content(reference, seen, whole=True)


def partial_difference(reference: Stream, seen: Stream) -> str | None:
    """Return what is wrong with the content of a stream that broke: it must be a beginning of the reference."""
    return _content(reference, seen, whole=False)


def _content(reference: Stream, seen: Stream, *, whole: bool) -> str | None:
    """Ids are compared where the server sends them, the text in any case."""
    for at, (expected, got) in enumerate(zip(reference.token_ids, seen.token_ids, strict=False)):
        if expected != got:
            return f"token {at} of {len(reference.token_ids)} differs"
    if len(seen.token_ids) > len(reference.token_ids) or (whole and len(seen.token_ids) != len(reference.token_ids)):
        return f"{len(seen.token_ids)} tokens received, not {len(reference.token_ids)}"
    if seen.text != (reference.text if whole else reference.text[: len(seen.text)]):
        return "same tokens, other text" if reference.token_ids else "other text"
    return None
