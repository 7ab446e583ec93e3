"""Compiles every kernel for GPUs that are not there: `python triton_compile.py [--all] 80 90`.

Triton's interpreter forgives what its compiler does not (types of loop variables, shapes of products, shared memory).
The compiler needs no GPU, so the launchers are called as on one, with a driver that names the target and runs nothing.
Prints a line of JSON per compiled kernel and target: name, compute capability, bytes of shared memory and of spilled
registers. Without --all: float16, and one variant of each kernel that has several.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from headrace.kernels import (
    bitmask,
    decode_attention,
    extend_attention,
    gated,
    heads,
    lora,
    matmul,
    penalties,
    rms_norm,
    rope,
    sample,
    store_kv,
)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class NoGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def launches(dtype: torch.dtype, variants: int | None) -> None:
    """Call every launcher once, or more where its constants change what is compiled."""
    attention(dtype, variants)
    rows(dtype, variants)
    sampling()


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def attention(dtype: torch.dtype, variants: int | None) -> None:
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (7, 80, {"softcap": 30.0, "window": 128, "sinks": tensor(14, dtype=dtype)}),
        (2, 128, {}),
        (3, 64, {"window": 128, "sinks": tensor(6, dtype=dtype)}),
        (4, 256, {"softcap": 50.0, "window": 64}),
    ]
    for group, dim, options in cases[:variants]:
        q, pool = tensor(5, group * 2, dim, dtype=dtype), tensor(9, 2, 16, dim, dtype=dtype)
        common: dict[str, Any] = {"scale": 0.1, **options}
        decode_attention.decode_attention(q, pool, pool, ints(5, 4), ints(5), **common)
        if variants is None:
            decode_attention.decode_attention(q, pool, pool, ints(5, 4), ints(5), num_splits=1, **common)
        extend_attention.extend_attention(q, pool, pool, ints(2, 4), ints(2), ints(3), **common)
        store_kv.store_kv(pool[:5, :, 0], pool[:5, :, 0], pool, pool, longs(5))


def rows(dtype: torch.dtype, variants: int | None) -> None:
    for size in (576, 4096, 5120)[:variants]:
        x, weight = tensor(3, size, dtype=dtype), tensor(size, dtype=dtype)
        for unit_offset in (False, True)[:variants]:
            rms_norm.add_rms_norm(x, x, weight, 1e-5, unit_offset=unit_offset)
        if variants is None:
            rms_norm.rms_norm(x, weight, 1e-5)
            gated.gelu_tanh_and_mul(x)
        gated.silu_and_mul(x)
        for bias in (weight[:97], None)[:variants]:
            for spread in (True, False):
                matmul.linear(x, tensor(97, size, dtype=dtype), bias, spread=spread)
        pair, segments = (tensor(16, size, dtype=dtype), tensor(size, 16, dtype=dtype)), ints(3)
        factors = lora.LoraFactors.of([pair, None], x.device)
        lora.lora_expand(lora.lora_shrink(x, factors, segments, ints(2)), factors, x, segments, ints(2))
    q, k, angles = tensor(5, 4, 128, dtype=dtype), tensor(5, 2, 128, dtype=dtype), tensor(5, 128, dtype=dtype)
    pool, norm = tensor(9, 2, 16, 128, dtype=dtype), heads.HeadNorm(tensor(128, dtype=dtype), 1e-6)
    rope.norm_rope_store(q, k, k, angles, angles, pool, pool, longs(5), q_norm=norm, k_norm=norm)
    if variants is None:
        rope.norm_rope_store(q, k, k, angles, angles, pool, pool, longs(5))
        rope.rope(q, k, angles, angles)
        rope.rope(q, k, angles[:, :64], angles[:, :64], interleaved=True)


def sampling() -> None:
    logits = tensor(3, 151936)
    sample.sample(logits, tensor(3), ints(3), tensor(3), tensor(3), ints(3, 2))
    bitmask.apply_bitmask(logits, ints(2, 4748), longs(2))
    penalties.apply_penalties(logits, longs(2), ints(3), longs(9), tensor(9), tensor(3, 2), longest=5)


def spilled(cubin: bytes) -> int:
    """Bytes of local memory of a kernel: what its registers did not hold."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        knobs: Any = triton.knobs  # type: ignore[attr-defined, unused-ignore]
        tool = knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True)
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", told.stdout + told.stderr))


def main() -> None:
    compiled: dict[tuple[int, str, str], Any] = {}
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[capability, kernel.metadata.name, kernel.hash] = kernel
        return kernel

    jit.JITFunction.run = compile_only
    whole = "--all" in sys.argv
    for capability in [int(argument) for argument in sys.argv[1:] if argument.isdigit()]:
        pretended: Any = NoGPU(capability)
        driver.set_active(pretended)
        dtypes = [torch.float16, torch.float32] if capability < 80 else [torch.float16, torch.float32, torch.bfloat16]
        for dtype in dtypes if whole else dtypes[:1]:
            launches(dtype, None if whole else 1)
    for (capability, name, _), kernel in compiled.items():
        line = {"kernel": name, "capability": capability, "shared": kernel.metadata.shared}
        sys.stdout.write(json.dumps(line | {"spilled": spilled(kernel.asm["cubin"])}) + "\n")


if __name__ == "__main__":
    main()
