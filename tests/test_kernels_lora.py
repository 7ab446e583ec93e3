"""Products with several requests' adapters in one batch: kernels against their twins."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.lora import LoraFactors, lora_expand, lora_expand_reference, lora_shrink, lora_shrink_reference
from kit.interpreter import order_products
from kit.pools import DEVICE, DTYPES, TOLERANCE, random


def factors_of(ranks: list[int], size_in: int, size_out: int, dtype: torch.dtype) -> LoraFactors:
    """Of adapters of these ranks; 0: one that adds nothing here."""
    pairs = [
        (random(rank, size_in, dtype=dtype, seed=rank) / 4, random(size_out, rank, dtype=dtype, seed=rank + 1) / 4)
        if rank
        else None
        for rank in ranks
    ]
    return LoraFactors.of(pairs, DEVICE)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size_in", "size_out", "ranks"), [(80, 96, [8, 16, 3, 0]), (200, 40, [33, 1, 64, 0])])
def test_lora(size_in: int, size_out: int, ranks: list[int], dtype: torch.dtype) -> None:
    lengths, adapters = [1, 17, 3, 1, 40, 2], torch.tensor([2, -1, 0, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    bounds, factors = bounds_of(lengths), factors_of(ranks, size_in, size_out, dtype)
    x = random(sum(lengths), size_in, dtype=dtype) / 4
    whole = random(sum(lengths), 2 * size_out, dtype=dtype, seed=3)  # a linear's outputs are columns of a product
    y, twin, before = whole[:, size_out:], whole[:, size_out:].clone(), whole.clone()
    h, wanted = lora_shrink(x, factors, bounds, adapters), lora_shrink_reference(x, factors, bounds, adapters)
    for start, stop, rank in ((0, 1, ranks[2]), (18, 22, ranks[0]), (22, 62, ranks[1])):
        torch.testing.assert_close(h[start:stop, :rank], wanted[start:stop, :rank], **TOLERANCE[dtype])
    lora_expand(h, factors, y, bounds, adapters)
    lora_expand_reference(wanted, factors, twin, bounds, adapters)
    torch.testing.assert_close(y, twin, **{name: 2 * x for name, x in TOLERANCE[dtype].items()})
    for rows in (slice(1, 18), slice(62, 64)):  # no adapter; one that adds nothing here
        assert torch.equal(y[rows], before[rows, size_out:])
    assert torch.equal(whole[:, :size_out], before[:, :size_out])
    assert not torch.equal(y[:1], before[:1, size_out:])


def test_a_row_is_bitwise_the_same_whatever_adapters_run_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order_products(monkeypatch)
    x, y = random(20, 150), random(20, 40, seed=3)
    whole, alone = factors_of([64, 5], 150, 40, torch.float32), factors_of([5], 150, 40, torch.float32)
    together, single = y.clone(), y[19:].clone()
    bounds, adapters = bounds_of([19, 1]), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    lora_expand(lora_shrink(x, whole, bounds, adapters), whole, together, bounds, adapters)
    bounds, adapters = bounds_of([1]), torch.tensor([0], dtype=torch.int32, device=DEVICE)
    lora_expand(lora_shrink(x[19:], alone, bounds, adapters), alone, single, bounds, adapters)
    assert torch.equal(together[19:], single)
