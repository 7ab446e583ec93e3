"""What numba compiles for sampling against the twins: the same tokens whatever the limits, the same tokens banned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from headrace.kernels.cpu.bitmask import apply_bitmask
from headrace.kernels.cpu.sample import sample

sample_reference = pytest.importorskip("headrace.kernels.sample").sample_reference
apply_bitmask_reference = pytest.importorskip("headrace.kernels.bitmask").apply_bitmask_reference

KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_p": 0.99},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 900, "top_p": 0.5},
    {"top_p": 0.05},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def arguments(rows: int, **kind: float) -> tuple[torch.Tensor, ...]:
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=torch.Generator().manual_seed(0))
    return (
        torch.full((rows,), kind.get("temperature", 1.0)),
        torch.full((rows,), int(kind.get("top_k", 0)), dtype=torch.int32),
        torch.full((rows,), kind.get("top_p", 1.0)),
        torch.full((rows,), kind.get("min_p", 0.0)),
        keys.to(torch.int32),
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [1, 7, 1000, 1024, 3001])
def test_the_twin_draws_the_same(size: int, kind: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(size)
    for spread in (0.5, 4.0):
        logits = torch.randn(60, size, generator=generator) * spread
        assert torch.equal(sample(logits, *arguments(60, **kind)), sample_reference(logits, *arguments(60, **kind)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equal_values_are_kept_or_dropped_together(kind: dict[str, float]) -> None:
    logits = (torch.randn(60, 500, generator=torch.Generator().manual_seed(1)) * 4).round() / 2
    logits[:, ::3] = -torch.inf
    assert torch.equal(sample(logits, *arguments(60, **kind)), sample_reference(logits, *arguments(60, **kind)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_without_a_token(kind: dict[str, float]) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    logits[0, 17], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3] = -torch.inf
    logits[3, 40] = -5.0
    tokens = sample(logits, *arguments(5, **kind)).tolist()
    assert tokens[:4] == [-1, -1, -1, 40]
    assert 0 <= tokens[4] < 300


def test_a_row_is_the_same_alone_and_with_every_number_of_threads() -> None:
    logits = torch.randn(33, 2000, generator=torch.Generator().manual_seed(1)) * 3
    given: Any = arguments(33, top_p=0.9, temperature=1.1)
    whole, before = sample(logits, *given), torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(sample(logits, *given), whole)
        for one in range(33):
            place = slice(one, one + 1)
            assert torch.equal(sample(logits[place], *(value[place] for value in given)), whole[place])
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 31, 64, 100, 1000])
def test_masks_ban_what_their_twin_bans(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator)
    words = torch.randint(-(2**31), 2**31, (5, -(-size // 64) * 2), generator=generator).to(torch.int32)
    words[1], words[2] = -1, 0
    words[3, ::2], words[3, 1::2] = -1, 0
    rows, wanted = torch.tensor([4, 0, 3, 1, -1]), logits.clone()
    apply_bitmask_reference(wanted, words[:, : -(-size // 32)], rows)
    apply_bitmask(logits, words, rows)
    assert torch.equal(logits, wanted)
