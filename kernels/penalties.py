"""Repetition, frequency and presence penalties, from state that stays on the device by slot.

prompt_mask     [slots, ceil(V / 32)] int32    bit t % 32 of word t // 32: token t stands in the prompt
output_counts   [slots, V] int32               how often token t was generated
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import power_of_two


@triton.jit
def _penalties_kernel(
    logits: tl.tensor,
    slots: tl.tensor,
    prompt_mask: tl.tensor,
    output_counts: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    logits_stride: int,
    mask_stride: int,
    counts_stride: int,
    size: int,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(repetition + row)
    per_token = tl.load(frequency + row)
    once = tl.load(presence + row)
    if (factor == 1.0) & (per_token == 0.0) & (once == 0.0):
        return
    slot = tl.load(slots + row)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < size
    at = logits + row * logits_stride + token
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    count = tl.load(output_counts + slot * counts_stride + token, mask=inside, other=0)
    word = tl.load(prompt_mask + slot * mask_stride + token // 32, mask=inside, other=0)
    seen = (count > 0) | (((word >> (token % 32)) & 1) != 0)
    x = tl.where(seen, tl.where(x > 0.0, x / factor, x * factor), x)
    x = x - count.to(tl.float32) * per_token - tl.where(count > 0, once, 0.0)
    tl.store(at, x.to(logits.dtype.element_ty), mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Penalise, in place. Repetition looks at prompt and output, the others at the output alone.

    Args:
        logits: [R, V], the vocabulary contiguous.
        slots: [R] int64, each row's place in the state.
        prompt_mask: [slots, ceil(V / 32)] int32; output_counts: [slots, V] int32.
        repetition: [R] float32, 1 for none; frequency, presence: [R] float32, 0 for none.
    """
    assert logits.stride(-1) == 1, "logits are changed in place, a row at a time"
    tile = min(power_of_two(logits.shape[1]), 1024)
    _penalties_kernel[(len(slots), -(-logits.shape[1] // tile))](
        logits,
        slots,
        prompt_mask,
        output_counts,
        repetition,
        frequency,
        presence,
        logits.stride(0),
        prompt_mask.stride(0),
        output_counts.stride(0),
        logits.shape[1],
        TILE=tile,
    )


def apply_penalties_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """The twin of `apply_penalties`."""
    bits = (prompt_mask[slots][:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    in_prompt = bits.flatten(1)[:, : logits.shape[1]] != 0
    counts = output_counts[slots]
    x, factor = logits.float(), repetition[:, None]
    x = torch.where(in_prompt | (counts > 0), torch.where(x > 0, x / factor, x * factor), x)
    logits.copy_(x - counts * frequency[:, None] - (counts > 0) * presence[:, None])
