"""Every kernel on a GPU beside its twin in torch: time, and share of what the device copies or multiplies at best.

    python bench/kernels.py [--dtype bfloat16] [--only decode rope] [--output FILE.csv]

A line of CSV per kernel and shape: microseconds of kernel and twin, GB/s of the bytes that must be moved and their
share of the measured copy bandwidth, or TFLOP/s and their share of the measured rate of a large product. Needs CUDA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table import Table

DEVICE = "cuda"
COLUMNS = (
    *("dtype", "kernel", "shape", "us", "twin_us"),
    *("gb_per_s", "of_copy", "tflop_per_s", "of_product", "error"),
)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. `bytes` that it must move, or `flops` where the products count."""

    kernel: str
    shape: str
    run: Callable[[], Any]
    twin: Callable[[], Any]
    bytes: int = 0
    flops: int = 0


def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """The shape of Qwen3-0.6B: 16 heads of 128 over 8 KV heads."""
    from headrace.kernels import decode_attention, extend_attention, store_kv

    heads, kv_heads, dim, block_size = 16, 8, 128, 16
    blocks = 256 * 1024 // block_size + 1
    keys, values = (rand(blocks, kv_heads, block_size, dim, dtype=dtype) for _ in range(2))
    for sequences, length in ((1, 1024), (1, 32768), (32, 1024), (32, 8192), (256, 1024)):
        width = length // block_size
        tables = (torch.randperm(sequences * width, device=DEVICE).int() + 1).view(sequences, width)
        lens = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
        q = rand(sequences, heads, dim, dtype=dtype)
        splits = max(4, min(64, 4 * 132 // (sequences * kv_heads), length // 256))
        arguments = (q, keys, values, tables, lens)
        yield Case(
            "decode_attention",
            f"{sequences}x{length}",
            lambda a=arguments, n=splits: decode_attention.decode_attention(*a, scale=0.1, num_splits=n),
            lambda a=arguments: decode_attention.decode_attention_reference(*a, scale=0.1),
            bytes=2 * sequences * length * kv_heads * dim * dtype.itemsize + 2 * size(q),
        )
    for new, cached in ((512, 0), (4096, 0), (2048, 6144)):
        length = new + cached
        tables = (torch.randperm(length // block_size, device=DEVICE).int() + 1)[None]
        lens, bounds = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([length], [0, new]))
        extended = (rand(new, heads, dim, dtype=dtype), keys, values, tables, lens, bounds)
        yield Case(
            "extend_attention",
            f"{new}+{cached}",
            lambda a=extended: extend_attention.extend_attention(*a, scale=0.1),
            lambda a=extended: extend_attention.extend_attention_reference(*a, scale=0.1),
            flops=4 * heads * dim * (new * cached + new * (new + 1) // 2),
        )
    for tokens in (256, 8192):
        k, v = (rand(tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
        slots = torch.randperm(tokens * 2, device=DEVICE)[:tokens]
        stored = (k, v, keys, values, slots)
        yield Case(
            "store_kv",
            str(tokens),
            lambda a=stored: store_kv.store_kv(*a),
            lambda a=stored: store_kv.store_kv_reference(*a),
            bytes=2 * size(k, v),
        )


def rows(dtype: torch.dtype) -> Iterator[Case]:
    from headrace.kernels import gated, heads, lora, rms_norm, rope

    for count, width in ((256, 1024), (8192, 1024), (8192, 4096)):
        x, y, weight = rand(count, width, dtype=dtype), rand(count, width, dtype=dtype), rand(width, dtype=dtype)
        shape, gate = f"{count}x{width}", rand(count, 6 * width, dtype=dtype)
        yield Case(
            "rms_norm",
            shape,
            lambda x=x, w=weight: rms_norm.rms_norm(x, w, 1e-6),
            lambda x=x, w=weight: rms_norm.rms_norm_reference(x, w, 1e-6),
            bytes=2 * size(x),
        )
        yield Case(
            "add_rms_norm",
            shape,
            lambda x=x, y=y, w=weight: rms_norm.add_rms_norm(x, y, w, 1e-6),
            lambda x=x, y=y, w=weight: rms_norm.add_rms_norm_reference(x, y, w, 1e-6),
            bytes=4 * size(x),
        )
        yield Case(
            "silu_and_mul",
            f"{count}x{6 * width}",
            lambda g=gate: gated.silu_and_mul(g),
            lambda g=gate: gated.silu_and_mul_reference(g),
            bytes=size(gate) * 3 // 2,
        )
    for tokens in (256, 8192):
        q, k, v = (rand(tokens, n, 128, dtype=dtype) for n in (16, 8, 8))
        cos, sin = rand(tokens, 128, dtype=dtype), rand(tokens, 128, dtype=dtype)
        pools = [rand(tokens // 16 + 1, 8, 16, 128, dtype=dtype) for _ in range(2)]
        slots, norm = torch.arange(tokens, device=DEVICE), heads.HeadNorm(rand(128, dtype=dtype), 1e-6)
        turned = (q, k, v, cos, sin, *pools, slots)
        yield Case(
            "norm_rope_store",
            str(tokens),
            lambda a=turned, n=norm: rope.norm_rope_store(*a, q_norm=n, k_norm=n),
            lambda a=turned, n=norm: rope.norm_rope_store_reference(*a, q_norm=n, k_norm=n),
            bytes=2 * size(q, k, v) + size(cos, sin),
        )
    for segments, length in ((64, 1), (8, 512)):
        x, y = rand(segments * length, 1024, dtype=dtype), rand(segments * length, 3072, dtype=dtype)
        pairs = [(rand(16, 1024, dtype=dtype), rand(3072, 16, dtype=dtype)) for _ in range(8)]
        factors = lora.LoraFactors.of(pairs, torch.device(DEVICE))
        bounds = torch.arange(0, segments * length + 1, length, dtype=torch.int32, device=DEVICE)
        adapters = torch.arange(segments, device=DEVICE).int() % 8
        shrunk = lora.lora_shrink(x, factors, bounds, adapters)
        yield Case(
            "lora_shrink",
            f"{segments}x{length}",
            lambda a=(x, factors, bounds, adapters): lora.lora_shrink(*a),
            lambda a=(x, factors, bounds, adapters): lora.lora_shrink_reference(*a),
            bytes=size(x, shrunk, *(a for a, _ in pairs)),
        )
        yield Case(
            "lora_expand",
            f"{segments}x{length}",
            lambda a=(shrunk, factors, y, bounds, adapters): lora.lora_expand(*a),
            lambda a=(shrunk, factors, y, bounds, adapters): lora.lora_expand_reference(*a),
            bytes=size(shrunk, *(b for _, b in pairs)) + 2 * size(y),
        )


def linears(dtype: torch.dtype) -> Iterator[Case]:
    """The deterministic mode's products; their twin here is torch's own, which they replace."""
    from headrace.kernels import matmul

    for count, size_in, size_out in ((1, 1024, 4096), (64, 3072, 1024), (64, 1024, 151936), (8192, 1024, 6144)):
        x, weight = rand(count, size_in, dtype=dtype), rand(size_out, size_in, dtype=dtype)
        yield Case(
            "linear",
            f"{count}x{size_in}x{size_out}",
            lambda x=x, w=weight: matmul.linear(x, w),
            lambda x=x, w=weight: torch.nn.functional.linear(x, w),
            bytes=size(x, weight) + count * size_out * dtype.itemsize if count < 256 else 0,
            flops=2 * count * size_in * size_out,
        )


def sampling(dtype: torch.dtype) -> Iterator[Case]:
    from headrace.kernels import bitmask, penalties, sample

    vocabulary = 151936
    for count in (1, 64, 256):
        logits, ones = 3 * rand(count, vocabulary, dtype=torch.float32), torch.ones(count, device=DEVICE)
        keys = torch.randint(-(2**31), 2**31, (count, 2), device=DEVICE).int()
        for name, top_k, top_p in (("open", 0, 1.0), ("top-k", 50, 1.0), ("top-k+top-p", 50, 0.9), ("top-p", 0, 0.9)):
            limits = (ones, torch.full_like(ones, top_k).int(), ones * top_p, 0 * ones, keys)
            yield Case(
                f"sample {name}",
                f"{count}x{vocabulary}",
                lambda x=logits, a=limits: sample.sample(x, *a),
                lambda x=logits, a=limits: sample.sample_reference(x, *a),
                bytes=size(logits),
            )
        masks = torch.randint(-(2**31), 2**31, (count, vocabulary // 32), device=DEVICE).int()
        slots = torch.arange(count, device=DEVICE)
        yield Case(
            "apply_bitmask",
            f"{count}x{vocabulary}",
            lambda x=logits, m=masks, r=slots: bitmask.apply_bitmask(x, m, r),
            lambda x=logits, m=masks, r=slots: bitmask.apply_bitmask_reference(x, m, r),
            bytes=size(masks) + size(logits) // 2,
        )
        seen = 1024
        ids = torch.stack([torch.randperm(vocabulary, device=DEVICE)[:seen] for _ in range(count)]).flatten()
        bounds = torch.arange(0, count * seen + 1, seen, device=DEVICE).int()
        penalised = (logits, slots, bounds, ids, torch.ones_like(ids).float(), torch.ones(3, count, device=DEVICE))
        yield Case(
            "apply_penalties",
            f"{count}x{seen}",
            lambda a=penalised, n=seen: penalties.apply_penalties(*a, longest=n),
            lambda a=penalised, n=seen: penalties.apply_penalties_reference(*a, longest=n),
            bytes=count * seen * (8 + 4 + 2 * 4),
        )


def microseconds(run: Callable[[], Any]) -> float:
    """Median, with the caches emptied between calls."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=50, return_mode="median")) * 1e3


def copy_bandwidth() -> float:
    """GB/s of a large copy, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source)) / 1e3


def product_rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a large product."""
    a, b = rand(8192, 8192, dtype=dtype), rand(8192, 8192, dtype=dtype)
    return 2 * 8192**3 / microseconds(lambda: a @ b) / 1e6


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    made.add_argument("--only", nargs="*", default=[], help="kernels whose names begin so")
    made.add_argument("--output", type=Path, help="write the CSV here as well")
    return made


def main() -> int:
    args = parser().parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' speed is measured on a GPU only", file=sys.stderr)
        return 1
    from triton.errors import TritonError

    dtype, failed = getattr(torch, args.dtype), 0
    copied, multiplied = copy_bandwidth(), product_rate(dtype)
    table = Table(torch.device(DEVICE), COLUMNS, args.output)
    table.add({"dtype": args.dtype, "kernel": "copy", "gb_per_s": round(copied)})
    table.add({"dtype": args.dtype, "kernel": "product", "tflop_per_s": round(multiplied)})
    for cases in (attention, rows, linears, sampling):
        for case in cases(dtype):
            if args.only and not case.kernel.startswith(tuple(args.only)):
                continue
            line = {"dtype": args.dtype, "kernel": case.kernel, "shape": case.shape}
            try:
                table.add(line | measured(case, copied, multiplied))
            except (RuntimeError, TritonError) as e:  # the other kernels are measured all the same
                failed += 1
                table.add(line | {"error": " ".join(str(e).split())[:200]})
    return min(failed, 1)


def measured(case: Case, copied: float, multiplied: float) -> dict[str, Any]:
    us, twin_us = microseconds(case.run), microseconds(case.twin)
    line: dict[str, Any] = {"us": round(us, 1), "twin_us": round(twin_us, 1)}
    if case.bytes:
        rate = case.bytes / us / 1e3
        return line | {"gb_per_s": round(rate), "of_copy": round(rate / copied, 2)}
    rate = case.flops / us / 1e6
    return line | {"tflop_per_s": round(rate), "of_product": round(rate / multiplied, 2)}


if __name__ == "__main__":
    sys.exit(main())
