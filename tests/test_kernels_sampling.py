"""Sampling on the device: each kernel against its twin, and against the worker's own sampler and noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels import bitmask, penalties, sample
from headrace.worker.engine import adjust
from headrace.worker.engine.noise import row_keys
from kit.pools import DEVICE, random

INF = float("inf")
# Temperature, top-k, top-p, min-p.
LIMITS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.1, 0.0),  # greedy, whatever else is asked
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 20, 0.8, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 10**6, 0.999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.3, 2, 1.0, 1.0),
]


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def columns(limits: list[tuple[float, int, float, float]]) -> Columns:
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(column, device=DEVICE) for column in zip(*limits, strict=True))
    return temperatures, top_ks.int(), top_ps, min_ps


def keys(rows: int, position: int = 0) -> torch.Tensor:
    return row_keys(list(range(100, 100 + rows)), [position] * rows, DEVICE)


@pytest.mark.parametrize(("size", "draws"), [(301, 2), (9000, 1)])
def test_draws(size: int, draws: int) -> None:
    for position in range(draws):
        logits = 3 * random(len(LIMITS), size, seed=position)
        logits[:, ::7] = -INF  # banned
        arguments = (logits, *columns(LIMITS), keys(len(LIMITS), position))
        assert torch.equal(sample.sample(*arguments), sample.sample_reference(*arguments))


def test_ties_are_kept_together_as_in_half_precision() -> None:
    logits = (2 * random(len(LIMITS), 500)).round()  # a handful of values
    for position in range(2):
        arguments = (logits, *columns(LIMITS), keys(len(LIMITS), position))
        assert torch.equal(sample.sample(*arguments), sample.sample_reference(*arguments))


def test_rows_do_not_see_each_other() -> None:
    logits = 3 * random(len(LIMITS), 301)
    together = sample.sample(logits, *columns(LIMITS), keys(len(LIMITS)))
    for row, limits in enumerate(LIMITS[:4]):
        alone = sample.sample(logits[row : row + 1], *columns([limits]), keys(len(LIMITS))[row : row + 1])
        assert alone == together[row]


@pytest.mark.parametrize("limits", [LIMITS[0], LIMITS[1], LIMITS[5]])
def test_a_row_that_is_not_finite_says_so(limits: tuple[float, int, float, float]) -> None:
    logits = random(4, 90)
    logits[0, 7], logits[1, 50], logits[2] = torch.nan, INF, -INF
    tokens = sample.sample(logits, *columns([limits] * 4), keys(4)).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


def test_a_single_allowed_token_is_drawn() -> None:
    logits = torch.full((len(LIMITS), 77), -INF, device=DEVICE)
    logits[:, 42] = -3.0
    assert sample.sample(logits, *columns(LIMITS), keys(len(LIMITS))).tolist() == [42] * len(LIMITS)


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 2,000 draws from six tokens: under 25 with five degrees of freedom but once in 7,000."""
    rows = 2000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0], device=DEVICE)
    limits = columns([(1.0, 0, 1.0, 0.0)] * rows)
    tokens = sample.sample_reference(logits.expand(rows, -1), *limits, keys(rows))
    some = slice(0, 20)
    drawn = sample.sample(logits.expand(20, -1), *columns([(1.0, 0, 1.0, 0.0)] * 20), keys(rows)[some])
    assert torch.equal(drawn, tokens[some])
    expected = logits.softmax(-1) * rows
    assert ((tokens.bincount(minlength=6) - expected).square() / expected).sum() < 25


@pytest.mark.parametrize("size", [70, 2500])
def test_bitmask(size: int) -> None:
    masks = torch.randint(-(2**31), 2**31, (3, -(-size // 32)), generator=torch.Generator().manual_seed(0))
    masks, rows = masks.to(DEVICE, torch.int32), torch.tensor([4, -1, 0], device=DEVICE)
    logits, twin = random(5, size), random(5, size)
    bitmask.apply_bitmask(logits, masks, rows)
    bitmask.apply_bitmask_reference(twin, masks, rows)
    assert torch.equal(logits, twin)
    assert bool(logits[[1, 2, 3]].isfinite().all())
    assert bool(logits[[0, 4]].isinf().any())


@pytest.mark.parametrize("size", [70, 2500])
def test_penalties(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 60, size // 2]
    ids = torch.cat([torch.randperm(size, generator=generator)[:length] for length in lengths]).to(DEVICE)
    counts = torch.randint(0, 3, (sum(lengths),), generator=generator).float().to(DEVICE)
    rows = torch.tensor([2, 0, 4, 1], device=DEVICE)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    asked = torch.tensor([[1.3, 1.0, 1.0, 0.8], [0.0, 0.5, 0.25, 0.1], [0.0, -0.2, 0.0, 1.0]], device=DEVICE)
    logits, twin = random(5, size), random(5, size)
    logits[2, ids[0]] = twin[2, ids[0]] = -INF
    before = logits.clone()
    arguments = (rows, bounds, ids, counts, asked)
    penalties.apply_penalties(logits, *arguments, longest=max(lengths))
    penalties.apply_penalties_reference(twin, *arguments, longest=max(lengths))
    torch.testing.assert_close(logits, twin, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits[[0, 3]], before[[0, 3]])  # no token; not asked for
    assert not torch.equal(logits[1], before[1])
    untouched = torch.ones(size, dtype=torch.bool, device=DEVICE).index_fill(0, ids[3:63], False)
    assert torch.equal(logits[4, untouched], before[4, untouched])


def test_the_sampler_penalises_alike_by_kernel_and_by_torch() -> None:
    ids = [np.array([4, 9, 30]), np.array([9])]
    counts, asked = np.array([0, 2, 1, 0], np.float32), np.array([[1.2, 0.3, 0.1], [0.7, 0, 0]], np.float32)
    by_kernel, by_torch = random(3, 40), random(3, 40)
    adjust._by_kernel(by_kernel, [2, 0], ids, counts, asked)
    adjust._by_torch(by_torch, [2, 0], ids, counts, asked)
    torch.testing.assert_close(by_kernel, by_torch, atol=1e-6, rtol=1e-6)
