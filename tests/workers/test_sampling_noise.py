"""Sampling: what each parameter does, and that a token depends on seed, position and logits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shadowsup.wire.link import Sampling
from shadowsup.workers.sampling import Row, gumbel, sample

EOS = frozenset({2})


def row(position: int = 5, output: tuple[int, ...] = (), **sampling: Any) -> Row:
    return Row(Sampling(**{"seed": 1, **sampling}), output, position, EOS)


def logits(rows: int = 1, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id() -> None:
    values = torch.zeros(1, 50)
    values[0, [7, 31, 12]] = 5.0
    assert sample(values, [row(temperature=0.0)]) == [7]


def test_a_token_is_the_same_alone_and_in_any_batch() -> None:
    values = logits(6)
    rows = [
        row(5, temperature=1.0, seed=3),
        row(9, temperature=0.0),
        row(5, temperature=0.7, top_p=0.9, seed=4),
        row(100, temperature=1.0, top_k=5, seed=5),
        row(7, (1, 1, 4), temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, seed=6),
        row(8, temperature=0.0, min_tokens=3),
    ]
    together = sample(values.clone(), rows)
    alone = [sample(values[at : at + 1].clone(), [rows[at]])[0] for at in range(6)]
    backwards = sample(values.flip(0).clone(), rows[::-1])[::-1]
    assert together == alone == backwards


def test_another_seed_or_position_gives_other_noise() -> None:
    flat = torch.zeros(1, 5000)
    drawn = {sample(flat.clone(), [row(position, seed=seed)])[0] for seed in range(20) for position in range(20)}
    assert len(drawn) > 350


def test_sampling_follows_the_distribution() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    drawn = sample(wanted.log().repeat(count, 1), [row(seed=seed) for seed in range(count)])
    got = torch.bincount(torch.tensor(drawn), minlength=4) / count
    assert torch.allclose(got, wanted, atol=0.012)


def test_the_noise_is_a_standard_gumbel_variate() -> None:
    noise = gumbel([(seed * 7919, seed) for seed in range(40)], 20_000, torch.device("cpu"))
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - 1.6449) < 0.02
    assert bool(torch.isfinite(noise).all())


def test_temperature_sharpens_and_flattens() -> None:
    values = torch.tensor([[1.0, 0.0]])

    def share(temperature: float) -> float:
        drawn = sample(values.repeat(4000, 1), [row(seed=seed, temperature=temperature) for seed in range(4000)])
        return drawn.count(0) / 4000

    assert share(0.2) > 0.98 and 0.70 < share(1.0) < 0.76 and share(10.0) < 0.56


def test_top_k_keeps_the_best_k() -> None:
    values = logits(1, 50)
    best = set(values[0].topk(3).indices.tolist())
    drawn = sample(values.repeat(2000, 1), [row(seed=seed, top_k=3, temperature=5.0) for seed in range(2000)])
    assert set(drawn) == best


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    values = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = sample(values.repeat(3000, 1), [row(seed=seed, top_p=0.7) for seed in range(3000)])
    assert set(drawn) == {0, 1}
    drawn = sample(values.repeat(200, 1), [row(seed=seed, top_p=0.01) for seed in range(200)])
    assert set(drawn) == {0}


@pytest.mark.parametrize("vocabulary", [900, 5000])
def test_top_p_agrees_with_a_full_sort_however_wide_the_nucleus_is(vocabulary: int) -> None:
    values = logits(1, vocabulary, seed=3) * 0.1  # flat: thousands of tokens are needed
    order = values[0].softmax(0).sort(descending=True)
    keep = int((order.values.cumsum(0) < 0.9).sum()) + 1
    allowed = set(order.indices[:keep].tolist())
    drawn = sample(values.repeat(300, 1), [row(seed=seed, top_p=0.9) for seed in range(300)])
    assert set(drawn) <= allowed and len(set(drawn)) > 200


def test_top_p_counts_only_what_top_k_left() -> None:
    values = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    drawn = sample(values.repeat(2000, 1), [row(seed=seed, top_k=2, top_p=0.5) for seed in range(2000)])
    assert set(drawn) == {0}, "0.4 of 0.7 is more than a half"


def test_penalties_count_output_tokens() -> None:
    values = torch.tensor([[2.0, 1.9, 0.0]])
    assert sample(values.clone(), [row(temperature=0.0, presence_penalty=0.2)]) == [0]
    assert sample(values.clone(), [row(output=(0,), temperature=0.0, presence_penalty=0.2)]) == [1]
    assert sample(values.clone(), [row(output=(0,), temperature=0.0, frequency_penalty=0.05)]) == [0]
    assert sample(values.clone(), [row(output=(0, 0, 0), temperature=0.0, frequency_penalty=0.05)]) == [1]


def test_end_of_sequence_waits_for_min_tokens() -> None:
    values = torch.tensor([[0.0, 1.0, 9.0, 2.0]])
    assert sample(values.clone(), [row(output=(1,), temperature=0.0, min_tokens=2)]) == [3]
    assert sample(values.clone(), [row(output=(1, 3), temperature=0.0, min_tokens=2)]) == [2]


def test_half_precision_logits_are_sampled_in_float32() -> None:
    values = logits(2).to(torch.bfloat16)
    rows = [row(temperature=1.0), row(temperature=0.0)]
    assert sample(values, rows) == sample(values.float(), rows)
