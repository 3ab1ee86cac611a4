"""The sampling of `shadowsup.workers.sampling` for a GPU: all rows at once and one wait for the device, where a CPU goes row by row.

Semantics, thresholds and noise are the same. Sums over the vocabulary are in float64, so that it does not show in which batch a row was
(the order of a GPU's reductions depends on the shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shadowsup.workers import sampling
from shadowsup.workers.sampling import GREEDY_BELOW, Row

_SORTED = 1024
"""Logits sorted for top-p at first; where a nucleus is wider, everything is."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Choose a token a row. ``logits``: (rows, vocabulary), any float type; overwritten where it is float32. Call it in inference mode."""
    logits = _adjust(logits, rows)
    tokens = _lowest_argmax(logits)
    drawn = [at for at, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        index = _upload(np.array(drawn, np.int64), logits.device)
        tokens[index] = _lowest_argmax(_perturbed(logits[index].float(), [rows[at] for at in drawn]))
    return [int(token) for token in tokens.tolist()]


def _upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _lowest_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return (rows,) int64: of equal maxima the lowest id, which argmax does not promise. A row that has no maximum (NaN) gets the last."""
    vocabulary = logits.shape[-1]
    ids = torch.arange(vocabulary, dtype=torch.int32, device=logits.device)
    best = torch.where(logits == logits.amax(-1, keepdim=True), ids, vocabulary).amin(-1)
    return best.clamp_(max=vocabulary - 1).to(torch.int64)


def _adjust(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return logits with penalties, and without end-of-sequence ids that come too early; ``logits`` itself where no row has any."""
    where: list[npt.NDArray[np.int64]] = []
    penalties: list[npt.NDArray[np.float32]] = []
    held: list[tuple[int, int]] = []
    for at, row in enumerate(rows):
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        if row.output and (presence or frequency):
            ids, counts = np.unique(np.asarray(row.output, dtype=np.int64), return_counts=True)
            where.append(np.stack([np.full_like(ids, at), ids]))
            penalties.append((presence + frequency * counts).astype(np.float32))
        if row.eos and len(row.output) < row.sampling.min_tokens:
            held += [(at, token) for token in sorted(row.eos)]
    if where or held:
        logits = logits.float()
    if where:
        place = _upload(np.concatenate(where, axis=1), logits.device)
        logits[place[0], place[1]] -= _upload(np.concatenate(penalties), logits.device)
    if held:
        place = _upload(np.array(held, np.int64).T.copy(), logits.device)
        logits[place[0], place[1]] = -torch.inf
    return logits


def _perturbed(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    device = logits.device
    temperatures = np.array([row.sampling.temperature for row in rows], np.float32)
    logits = logits / _upload(temperatures, device)[:, None]
    filtered = [at for at, row in enumerate(rows) if row.sampling.top_k > 0 or row.sampling.top_p < 1.0]
    if filtered:
        index = _upload(np.array(filtered, np.int64), device)
        kept = logits[index]
        vocabulary = kept.shape[1]
        top_k = np.array([rows[at].sampling.top_k for at in filtered], np.int64)
        top_k = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
        top_p = np.array([rows[at].sampling.top_p for at in filtered], np.float64)
        logits[index] = kept.masked_fill(kept < _thresholds(kept, top_k, top_p)[:, None], -torch.inf)
    keys = [sampling.key(row.sampling.seed, row.position) for row in rows]
    return logits.add_(sampling.gumbel(keys, logits.shape[-1], device))


def _thresholds(logits: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return (rows,): the lowest logit of each row that stays. See `sampling`, whose rules these are."""
    vocabulary = logits.shape[1]
    narrow = int(max(min(_SORTED, vocabulary), top_k[top_k < vocabulary].max(initial=1)))
    threshold, found = _thresholds_within(logits, top_k, top_p, narrow)
    if narrow < vocabulary and bool(((top_k > narrow) & (top_p < 1.0)).any()) and not bool(found.all()):
        threshold, _ = _thresholds_within(logits, top_k, top_p, vocabulary)
    return threshold


def _thresholds_within(
    logits: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (thresholds, whether the best ``width`` logits decide them)."""
    device, vocabulary = logits.device, logits.shape[1]
    best = logits.topk(width).values
    k = _upload(np.minimum(top_k, width), device)[:, None]
    p = _upload(top_p, device)[:, None]
    within = torch.arange(width, device=device) < k
    exact = best.double().masked_fill(~within, -torch.inf)
    # The mass beyond top-k does not count; where there is no top-k, all of the vocabulary does.
    whole = _upload(top_k == vocabulary, device)
    total = torch.where(whole, logits.double().logsumexp(1), exact.logsumexp(1))
    before = (((exact - total[:, None]).exp().cumsum(1) < p) & within).sum(1)  # how many it takes, less one
    unfiltered = p[:, 0] >= 1.0
    place = torch.where(unfiltered, k[:, 0] - 1, torch.minimum(before, k[:, 0] - 1))
    decided = (before < k[:, 0]) | unfiltered | _upload(top_k <= width, device)
    threshold = best.gather(1, place[:, None])[:, 0]
    # Without any filter that bites (top_k of the whole vocabulary, top_p 1) everything stays.
    nothing = _upload((top_k == vocabulary) & (top_p >= 1.0), device)
    return threshold.masked_fill(nothing, -torch.inf), decided
