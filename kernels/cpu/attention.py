"""Attention straight out of the paged pool, with the loops of the linears: nothing is gathered, no mask is built.

The pool keeps K and V as panels, so that a block is one operand of a product:

    keys    [num_blocks, heads, key_dim, 16]             scores[rows, 16 tokens] = Σ_d q[rows, d] * keys[d, 16 tokens]
    values  [num_blocks, heads, value_dim / 16, 16, 16]  out[rows, 16 columns] += Σ_t weights[rows, t] * values[t, 16]

A row of a tile is a query: the heads that share a K/V head for a sequence that decodes, up to 12 positions of one head
for a prompt. Tokens that a row must not see get the weight 0, and all sums run in the order of the tokens: what a row
gives does not depend on the others, on how its prompt was cut, or on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch

from .exponential import exp, tanh
from .panels import FLOAT32, PANEL, multiply, multiply_two
from .team import address, as_float, bits, cpu_jit, empty, floats_at, integers_at, kernel, take

BLOCK_SIZE = PANEL  # tokens of a block: a panel
TILE = 12  # rows that are attended together

_NEVER = np.float32(-np.inf)


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Write the K/V of T tokens.

    Args:
        keys, values: the layer's pool, see above, with all but the blocks flat: [num_blocks, …] float32.
        k, v: [heads, T, key_dim] and [heads, T, value_dim] float32, the last dimension contiguous.
        blocks, places: [T] int64, the block of each token and its place in it.

    Raises:
        ValueError: the tokens are not as many as their places, or of another shape than the pool is for.
    """
    heads, tokens, key_dim = k.shape
    if v.shape[:2] != k.shape[:2] or tokens != blocks.shape[0]:
        raise ValueError(f"K {list(k.shape)} and V {list(v.shape)} for {blocks.shape[0]} places")
    if keys.shape[1] != heads * key_dim * PANEL or values.shape[1] != heads * -(-v.shape[2] // PANEL) * PANEL * PANEL:
        raise ValueError(f"K {list(k.shape)} and V {list(v.shape)} do not fit the pool")
    pointers = (tensor.data_ptr() for tensor in (keys, values, k, v, blocks, places))
    _store(*pointers, heads, tokens, key_dim, v.shape[2], *k.stride()[:2], *v.stride()[:2])


@kernel
def _store(words):
    keys, values, k, v = words[1], words[2], words[3], words[4]
    blocks, places = integers_at(words[5]), integers_at(words[6])
    heads, tokens, key_dim, value_dim = words[7], words[8], words[9], words[10]
    columns = (value_dim + PANEL - 1) // PANEL
    while True:
        token = take(words)
        if token >= tokens:
            break
        place = places[token]
        for head in range(heads):
            row = blocks[token] * heads + head
            source = floats_at(k + 4 * (head * words[11] + token * words[12]))
            target = floats_at(keys + 4 * (row * key_dim * PANEL + place))
            for d in range(key_dim):
                target[d * PANEL] = source[d]
            source = floats_at(v + 4 * (head * words[13] + token * words[14]))
            target = floats_at(values + 4 * PANEL * (row * columns * PANEL + place))
            for d in range(value_dim):
                target[d // PANEL * PANEL * PANEL + d % PANEL] = source[d]


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tasks: torch.Tensor,
    *,
    heads: int,
    value_dim: int,
    longest: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for all queries of a step.

    Args:
        q: [query heads, T, key_dim] float32, the last dimension contiguous.
        keys, values: the layer's pool.
        tables: [sequences, width] int64 block tables.
        tasks: [tasks, 7] int64, the tiles: row of `tables`, K/V head, first query head, first row of T, its position,
            number of rows (at most TILE), and 1 where they are positions of one head, 0 where they are heads of one.
        heads: of K/V.
        longest: [1] int64, tokens of the longest context in the step, which bounds the scratch memory.
        window: tokens that a query sees, itself among them; 0 for all.
        sinks: [query heads] float32, one more score each that takes weight and gives nothing.

    Returns:
        [T, query heads, value_dim] float32.

    Raises:
        ValueError: q is of another shape than the pool is for.
    """
    query_heads, rows, key_dim = q.shape
    if keys.shape[1] != heads * key_dim * PANEL:
        raise ValueError(f"Q {list(q.shape)} does not fit a pool of {heads} heads")
    out = empty(rows, query_heads, value_dim)
    pointers = (tensor.data_ptr() for tensor in (q, keys, values, tables, tasks, out))
    _attend(
        *pointers, tables.stride(0), tasks.shape[0], heads, key_dim, value_dim, address(longest), bits(scale), window,
        bits(softcap), address(sinks), *q.stride()[:2], value_dim, query_heads * value_dim,
    )  # fmt: skip
    return out


@cpu_jit
def _scores(q, q_stride, rows, keys, table, first, last, heads, head, key_dim, scores, width, after):
    """`after` is what the last blocks fetch."""
    size, cells, block = 4 * key_dim * PANEL, scores, first
    while block + 1 < last:
        panels = keys + (table[block] * heads + head) * size, keys + (table[block + 1] * heads + head) * size
        # Blocks are pages apart, which no prefetcher foresees.
        aheads = (after, after + size)
        if block + 3 < last:
            aheads = keys + (table[block + 2] * heads + head) * size, keys + (table[block + 3] * heads + head) * size
        outs = (cells, cells + 4 * PANEL)
        multiply_two(FLOAT32, 0, q, q_stride, panels, aheads, aheads[1], key_dim, outs, (width, width), rows)
        block, cells = block + 2, cells + 8 * PANEL
    if block < last:
        panel = keys + (table[block] * heads + head) * size
        multiply(FLOAT32, 0, q, q_stride, panel, panel, panel, key_dim, cells, width, rows)


@cpu_jit
def _weights(scores, width, start, first, last, scale, softcap, sink, has_sink):
    """Turn a row's scores of tokens `start …` into weights, zero outside `first … last`; returns one over their sum."""
    cells = floats_at(scores)
    highest = sink if has_sink else _NEVER
    for i in range(first - start, last - start):
        score = cells[i] * scale
        if softcap > np.float32(0.0):
            score = softcap * tanh(score / softcap)
        cells[i] = score
        highest = max(highest, score)
    for i in range(first - start):
        cells[i] = _NEVER
    for i in range(last - start, width):
        cells[i] = _NEVER
    sums = np.zeros(PANEL, dtype=np.float32)
    for piece in range(0, width, PANEL):
        for lane in range(PANEL):
            score = cells[piece + lane]
            weight = np.float32(0.0) if score == _NEVER else exp(score - highest)
            cells[piece + lane] = weight
            sums[lane] += weight
    total = exp(sink - highest) if has_sink else np.float32(0.0)
    for lane in range(PANEL):
        total += sums[lane]
    return np.float32(1.0) / total


@cpu_jit
def _mix(scores, width, rows, values, table, first, last, heads, head, columns, mixed):
    """Sum the values by their weights into `mixed` [rows, columns * 16]."""
    cells = floats_at(mixed)
    for i in range(rows * columns * PANEL):
        cells[i] = np.float32(0.0)
    size, stride = 4 * PANEL * PANEL, columns * PANEL
    for block in range(first, last):
        row = values + (table[block] * heads + head) * columns * size
        ahead = values + (table[min(block + 1, last - 1)] * heads + head) * columns * size
        weights, out, column = scores + 4 * (block - first) * PANEL, mixed, 0
        while column + 1 < columns:
            panels, aheads, outs = (row, row + size), (ahead, ahead + size), (out, out + 4 * PANEL)
            multiply_two(FLOAT32, 1, weights, width, panels, aheads, aheads[1], PANEL, outs, (stride, stride), rows)
            row, ahead, out, column = row + 2 * size, ahead + 2 * size, out + 8 * PANEL, column + 2
        if column < columns:
            multiply(FLOAT32, 1, weights, width, row, ahead, ahead, PANEL, out, stride, rows)


@cpu_jit
def _hand_out(mixed, rows, columns, inverses, out, stride, value_dim):
    factors = floats_at(inverses)
    for row in range(rows):
        source, target = floats_at(mixed + 4 * row * columns * PANEL), floats_at(out + 4 * row * stride)
        for d in range(value_dim):
            target[d] = source[d] * factors[row]


@cpu_jit
def _tile(words, task, scores, mixed, inverses):
    """Attend for the rows of one task."""
    table = integers_at(words[4] + 8 * task[0] * words[7])
    head, query_head, row, position, rows, along = task[1], task[2], task[3], task[4], task[5], task[6]
    heads, key_dim, value_dim, window = words[9], words[10], words[11], words[14]
    scale, softcap = np.float32(as_float(words[13])), np.float32(as_float(words[15]))
    oldest = max(position - window + 1, 0) if window > 0 else 0
    first, last = oldest // PANEL, (position + (rows - 1) * along) // PANEL + 1
    width, columns = (last - first) * PANEL, (value_dim + PANEL - 1) // PANEL

    q = words[1] + 4 * (query_head * words[17] + row * words[18])
    q_stride = words[18] if along else words[17]
    after = words[3] + 4 * PANEL * PANEL * (table[first] * heads + head) * columns
    _scores(q, q_stride, rows, words[2], table, first, last, heads, head, key_dim, scores, width, after)
    for r in range(rows):
        end = position + r * along + 1
        begin = max(end - window, 0) if window > 0 else 0
        sink = floats_at(words[16])[query_head + r * (1 - along)] if words[16] else np.float32(0.0)
        floats_at(inverses)[r] = _weights(
            scores + 4 * r * width, width, first * PANEL, begin, end, scale, softcap, sink, words[16] != 0
        )
    _mix(scores, width, rows, words[3], table, first, last, heads, head, columns, mixed)
    out = words[6] + 4 * (query_head * words[19] + row * words[20])
    _hand_out(mixed, rows, columns, inverses, out, words[20] if along else words[19], value_dim)


@kernel
def _attend(words):
    value_dim, longest = words[11], integers_at(words[12])[0]
    wide, columns = (longest // PANEL + 2) * PANEL, (value_dim + PANEL - 1) // PANEL * PANEL
    scratch = np.empty(TILE * (wide + columns + 1), dtype=np.float32)
    scores = np.int64(scratch.ctypes.data)
    mixed = scores + 4 * TILE * wide
    inverses = mixed + 4 * TILE * columns
    while True:
        number = take(words)
        if number >= words[8]:
            break
        _tile(words, integers_at(words[5] + 8 * 7 * number), scores, mixed, inverses)
    scratch[0] = np.float32(0.0)  # a use after the last: numba frees an array once its name is no longer read
