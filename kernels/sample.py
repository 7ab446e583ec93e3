"""Draws the next tokens on the device: temperature, top-k, top-p, min-p, Gumbel noise, argmax. Nothing is sorted.

    1  a program a row       the least score that the row's limits keep, by bisection over its values
    2  programs by row and tile of the vocabulary    argmax of score + noise among the kept
    3  a program a row       argmax of the tiles' bests; -1 where a logit was NaN or infinite, or all were -inf

argmax(score + noise) is a draw from softmax(score), so no softmax is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gumbel import gumbel, gumbel_reference
from .tiles import last_dim_dense, power_of_two


@triton.jit
def _tile(logits: tl.tensor, start: int, size: int, TILE: tl.constexpr) -> tl.tensor:
    token = start + tl.arange(0, TILE)
    return tl.load(logits + token, mask=token < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _extremes(logits: tl.tensor, size: int, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest value, and the least finite one (the largest where none is)."""
    high = tl.full([TILE], float("-inf"), tl.float32)
    low = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, size, TILE):
        x = _tile(logits, start, size, TILE)
        high = tl.maximum(high, x)
        low = tl.minimum(low, tl.where(x == float("-inf"), float("inf"), x))
    most = tl.max(high, 0)
    return tl.minimum(tl.min(low, 0), most), most


@triton.jit
def _top_k_threshold(logits: tl.tensor, size: int, low: float, high: float, top_k: int, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The top_k-th largest value, between values `low` and `high`. Both ends always are values of the row, and each
    turn excludes one at least:  … low … | … mid … | … high …   with at least top_k values from `low` on."""
    while low < high:
        mid = low + (high - low) * 0.5
        mid = tl.where(mid <= low, high, mid)
        count = tl.zeros([TILE], tl.int32)
        above = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, size, TILE):
            x = _tile(logits, start, size, TILE)
            count += (x >= mid).to(tl.int32)
            above = tl.minimum(above, tl.where(x >= mid, x, float("inf")))
            below = tl.maximum(below, tl.where(x < mid, x, float("-inf")))
        enough = tl.sum(count, 0) >= top_k
        low = tl.where(enough, tl.min(above, 0), low)
        high = tl.where(enough, high, tl.maximum(tl.max(below, 0), low))
    return low


@triton.jit
def _mass(logits: tl.tensor, size: int, least: float, high: float, inverse: float, TILE: tl.constexpr) -> tl.tensor:
    """The sum of exp((x - high) * inverse) over x >= least."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, size, TILE):
        x = _tile(logits, start, size, TILE)
        mass += tl.where(x >= least, tl.exp((x - high) * inverse), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _top_p_threshold(  # type: ignore[no-untyped-def]
    logits: tl.tensor, size: int, low: float, high: float, inverse: float, share: float, TILE: tl.constexpr
):
    """The least value x with less mass than `share` above it, between values `low` and `high`; see above."""
    most = high
    while low < high:
        mid = low + (high - low) * 0.5
        mid = tl.where(mid >= high, low, mid)
        mass = tl.zeros([TILE], tl.float32)
        above = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, size, TILE):
            x = _tile(logits, start, size, TILE)
            mass += tl.where(x > mid, tl.exp((x - most) * inverse), 0.0)
            above = tl.minimum(above, tl.where(x > mid, x, float("inf")))
            below = tl.maximum(below, tl.where(x <= mid, x, float("-inf")))
        few = tl.sum(mass, 0) < share
        high = tl.where(few, tl.maximum(tl.max(below, 0), low), high)
        low = tl.where(few, low, tl.minimum(tl.min(above, 0), high))
    return high


@triton.jit
def _threshold_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    thresholds: tl.tensor,
    stride: int,
    size: int,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k = (top_k > 0) & (top_k < size)
    tl.store(thresholds + row, float("-inf"))
    if (temperature > 0.0) & (by_k | (top_p < 1.0) | (min_p > 0.0)):
        at = logits + row * stride
        low, high = _extremes(at, size, TILE)
        if (high < float("inf")) & (high > float("-inf")):  # else the row is refused, and its sums are not numbers
            inverse = 1.0 / temperature
            least = low
            if by_k:
                least = _top_k_threshold(at, size, low, high, top_k, TILE)
            if top_p < 1.0:  # a share of what top-k left over
                share = _mass(at, size, least, high, inverse, TILE) * top_p
                least = _top_p_threshold(at, size, least, high, inverse, share, TILE)
            if min_p > 0.0:
                least = tl.maximum(least, tl.minimum(high + tl.log(min_p) * temperature, high))
            tl.store(thresholds + row, least)


@triton.jit
def _draw_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    thresholds: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    stride: int,
    size: int,
    num_tiles: int,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = _tile(logits + row * stride, tile * TILE, size, TILE)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    temperature = tl.load(temperatures + row)
    score = x
    if temperature > 0.0:
        key_low = tl.load(keys + row * 2).to(tl.uint32, bitcast=True)
        key_high = tl.load(keys + row * 2 + 1).to(tl.uint32, bitcast=True)
        score = x / temperature + gumbel(token, key_low, key_high)
        score = tl.where(x >= tl.load(thresholds + row), score, float("-inf"))
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, size), 0)
    tl.store(best_scores + row * num_tiles + tile, tl.where(broken > 0, float("inf"), best))
    tl.store(best_tokens + row * num_tiles + tile, first)


