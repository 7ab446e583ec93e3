"""Repetition, frequency and presence penalties, at the tokens that a row's request has seen and nowhere else.

bounds        0        3    4          M + 1: the tokens of penalised row m are bounds[m] … bounds[m + 1]
token_ids     17 4 90 |17  |…          distinct within a row
counts         0 2  1 | 1  |…          how often each was generated; 0: it stands in the prompt alone
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _penalties_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    bounds: tl.tensor,
    token_ids: tl.tensor,
    counts: tl.tensor,
    penalties: tl.tensor,
    num_rows: int,
    logits_stride: int,
    TILE: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    place = tl.load(bounds + number) + tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < tl.load(bounds + number + 1)
    repetition = tl.load(penalties + number)
    frequency = tl.load(penalties + num_rows + number)
    presence = tl.load(penalties + 2 * num_rows + number)
    token = tl.load(token_ids + place, mask=inside, other=0)
    count = tl.load(counts + place, mask=inside, other=0.0)
    at = logits + tl.load(rows + number) * logits_stride + token
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x = x - frequency * count - tl.where(count > 0.0, presence, 0.0)
    tl.store(at, x.to(logits.dtype.element_ty), mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Penalise, in place. Repetition looks at prompt and output, the others at the output alone.

    Args:
        logits: [R, V], the vocabulary contiguous.
        rows: [M] int64, which of them are penalised; bounds: [M + 1] int32.
        token_ids: [P] int64; counts: [P] float32.
        penalties: [3, M] float32: repetition (1 for none), frequency and presence (0 for none).
        longest: tokens of the row that has most.
    """
    assert logits.stride(-1) == 1, "logits are changed in place, a row at a time"
    tile = 256
    _penalties_kernel[(len(rows), -(-longest // tile))](
        logits, rows, bounds, token_ids, counts, penalties.contiguous(), len(rows), logits.stride(0), TILE=tile
    )


def apply_penalties_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    bounds: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    *,
    longest: int,
) -> None:
    """The twin of `apply_penalties`."""
    lengths = bounds.diff()
    index = rows.repeat_interleave(lengths), token_ids
    repetition, frequency, presence = penalties.repeat_interleave(lengths, dim=1)
    x = logits[index].float()
    x = torch.where(x > 0, x / repetition, x * repetition) - frequency * counts - presence * (counts > 0)
    logits[index] = x.to(logits.dtype)
