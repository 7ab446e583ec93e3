"""A row's normaliser and its largest values, against torch's in float64 and a stable sort."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from headrace.kernels.cpu.exponential import exp, exp_below
from headrace.kernels.cpu.logprobs import summarize
from hypothesis import given

SIZES = (1, 2, 15, 16, 255, 256, 257, 1000, 4096, 49_152)
MOST = (0, 1, 5, 20)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(logits: torch.Tensor, most: int) -> None:
    norms, values, places = summarize(logits, most)
    expected, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected[:, :most])
    assert torch.equal(places, order[:, :most])
    exact = logits.double().log_softmax(-1)
    told = logits - norms[:, :1] - norms[:, 1:]
    torch.testing.assert_close(told, exact.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_rows_of_any_size(size: int, spread: float) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * spread + 20
    for most in {*MOST, size if size < 5000 else 0}:
        check(logits, min(most, size))


@pytest.mark.parametrize("size", [3, 600])
def test_the_first_of_equals_comes_first(size: int) -> None:
    logits = (torch.randn(9, size, generator=torch.Generator().manual_seed(1)) * 2).round()
    for most in (1, 3):
        check(logits, most)
    check(logits.sort().values, 3)
    check(logits.sort(descending=True).values, 3)


def test_masks() -> None:
    """Values of -inf are none, and fill up the top where there are no others."""
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2))
    logits[:, ::3] = -torch.inf
    check(logits, 20)
    logits[:, 4:] = -torch.inf
    check(logits, 20)
    logits[:, 1:] = -torch.inf
    logits[:, 0] = 3.5
    check(logits, 20)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_distribution_say_so_and_harm_no_other(bad: float) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3))
    clean = summarize(logits, 5)
    for place in range(500) if bad == -torch.inf else (0, 300, 499):
        logits[1, place] = bad
    norms, values, places = summarize(logits, 5)
    assert norms[1, 1].isnan()
    assert sorted(set(places[1].tolist())) == sorted(places[1].tolist())
    for told, before in zip((norms, values, places), clean, strict=True):
        assert torch.equal(told[::2], before[::2])


def test_a_row_has_the_same_bits_anywhere(threads: None) -> None:
    wide = torch.randn(32, 3000, generator=torch.Generator().manual_seed(4)) * 3
    logits = wide[:, 7:2900]  # rows with others between them
    torch.set_num_threads(1)
    alone = [summarize(row[None], 20) for row in logits]
    for count in (1, 2):
        torch.set_num_threads(count)
        together = summarize(logits, 20)
        for number, one in enumerate(alone):
            assert all(torch.equal(part[number], own[0]) for part, own in zip(together, one, strict=True))


@given(
    st.lists(
        st.one_of(st.floats(-60, 60, width=32), st.sampled_from([-torch.inf, 0.0, -0.0, 1.0])), min_size=1, max_size=600
    ),
    st.integers(0, 30),
)
def test_any_row(row: list[float], most: int) -> None:
    check(torch.tensor([[*row, 1.0]]), min(most, len(row) + 1))


def test_exp_below_has_the_bits_of_exp() -> None:
    for x in torch.cat([torch.linspace(-100, 0, 999), torch.tensor([-0.0, -torch.inf])]).numpy():
        assert exp_below(x) == exp(x)
    assert np.isnan(exp_below(np.float32(np.nan)))
