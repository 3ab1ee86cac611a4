"""Sampling all rows at once chooses what sampling row by row does."""

from __future__ import annotations

import random

import pytest
import torch

from shadowsup.wire.link import Sampling
from shadowsup.workers import sampling, sampling_batched
from shadowsup.workers.sampling import Row


def row(rng: random.Random, vocabulary: int) -> Row:
    chosen = Sampling(
        seed=rng.randrange(1000),
        temperature=rng.choice([0.0, 0.3, 1.0, 5.0]),
        top_k=rng.choice([0, 0, 1, 7, 1200, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.05, 0.6, 0.9, 0.999999]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        min_tokens=rng.choice([0, 5]),
    )
    output = [rng.randrange(vocabulary) for _ in range(rng.randrange(8))]
    return Row(chosen, output, rng.randrange(5000), frozenset({2, 9}))


@pytest.mark.parametrize("vocabulary", [17, 300, 2500])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_gets_the_token_it_gets_alone(vocabulary: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = [row(rng, vocabulary) for _ in range(12)]
    # Few distinct values: ties everywhere, at thresholds too.
    logits = torch.randint(-40, 40, (12, vocabulary), generator=torch.Generator().manual_seed(seed)).float() / 4
    alone = [sampling.sample(logits[at : at + 1].clone(), [one])[0] for at, one in enumerate(rows)]
    with torch.inference_mode():
        assert sampling_batched.sample(logits.clone(), rows) == alone


def test_a_nucleus_wider_than_what_is_sorted_at_first_is_found() -> None:
    rows = [Row(Sampling(seed=seed, temperature=1.0, top_p=0.97), (), 3, frozenset()) for seed in range(20)]
    logits = torch.randn(20, 4000, generator=torch.Generator().manual_seed(3)) * 0.1
    with torch.inference_mode():
        assert sampling_batched.sample(logits.clone(), rows) == sampling.sample(logits.clone(), rows)


def test_a_row_of_nan_still_gets_a_token_of_the_vocabulary() -> None:
    logits = torch.full((1, 8), float("nan"))
    with torch.inference_mode():
        assert sampling_batched.sample(logits, [Row(Sampling(seed=1, temperature=0.0), (), 0, frozenset())]) == [7]
