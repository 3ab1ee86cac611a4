"""From logits to tokens, for a batch whose rows have parameters of their own.

Sampling is Gumbel-max: argmax(logits / temperature + noise), with noise a function of (seed, position, token id) and of nothing else. So a
request gets the same tokens alone, in any batch, and when it is replayed on another engine in the middle (given equal logits).

Semantics, in this order:

1. penalties on output tokens (OpenAI's: ``presence`` once, ``frequency`` a time);
2. fewer than ``min_tokens`` output tokens: end-of-sequence ids cannot be chosen (and stop strings are not looked for, see detokenize);
3. ``temperature`` 0 (or below 0.00001, where the division would overflow): the highest logit, of equal ones the lowest id; what follows
   is for the others;
4. ``top_k``, then ``top_p`` over what is left, both by threshold: tokens that tie with the last one kept are kept too, so that the result
   does not depend on the order of a sort;
5. noise, and the argmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shadowsup.wire.link import Sampling

_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
GREEDY_BELOW = 1e-5
_SORTED = 1024
"""Logits sorted for top-p at first; a row whose nucleus is wider is sorted whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of logits is sampled with. ``position``: index of the token to come in the whole sequence."""

    sampling: Sampling
    output: Sequence[int]
    position: int
    eos: Collection[int]


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Choose a token a row.

    Args:
        logits: (rows, vocabulary), any float type; overwritten where it is float32.
    """
    with torch.inference_mode():
        if logits.is_cuda:
            return _batched(logits, rows)
        return _sample(logits.float(), rows)


def _batched(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    from shadowsup.workers import sampling_batched  # which is made of this module

    return sampling_batched.sample(logits, rows)


def _sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    _penalise(logits, rows)
    _hold_eos(logits, rows)
    drawn = [at for at, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if not drawn:
        return _argmax(logits)
    if len(drawn) == len(rows):
        return _argmax(_perturbed(logits, rows))
    tokens = torch.tensor(_argmax(logits))
    index = torch.tensor(drawn, device=logits.device)
    tokens[drawn] = torch.tensor(_argmax(_perturbed(logits[index], [rows[at] for at in drawn])))
    return [int(token) for token in tokens.tolist()]


def _argmax(logits: torch.Tensor) -> list[int]:
    # Neither backend promises which of equal maxima argmax returns; a comparison with the maximum does.
    best = logits.argmax(dim=-1, keepdim=True)
    ties = (logits == logits.gather(-1, best)).sum(dim=-1)
    found = best[:, 0].tolist()
    for at in torch.nonzero(ties > 1)[:, 0].tolist():
        found[at] = int(torch.nonzero(logits[at] == logits[at, found[at]])[0, 0])
    return [int(token) for token in found]


def _penalise(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    for at, row in enumerate(rows):
        presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
        if row.output and (presence or frequency):
            ids, counts = np.unique(np.asarray(row.output, dtype=np.int64), return_counts=True)
            penalty = (presence + frequency * counts).astype(np.float32)
            logits[at, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(penalty).to(logits.device)


def _hold_eos(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    for at, row in enumerate(rows):
        if row.eos and len(row.output) < row.sampling.min_tokens:
            logits[at, sorted(row.eos)] = -torch.inf


def _perturbed(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return logits / temperature + noise, -inf for what the filters exclude. ``logits`` (rows, vocabulary) float32."""
    column = {"device": logits.device, "dtype": torch.float32}
    logits = logits / torch.tensor([row.sampling.temperature for row in rows], **column)[:, None]
    for at, row in enumerate(rows):
        if row.sampling.top_k > 0 or row.sampling.top_p < 1.0:
            logits[at].masked_fill_(logits[at] < _threshold(logits[at], row.sampling.top_k, row.sampling.top_p), -torch.inf)
    return logits.add_(gumbel([key(row.sampling.seed, row.position) for row in rows], logits.shape[-1], logits.device))


def _threshold(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return the lowest logit (0-d) that stays. ``logits``: (vocabulary,)."""
    vocabulary = logits.shape[0]
    k = min(top_k, vocabulary) if top_k > 0 else vocabulary
    if top_p >= 1.0:
        return logits.topk(k).values[-1]
    for width in (min(k, _SORTED), k):
        best = logits.topk(width).values
        total = best.logsumexp(0) if width == k else logits.logsumexp(0)
        if width < k < vocabulary:
            continue  # mass beyond top-k does not count, so all k are needed
        mass = (best - total).exp().cumsum(0)
        enough = torch.nonzero(mass >= top_p)
        if len(enough):
            return best[enough[0, 0]]
    return best[-1]


def key(seed: int, position: int) -> tuple[int, int]:
    """Mix seed and position into two 32-bit words (finaliser of splitmix64, Steele et al. 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _M64
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _M64
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _M64
    state ^= state >> 31
    return state & _M32, state >> 32


def gumbel(keys: Sequence[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return standard Gumbel noise (keys, vocabulary) float32: element (i, j) depends on keys[i] and j only.

    Two rounds of murmur3's 32-bit finaliser (Appleby) in int32 arithmetic, which wraps and is vectorised on every backend. The uniform
    variate keeps its relative precision near 0, where the winners come from: noise up to 22 and no bins at the top.
    """
    words = torch.tensor([[_signed(first), _signed(second)] for first, second in keys], dtype=torch.int32, device=device)
    state = torch.arange(vocabulary, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B1))[None, :] + words[:, :1]
    _finalise(state)
    state ^= words[:, 1:]
    _finalise(state)
    # int32 → [0, 2^32) → (0, 1): exact to 2^-33 near 0, and at most 1 - 2^-24 so that the logarithm stays finite.
    uniform = (
        state.to(torch.float32)
        .where(state >= 0, state.to(torch.float32) + 4294967296.0)
        .add_(0.5)
        .mul_(2.0**-32)
        .clamp_(max=1.0 - 2.0**-24)
    )
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _finalise(state: torch.Tensor) -> None:
    state ^= _shifted(state, 16)
    state *= _signed(0x85EBCA6B)
    state ^= _shifted(state, 13)
    state *= _signed(0xC2B2AE35)
    state ^= _shifted(state, 16)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (state >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
