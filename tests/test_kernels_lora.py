"""Products with several requests' adapters in one batch: kernels against their twins."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.lora import lora_expand, lora_expand_reference, lora_shrink, lora_shrink_reference
from kit.pools import DEVICE, DTYPES, TOLERANCE, random


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size_in", "rank", "size_out"), [(80, 8, 96), (200, 33, 40)])
def test_lora(size_in: int, rank: int, size_out: int, dtype: torch.dtype) -> None:
    lengths, adapters = [1, 17, 3, 1, 40], torch.tensor([2, -1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    scales = torch.tensor([0.5, 2.0, 1.0], device=DEVICE)
    x = random(sum(lengths), size_in, dtype=dtype) / 4
    a, b = random(3, rank, size_in, dtype=dtype, seed=1) / 4, random(3, size_out, rank, dtype=dtype, seed=2) / 4
    y = random(sum(lengths), size_out, dtype=dtype, seed=3)
    twin, before = y.clone(), y.clone()
    h, wanted = lora_shrink(x, a, bounds, adapters), lora_shrink_reference(x, a, bounds, adapters)
    none = slice(1, 18)
    for got in (h, wanted):
        got[none] = 0
    torch.testing.assert_close(h, wanted, **TOLERANCE[dtype])
    lora_expand(h, b, y, scales, bounds, adapters)
    lora_expand_reference(wanted, b, twin, scales, bounds, adapters)
    torch.testing.assert_close(y, twin, **{name: 2 * x for name, x in TOLERANCE[dtype].items()})
    assert torch.equal(y[none], before[none])
    assert not torch.equal(y[:1], before[:1])
