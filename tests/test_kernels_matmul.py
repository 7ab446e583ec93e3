"""The batch-invariant linear against its twin, and its rows against themselves in other company."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.matmul import STRETCH, linear, linear_reference
from kit.interpreter import order_products
from kit.pools import DTYPES, TOLERANCE, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 64, 64), (3, 33, 7), (70, STRETCH + 41, 130)])
def test_linear(rows: int, size_in: int, size_out: int, spread: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, size_in + 3, dtype=dtype)[:, :size_in], random(size_out, size_in, dtype=dtype, seed=1)
    weight /= size_in**0.5
    for bias in (None, random(size_out, dtype=dtype, seed=2)):
        wanted = linear_reference(x, weight, bias)
        got = linear(x, weight, bias, spread=spread)
        assert (got.dtype, got.shape) == (wanted.dtype, (rows, size_out))
        torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
        torch.testing.assert_close(wanted, torch.nn.functional.linear(x, weight, bias), **TOLERANCE[dtype])


def test_leading_dimensions_stay() -> None:
    x, weight = random(2, 3, 20), random(5, 20, seed=1)
    torch.testing.assert_close(linear(x, weight), x @ weight.T, **TOLERANCE[torch.float32])
    assert linear(x[:, :0], weight).shape == (2, 0, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_bitwise_the_same_whatever_stands_beside_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_products(monkeypatch)
    x, weight, bias = random(130, STRETCH + 20, dtype=dtype), random(9, STRETCH + 20, dtype=dtype, seed=1), random(9)
    whole = linear(x, weight, bias.to(dtype), spread=False)
    for count in (1, 2, 3, 16, 17, 64, 65):
        for begin in (0, 130 - count):
            rows = slice(begin, begin + count)
            for spread in (False, True):
                assert torch.equal(linear(x[rows], weight, bias.to(dtype), spread=spread), whole[rows])
