"""Linears with weights packed once: two-byte weights are read as they are stored and multiplied in float32.

A decoding step reads every weight once and does little else, so its time is bytes over bandwidth; weights that a
checkpoint stores in bfloat16 or float16 lose nothing by staying so, and take half of what float32 would.

    weight [N, K] ──pack──► [ceil(N / 16), K, 16]       panel p holds outputs 16 p … 16 p + 15, input by input
"""

from __future__ import annotations

import numpy as np
import torch

from .exponential import gelu_tanh, silu
from .panels import AHEAD, BFLOAT16, FLOAT16, FLOAT32, INT8, PANEL, multiply, multiply_two
from .team import address, cpu_jit, empty, floats_at, kernel, take

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int8: INT8}
SILU, GELU_TANH = 0, 1
_CACHED = 49152  # float32 of x that stay in a core's second-level cache while the panels go by


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Weights [N, K] of a kind in `KINDS` as panels [ceil(N / 16), K, 16] of the same dtype, filled up with zeros."""
    outputs, inputs = weight.shape
    padded = weight.new_zeros(-(-outputs // PANEL) * PANEL, inputs)
    padded[:outputs] = weight
    return padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()


def unpack(panels: torch.Tensor, out_features: int) -> torch.Tensor:
    """What `pack` was given."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:out_features].contiguous()


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weights [N, K], symmetric for each output, and their scales [N] float32."""
    weight = weight.float()
    scales = weight.abs().amax(1).clamp_(min=1e-12) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T (* scales) (+ bias) (+ residual).

    Args:
        x: [M, K] float32, contiguous.
        panels: from `pack`, or every so many of such panels; each in one piece.
        bias, scales: float32, as long as the panels are wide (N rounded up to 16).
        residual: [M, N] float32, contiguous; only where N is a multiple of 16.

    Returns:
        [M, N] float32. Each row is the same bit for bit whatever M and the number of threads are.
    """
    rows, inputs = x.shape
    width = panels.shape[0] * PANEL
    out = empty(rows, width)
    pointers = x.data_ptr(), panels.data_ptr(), out.data_ptr()
    size = panels.stride(0) * panels.itemsize
    added = address(bias), address(scales), KINDS[panels.dtype], size, address(residual)
    _linear(*pointers, rows, inputs, width, *added)
    return out if width == out_features else out[:, :out_features].contiguous()


