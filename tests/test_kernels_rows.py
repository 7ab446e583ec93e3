"""Norms, gated activations and rotary positions: each kernel against its twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels import gated, rms_norm, rope
from headrace.kernels.heads import HeadNorm
from kit.pools import DEVICE, DTYPES, TOLERANCE, random

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_like(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, **TOLERANCE[wanted.dtype])


@dtypes
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(5, 576), (2, 3, 80), (1, 33)], ids=str)
def test_rms_norm(shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = 3 * random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    wanted = rms_norm.rms_norm_reference(x, weight, 1e-5, unit_offset=unit_offset)
    assert_like(rms_norm.rms_norm(x, weight, 1e-5, unit_offset=unit_offset), wanted)


@dtypes
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual, weight = (random(4, 80, dtype=dtype, seed=seed)[..., :72] for seed in range(3))  # rows apart
    got = rms_norm.add_rms_norm(x, residual, weight[0], 1e-6, unit_offset=unit_offset)
    wanted = rms_norm.add_rms_norm_reference(x, residual, weight[0], 1e-6, unit_offset=unit_offset)
    assert torch.equal(got[1], wanted[1])
    assert_like(got[0], wanted[0])


def test_a_norm_of_zeros_is_zero() -> None:
    assert not rms_norm.rms_norm(torch.zeros(2, 16, device=DEVICE), random(16), 1e-6).any()


@dtypes
@pytest.mark.parametrize("shape", [(3, 2 * 96), (2, 1, 2 * 1100), (1, 2 * 5)], ids=str)
def test_gated_activations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = 4 * random(*shape, dtype=dtype)
    assert_like(gated.silu_and_mul(x), gated.silu_and_mul_reference(x))
    assert_like(gated.gelu_tanh_and_mul(x), gated.gelu_tanh_and_mul_reference(x))


def test_gated_activations_of_large_gates() -> None:
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=DEVICE)
    x = torch.cat([gate, torch.ones_like(gate)], -1)
    assert_like(gated.silu_and_mul(x), gated.silu_and_mul_reference(x))
    assert_like(gated.gelu_tanh_and_mul(x), gated.gelu_tanh_and_mul_reference(x))


def angles(tokens: int, size: int, interleaved: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as models hand them out, each angle twice."""
    theta = random(tokens, size // 2, seed=9)
    theta = theta.repeat_interleave(2, -1) if interleaved else torch.cat([theta, theta], -1)
    return theta.cos().to(dtype), theta.sin().to(dtype)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32)])
def test_rope(dim: int, rotary: int, interleaved: bool, dtype: torch.dtype) -> None:
    q = random(3, 4, dim, dtype=dtype).transpose(0, 1)  # [T, H, D], heads outermost in memory
    k = random(4, 1, dim, dtype=dtype, seed=1)
    cos, sin = angles(4, rotary, interleaved, dtype)
    got = rope.rope(q, k, cos, sin, interleaved=interleaved)
    for a, b in zip(got, rope.rope_reference(q, k, cos, sin, interleaved=interleaved), strict=True):
        assert_like(a, b)


@dtypes
@pytest.mark.parametrize("norms", ["none", "both", "unit offset"])
def test_norm_rope_store(norms: str, dtype: torch.dtype) -> None:
    tokens, block_size, dim, value_dim = 4, 3, 48, 32
    q, k, v = random(tokens, 4, dim), random(tokens, 2, dim, seed=1), random(tokens, 2, value_dim, seed=2)
    slots = torch.tensor([7, -1, 2, 5], device=DEVICE)
    pools = [torch.zeros(3, 2, block_size, size, dtype=dtype, device=DEVICE) for size in (dim, value_dim)]
    twins = [pool.clone() for pool in pools]
    cos, sin = angles(tokens, dim, False, dtype)
    norm: dict[str, Any] = {
        name: None if norms == "none" else HeadNorm(random(dim, dtype=dtype, seed=seed), 1e-6, norms == "unit offset")
        for seed, name in ((3, "q_norm"), (4, "k_norm"))
    }
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype), cos, sin)
    assert_like(
        rope.norm_rope_store(*inputs, pools[0], pools[1], slots, **norm),
        rope.norm_rope_store_reference(*inputs, twins[0], twins[1], slots, **norm),
    )
    for pool, twin in zip(pools, twins, strict=True):
        assert_like(pool, twin)
        assert pool.any(-1).sum() == 3 * 2  # the slot of -1 wrote nothing
