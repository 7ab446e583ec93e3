"""What several kernels share: sizes of tiles, and device functions of a few lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Softmax in base 2: a GPU has an instruction for exp2, and multiplies first for exp.
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# tl.dot takes no fewer rows, columns or products than this.
LEAST_DOT = 16


def power_of_two(n: int, *, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`: what a tile of n elements is padded to."""
    return max(int(triton.next_power_of_2(n)), least)


def compute_capability() -> int:
    """Of the GPU that kernels run on, such as 75 (T4), 80 (A100), 89 (L4) or 90 (H100, H200)."""
    if triton.knobs.runtime.interpret:
        return 90
    return int(triton.runtime.driver.active.get_current_target().arch)


def attention_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Keys (and rows, where there are many) that an attention program holds at once: what registers and shared memory
    allow. Float32 is multiplied without tensor cores and takes more registers, and so does all before Ampere."""
    width = power_of_two(head_dim, least=LEAST_DOT) * (1 if dtype.itemsize == 2 else 4)
    if compute_capability() < 80:
        width *= 2
    return 64 if width <= 128 else 32 if width <= 256 else LEAST_DOT


def last_dim_dense(x: torch.Tensor) -> torch.Tensor:
    """`x` with its last dimension contiguous, copied only where it is not; kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """From exp alone, which must not overflow; at 20 it is 1 in float32."""
    return 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0)


@triton.jit
def log2_scores(products: tl.tensor, scale: float, softcap: float, CAPPED: tl.constexpr) -> tl.tensor:
    """Products of queries and keys as scores, in units of log2."""
    scores = products * scale
    if CAPPED:
        scores = softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def load_paged(
    pool: tl.tensor,
    block: tl.tensor,
    offset: tl.tensor,
    stride_block: int,
    stride_token: int,
    inside: tl.tensor,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> tl.tensor:
    """A KV head's rows at `offset` within `block`, [keys, PADDED_DIM], 0 where not `inside`; `pool` points to that head
    in block 0."""
    dim = tl.arange(0, PADDED_DIM)
    at = pool + (block * stride_block + offset * stride_token)[:, None] + dim[None, :]
    return tl.load(at, mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(scores: tl.tensor, best: tl.tensor):  # type: ignore[no-untyped-def]
    """Softmax over keys that come a tile at a time, in units of log2.

    scores [rows, keys], -inf where a row does not see a key; best [rows], the largest score of the tiles before.

    Returns:
        The tile's weights [rows, keys], not divided by their sum; what the weights before are to be multiplied by
        [rows]; and the largest score so far.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet: -inf - -inf is NaN
    return tl.exp2(scores - safe_best[:, None]), tl.exp2(best - safe_best), new_best


@triton.jit
def find_segment(tile: int, starts: tl.tensor, num_segments: int, TILE_ROWS: tl.constexpr) -> tl.tensor:
    """The segment that tile number `tile` works on, where segment s begins with tile `starts[s] // TILE_ROWS + s`.

    rows     |0 1 2 3 4 5 6|7 8|9|10 11 12 13 …        starts = 0, 7, 9, 10, …;  TILE_ROWS = 4
    tiles     0       1     2    3 4 …                 floor(start / 4) + s = 0, 2, 4, 5, …: one of segment 1 is spare

    A segment of n rows has room for floor(n / TILE_ROWS) + 1 tiles, so that each tile finds its segment by itself: the
    grid's size is a bound from the number of rows and of segments, and the host need not know the lengths.
    """
    low = 0
    high = num_segments
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TILE_ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low
