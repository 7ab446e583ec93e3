"""The inner loop of every product, in LLVM's own vectors.

    out[r, 0:16] (+)= Σ_k x[r, k] * w[k, 0:16]        r < rows, k in order, one fused multiply-add each

A matrix is cut into panels of 16 columns, [count, 16] each, so that a turn of the loop reads 16 numbers side by side
and keeps up to 6 * 16 sums in registers. Each sum runs over k in order in one chain, however many rows there are: a
row's result does not depend on the rows beside it, and that is what makes linears and attention batch-invariant.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import literally, types
from numba.core import cgutils
from numba.extending import intrinsic

from .team import cpu_jit

PANEL = 16  # columns side by side: two registers of AVX2, one of AVX-512
AHEAD = 1024  # bytes between what is multiplied and what is fetched, where panels lie side by side: the core's own
# prefetcher stops at each page
FEW_ROWS = 3  # two panels of so many have as many sums
MAX_ROWS = 6  # 12 sums, 2 weights and a broadcast x fill AVX2's 16 registers
FLOAT32, BFLOAT16, FLOAT16, INT8 = 0, 1, 2, 3  # kinds of weights

_FLOATS = ir.VectorType(ir.FloatType(), PANEL)
_INTS = ir.VectorType(ir.IntType(32), PANEL)
_LONG = ir.IntType(64)
_STORED = {FLOAT32: ir.FloatType(), BFLOAT16: ir.IntType(16), FLOAT16: ir.HalfType(), INT8: ir.IntType(8)}
_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1}


def _load(builder: Any, address: Any, kind: int) -> Any:
    """16 weights as float32. bfloat16 is the upper half of a float32."""
    vector = ir.VectorType(_STORED[kind], PANEL)
    raw = builder.load(builder.bitcast(address, vector.as_pointer()), align=_BYTES[kind])
    if kind == FLOAT32:
        return raw
    if kind == FLOAT16:
        return builder.fpext(raw, _FLOATS)
    if kind == INT8:
        return builder.sitofp(builder.sext(raw, _INTS), _FLOATS)
    return builder.bitcast(builder.shl(builder.zext(raw, _INTS), ir.Constant(_INTS, [16] * PANEL)), _FLOATS)


def _prefetch(builder: Any, address: Any) -> None:
    """Have the cache fetch what lies at an address, which need not be anyone's: a hint, and never a fault."""
    word = ir.IntType(32)
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    read, keep, data = word(0), word(3), word(1)
    builder.call(function, [address, read, keep, data])


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_INTS, [0] * PANEL))


def _row_addresses(builder: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    pointer = builder.inttoptr(base, ir.FloatType().as_pointer())
    return [builder.gep(pointer, [builder.mul(stride, _LONG(row))]) for row in range(rows)]


@intrinsic(prefer_literal=True)
def _panels(
    typing: Any,
    rows: Any,
    kind: Any,
    add: Any,
    x: Any,
    stride: Any,
    count: Any,
    ws: Any,
    aheads: Any,
    outs: Any,
    out_strides: Any,
) -> Any:
    """Some panels for so many rows. `x`, `ws`, `aheads` and `outs` are addresses, all but the first tuples of one for
    each panel; `aheads` tell what to fetch meanwhile. Strides are in float32 elements; count >= 1."""
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (rows, kind, add)):
        return None
    n, kind_value, adds = rows.literal_value, kind.literal_value, add.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, stride, count = arguments[3:6]
        ws, aheads, outs, out_strides = (cgutils.unpack_tuple(builder, packed) for packed in arguments[6:])
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{PANEL}f32"
        )
        x_rows = _row_addresses(builder, x, stride, n)
        targets = [
            builder.bitcast(row, _FLOATS.as_pointer())
            for out, out_stride in zip(outs, out_strides, strict=True)
            for row in _row_addresses(builder, out, out_stride, n)
        ]
        zero = ir.Constant(_FLOATS, [0.0] * PANEL)
        starts = [builder.load(target, align=4) if adds else zero for target in targets]
        panels, nexts = ([builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in some] for some in (ws, aheads))
        before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)

        builder.position_at_end(loop)
        k, sums = builder.phi(_LONG), [builder.phi(_FLOATS) for _ in targets]
        offset = builder.mul(k, _LONG(PANEL * _BYTES[kind_value]))
        values = [_splat(builder, builder.load(builder.gep(row, [k]))) for row in x_rows]
        results = []
        for number, (panel, ahead) in enumerate(zip(panels, nexts, strict=True)):
            _prefetch(builder, builder.gep(ahead, [offset]))
            columns = _load(builder, builder.gep(panel, [offset]), kind_value)
            for value, total in zip(values, sums[number * n : number * n + n], strict=True):
                results.append(builder.call(fma, [value, columns, total]))
        for total, start, result in zip(sums, starts, results, strict=True):
            total.add_incoming(start, before)
            total.add_incoming(result, loop)
        k_plus_1 = builder.add(k, _LONG(1))
        k.add_incoming(_LONG(0), before)
        k.add_incoming(k_plus_1, loop)
        builder.cbranch(builder.icmp_signed("<", k_plus_1, count), loop, after)

        builder.position_at_end(after)
        for target, result in zip(targets, results, strict=True):
            builder.store(result, target, align=4)
        return context.get_dummy_value()

    return types.void(rows, kind, add, x, stride, count, ws, aheads, outs, out_strides), generate


@cpu_jit
def _tile(height, kind, add, x, stride, count, ws, aheads, outs, out_strides):
    """Rows for which a tile is one turn of registers."""
    literally(kind)
    literally(add)
    if height == 6:
        _panels(6, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif height == 5:
        _panels(5, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif height == 4:
        _panels(4, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif height == 3:
        _panels(3, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif height == 2:
        _panels(2, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    else:
        _panels(1, kind, add, x, stride, count, ws, aheads, outs, out_strides)


@cpu_jit
def multiply(kind, add, x, stride, w, ahead, following, count, out, out_stride, rows):
    """One panel for any number of rows; `kind` and `add` (0, or 1: onto what `out` holds) are literals. What lies at
    `ahead` is fetched meanwhile, as many bytes as the panel has, and during the last of several tiles, when the panel
    itself is in the cache, what lies at `following`."""
    literally(kind)
    literally(add)
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    several = tiles > 1
    while tiles > 0:
        if several and tiles == 1:
            ahead = following
        # Tiles as even as can be: one of two rows would leave most of the multipliers waiting for its few sums.
        height = (rows + tiles - 1) // tiles
        _tile(height, kind, add, x, stride, count, (w,), (ahead,), (out,), (out_stride,))
        x += 4 * height * stride
        out += 4 * height * out_stride
        rows -= height
        tiles -= 1


@cpu_jit
def multiply_two(kind, add, x, stride, ws, aheads, following, count, outs, out_strides, rows):
    """Two panels for any number of rows, side by side where one alone has too few sums to keep the multipliers busy;
    `following` is what comes after them."""
    literally(kind)
    literally(add)
    if rows > FEW_ROWS:
        multiply(kind, add, x, stride, ws[0], aheads[0], ws[1], count, outs[0], out_strides[0], rows)
        multiply(kind, add, x, stride, ws[1], aheads[1], following, count, outs[1], out_strides[1], rows)
    elif rows == 3:
        _panels(3, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif rows == 2:
        _panels(2, kind, add, x, stride, count, ws, aheads, outs, out_strides)
    elif rows == 1:
        _panels(1, kind, add, x, stride, count, ws, aheads, outs, out_strides)