@triton.jit
def _pick_kernel(
    best_scores: tl.tensor, best_tokens: tl.tensor, tokens: tl.tensor, num_tiles: int, TILES: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    scores = tl.load(best_scores + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    best = tl.max(scores, 0)
    candidates = tl.load(best_tokens + row * num_tiles + tile, mask=tile < num_tiles, other=2147483647)
    token = tl.min(tl.where(scores == best, candidates, 2147483647), 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row. Nothing of the arguments' contents is looked at on the host.

    Args:
        logits: [R, V], -inf for tokens that may not come; rows at any stride.
        temperatures: [R] float32; 0 takes the likeliest token, the first of equals.
        top_ks: [R] int32; 0 for no limit. Values that equal the k-th are kept, too.
        top_ps: [R] float32, a share of what top-k keeps: a token stays while those likelier than it have less.
        min_ps: [R] float32, a share of the likeliest token's probability.
        keys: [R, 2] int32, of the noise: `row_keys` of the worker.

    Returns:
        [R] int64; -1 where the row has NaN or +inf, or nothing but -inf.
    """
    logits = last_dim_dense(logits)
    rows, size = logits.shape
    tile = min(power_of_two(size), 2048)
    num_tiles = -(-size // tile)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best_scores = torch.empty(rows, num_tiles, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(rows, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    limits = (top_ks, top_ps, min_ps)
    wide = min(power_of_two(size), 8192)
    _threshold_kernel[(rows,)](logits, temperatures, *limits, thresholds, stride, size, TILE=wide, num_warps=16)
    _draw_kernel[(rows, num_tiles)](
        logits,
        temperatures,
        keys.contiguous(),
        thresholds,
        best_scores,
        best_tokens,
        stride,
        size,
        num_tiles,
        TILE=tile,
    )
    _pick_kernel[(rows,)](best_scores, best_tokens, tokens, num_tiles, TILES=power_of_two(num_tiles))
    return tokens


def sample_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """The twin of `sample`, by sorting."""
    size = logits.shape[1]
    x = logits.float()
    greedy = temperatures == 0
    scaled = x / torch.where(greedy, 1.0, temperatures)[:, None]
    ordered = scaled.sort(-1, descending=True).values
    last = torch.where((top_ks > 0) & (top_ks < size), top_ks, size).long() - 1
    kept = scaled >= ordered.gather(1, last[:, None])
    probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    ordered, order = probabilities.sort(-1, descending=True)
    likelier = ordered.cumsum(-1) - ordered
    first_equal = torch.searchsorted(-ordered, -ordered)  # what is equally likely is kept or dropped together
    kept &= torch.empty_like(kept).scatter_(1, order, likelier.gather(1, first_equal) < top_ps[:, None])
    kept &= probabilities >= min_ps[:, None] * probabilities.amax(-1, keepdim=True)
    drawn = (scaled + gumbel_reference(keys, size)).masked_fill(~kept, -torch.inf).argmax(-1)
    best = x.amax(-1)  # NaN wins
    return torch.where(best.isfinite(), torch.where(greedy, x.argmax(-1), drawn), -1)