def gated(
    x: torch.Tensor, panels: torch.Tensor, out_features: int, activation: int, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(x @ gate.T) * (x @ up.T).

    Args:
        x: [M, K] float32, contiguous.
        panels: [ceil(N / 16), 2, K, 16], a panel of gate before each of up.
        activation: SILU or GELU_TANH.
        scales: [ceil(N / 16), 2, 16] float32.

    Returns:
        [M, N] float32.
    """
    rows, inputs = x.shape
    width = panels.shape[0] * PANEL
    out = empty(rows, width)
    pointers = x.data_ptr(), panels.data_ptr(), out.data_ptr()
    _gated(*pointers, rows, inputs, width, address(scales), KINDS[panels.dtype], activation)
    return out if width == out_features else out[:, :out_features].contiguous()


@cpu_jit
def _product(kind, x, w, following, inputs, out, width, rows):
    """A panel of any kind: the choice is made once a panel, so that the loops inside know their types."""
    if kind == BFLOAT16:
        multiply(BFLOAT16, 0, x, inputs, w, w + AHEAD, following, inputs, out, width, rows)
    elif kind == FLOAT16:
        multiply(FLOAT16, 0, x, inputs, w, w + AHEAD, following, inputs, out, width, rows)
    elif kind == INT8:
        multiply(INT8, 0, x, inputs, w, w + AHEAD, following, inputs, out, width, rows)
    else:
        multiply(FLOAT32, 0, x, inputs, w, w + AHEAD, following, inputs, out, width, rows)


@cpu_jit
def _two_products(kind, x, ws, following, inputs, outs, widths, rows):
    """Two panels of a kind."""
    aheads = (ws[0] + AHEAD, ws[1] + AHEAD)
    if kind == BFLOAT16:
        multiply_two(BFLOAT16, 0, x, inputs, ws, aheads, following, inputs, outs, widths, rows)
    elif kind == FLOAT16:
        multiply_two(FLOAT16, 0, x, inputs, ws, aheads, following, inputs, outs, widths, rows)
    elif kind == INT8:
        multiply_two(INT8, 0, x, inputs, ws, aheads, following, inputs, outs, widths, rows)
    else:
        multiply_two(FLOAT32, 0, x, inputs, ws, aheads, following, inputs, outs, widths, rows)


@cpu_jit
def _scale_and_shift(out, width, rows, scales, bias):
    for row in range(rows):
        cells = floats_at(out + 4 * row * width)
        if scales:
            factors = floats_at(scales)
            for column in range(PANEL):
                cells[column] *= factors[column]
        if bias:
            terms = floats_at(bias)
            for column in range(PANEL):
                cells[column] += terms[column]


@cpu_jit
def _bytes(kind):
    return 4 if kind == FLOAT32 else 1 if kind == INT8 else 2


@cpu_jit
def _block(inputs):
    """Rows of x that are multiplied with all of a piece's panels before the next ones."""
    return max(24, _CACHED // inputs // 6 * 6)


@kernel
def _linear(words):
    x, w, out, rows, inputs, width = words[1], words[2], words[3], words[4], words[5], words[6]
    bias, scales, kind, size, residual = words[7], words[8], words[9], words[10], words[11]
    panels, block = width // PANEL, _block(inputs)
    pieces = (panels + 1) // 2
    piece, following = 0, take(words)
    while following < pieces:
        piece, following = following, take(words)  # known early, so that its weights are on their way
        panel, after = piece * 2, w + min(following, pieces - 1) * 2 * size
        panel_w = w + panel * size
        for row in range(0, rows, block):
            count, here = min(block, rows - row), x + 4 * row * inputs
            cells = out + 4 * (row * width + panel * PANEL)
            last = row + count == rows
            if panel + 1 < panels:
                ws, outs = (panel_w, panel_w + size), (cells, cells + 4 * PANEL)
                _two_products(kind, here, ws, after if last else panel_w, inputs, outs, (width, width), count)
            else:
                _product(kind, here, panel_w, after if last else panel_w, inputs, cells, width, count)
            for number in range(panel, min(panel + 2, panels)):
                cells = out + 4 * (row * width + number * PANEL)
                if scales or bias:
                    step = 4 * number * PANEL
                    _scale_and_shift(cells, width, count, scales + step if scales else 0, bias + step if bias else 0)
                if residual:
                    _add(cells, residual + 4 * (row * width + number * PANEL), width, count)


@cpu_jit
def _add(out, residual, width, rows):
    for row in range(rows):
        cells, terms = floats_at(out + 4 * row * width), floats_at(residual + 4 * row * width)
        for column in range(PANEL):
            cells[column] += terms[column]


@cpu_jit
def _activate(out, width, rows, gates, activation):
    """out *= activation(gates), a panel of each; over all gates at once, since LLVM makes no vectors of 16 unrolled."""
    gate = floats_at(gates)
    if activation == SILU:
        for i in range(rows * PANEL):
            gate[i] = silu(gate[i])
    else:
        for i in range(rows * PANEL):
            gate[i] = gelu_tanh(gate[i])
    for row in range(rows):
        up = floats_at(out + 4 * row * width)
        for column in range(PANEL):
            up[column] *= gate[row * PANEL + column]


@kernel
def _gated(words):
    x, w, out, rows, inputs, width = words[1], words[2], words[3], words[4], words[5], words[6]
    scales, kind, activation = words[7], words[8], words[9]
    panels, size, block = width // PANEL, PANEL * inputs * _bytes(kind), _block(inputs)
    scratch = np.empty(max(min(block, rows), 1) * PANEL, dtype=np.float32)  # an expert may get no row
    gates = np.int64(scratch.ctypes.data)  # numba makes a float of a signed and an unsigned number
    pieces = (panels + 1) // 2
    piece, following = 0, take(words)
    while following < pieces:
        piece, following = following, take(words)
        after = w + min(following, pieces - 1) * 4 * size
        for row in range(0, rows, block):
            count = min(block, rows - row)
            for panel in range(piece * 2, min(piece * 2 + 2, panels)):
                cells, gate = out + 4 * (row * width + panel * PANEL), w + 2 * panel * size
                ws, outs, coming = (gate, gate + size), (gates, cells), gate + 2 * size
                if panel + 1 == min(piece * 2 + 2, panels):
                    coming = after if row + count == rows else w + 4 * piece * size
                _two_products(kind, x + 4 * row * inputs, ws, coming, inputs, outs, (PANEL, width), count)
                if scales:
                    _scale_and_shift(gates, PANEL, count, scales + 4 * 2 * panel * PANEL, 0)
                    _scale_and_shift(cells, width, count, scales + 4 * (2 * panel + 1) * PANEL, 0)
                _activate(cells, width, count, gates, activation)
    scratch[0] = np.float32(0.0)  # a use after the last: numba frees an array once its name is no longer read
