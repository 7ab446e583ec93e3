"""The compiled CPU kernels against torch in float64, and against themselves: a row never depends on the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from headrace.kernels.cpu import attention, linear, norm, rotary

TORCH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (33, 7), (100, 17), (576, 64), (1031, 250))  # inputs, outputs


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_linear_reads_stored_weights_exactly(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight, bias, x = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs), torch.randn(40, inputs)
    panels = linear.pack(weight)
    assert torch.equal(linear.unpack(panels, outputs), weight)
    wanted = x.double() @ weight.double().T + bias
    got = linear.linear(x, panels, outputs, F.pad(bias, (0, -outputs % 16)))
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_row_of_a_linear_is_the_same_in_every_batch_and_with_every_number_of_threads(dtype: torch.dtype) -> None:
    panels, x = linear.pack(torch.randn(250, 1031).to(dtype)), torch.randn(300, 1031)
    torch.set_num_threads(1)
    whole = linear.linear(x, panels, 250)
    for threads, rows in itertools.product((1, 2), (*range(1, 34), 47, 48, 64, 127, 299)):
        torch.set_num_threads(threads)
        assert torch.equal(linear.linear(x[300 - rows :].contiguous(), panels, 250), whole[300 - rows :])


def test_residuals_are_added() -> None:
    weight, x, residual = torch.randn(32, 50), torch.randn(5, 50), torch.randn(5, 32)
    got = linear.linear(x, linear.pack(weight), 32, residual=residual)
    torch.testing.assert_close(got, x @ weight.T + residual, rtol=1e-4, atol=1e-4)
    scale = torch.randn(32)
    wanted = F.rms_norm(got, (32,), scale, 1e-6) + residual
    torch.testing.assert_close(norm.rms_norm(got, scale, 1e-6, residual), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [2, 10, 64])
def test_rotary(normed: bool, size: int) -> None:
    q, k = torch.randn(7, 4, size).transpose(0, 1), torch.randn(2, 7, size)
    cos, sin, weights = torch.randn(7, size), torch.randn(7, size), torch.randn(2, size)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    for got, x, weight in zip(rotary.rotate(q, k, cos, sin, norms), (q, k), weights, strict=True):
        x = F.rms_norm(x, (size,), weight, 1e-6) if normed else x
        a, b = x.chunk(2, dim=-1)
        torch.testing.assert_close(got, x * cos + torch.cat([-b, a], dim=-1) * sin, rtol=1e-4, atol=1e-5)


def test_int8_weights_are_what_they_say() -> None:
    weight, x = torch.randn(50, 96), torch.randn(9, 96)
    quantized, scales = linear.quantize(weight)
    wanted = x.double() @ (quantized.double() * scales[:, None].double()).T
    got = linear.linear(x, linear.pack(quantized), 50, scales=F.pad(scales, (0, 14)))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    assert bool(((quantized * scales[:, None] - weight).abs() <= scales[:, None] / 2 * 1.001).all())


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("activation", [linear.SILU, linear.GELU_TANH])
@pytest.mark.parametrize("rows", [0, 1, 7, 90])
def test_gate_and_up_in_one(dtype: torch.dtype, activation: int, rows: int) -> None:
    gate, up, x = torch.randn(70, 600).to(dtype), torch.randn(70, 600).to(dtype), torch.randn(rows, 600) / 8
    panels = torch.stack([linear.pack(gate), linear.pack(up)], dim=1).contiguous()
    act = F.silu if activation == linear.SILU else (lambda t: F.gelu(t, approximate="tanh"))
    wanted = act(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    torch.testing.assert_close(linear.gated(x, panels, 70, activation).double(), wanted, rtol=1e-5, atol=1e-4)


def test_activations_far_out_saturate_and_nan_stays() -> None:
    one = torch.stack([linear.pack(torch.ones(1, 1)), linear.pack(torch.ones(1, 1))], dim=1).contiguous()
    x = torch.tensor([[-1e4], [-90.0], [0.0], [90.0], [1e4], [float("nan")]])
    for activation, act in ((linear.SILU, F.silu), (linear.GELU_TANH, lambda t: F.gelu(t, approximate="tanh"))):
        wanted = act(x) * x
        torch.testing.assert_close(linear.gated(x, one, 1, activation), wanted, equal_nan=True, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("shape", [(1, 576), (13, 577), (2, 3, 5)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    wanted = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5).double(), wanted, rtol=1e-5, atol=1e-5)
    flat = x.view(-1, shape[-1])
    assert torch.equal(norm.rms_norm(flat[-1:].clone(), weight, 1e-5), norm.rms_norm(flat, weight, 1e-5)[-1:])


# query heads, K/V heads, key and value dimension, tokens, window, softcap, sinks
ATTENTION = (
    (9, 3, 64, 64, 100, 0, 0.0, False),
    (4, 1, 33, 40, 77, 0, 0.0, False),
    (8, 8, 80, 80, 50, 13, 0.0, True),
    (6, 2, 256, 256, 40, 20, 30.0, False),
    (71, 1, 64, 64, 35, 0, 0.0, False),
    (16, 2, 192, 128, 90, 0, 0.0, True),
)


@pytest.mark.parametrize(("heads", "groups", "key_dim", "value_dim", "tokens", "window", "softcap", "sunk"), ATTENTION)
def test_attention_over_scattered_blocks(
    heads: int, groups: int, key_dim: int, value_dim: int, tokens: int, window: int, softcap: float, sunk: bool
) -> None:
    k, v = torch.randn(tokens, groups, key_dim).transpose(0, 1), torch.randn(groups, tokens, value_dim)
    q, sinks = torch.randn(tokens, heads, key_dim).transpose(0, 1), torch.randn(heads) if sunk else None
    table, positions = torch.randperm(19)[: -(-tokens // 16)] + 1, torch.arange(tokens)
    keys, values = torch.zeros(20, groups * key_dim * 16), torch.zeros(20, groups * -(-value_dim // 16) * 256)
    attention.store(keys, values, k, v, table[positions // 16], positions % 16)

    def attend(rows: torch.Tensor, tasks: list[list[int]]) -> torch.Tensor:
        return attention.attend(
            rows, keys, values, table[None], torch.tensor(tasks), heads=groups, value_dim=value_dim,
            longest=torch.tensor([tokens]), scale=0.2, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    share = heads // groups
    tiles = [[0, h // share, h, s, s, min(12, tokens - s), 1] for h in range(heads) for s in range(0, tokens, 12)]
    whole = attend(q, tiles)
    wanted = reference(q, k, v, window, softcap, sinks)
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-4, atol=1e-5)
    for p in (0, 15, 16, tokens - 1):  # decoded alone, and cut in other places, every row is the same
        one = [[0, g, g * share + a, 0, p, min(12, share - a), 0] for g in range(groups) for a in range(0, share, 12)]
        assert torch.equal(attend(q[:, p : p + 1], one)[0], whole[p])
    uneven = [[0, h // share, h, s, s, min(5, tokens - s), 1] for h in range(heads) for s in range(0, tokens, 5)]
    torch.set_num_threads(2)
    assert torch.equal(attend(q, uneven), whole)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Dense attention in float64 with a mask."""
    share, tokens = q.shape[0] // k.shape[0], k.shape[1]
    scores = q.double() @ k.repeat_interleave(share, 0).double().transpose(1, 2) * 0.2
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(tokens)
    seen = place[None] <= place[:, None]
    if window:
        seen &= place[None] > place[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, tokens, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :tokens]
    return (weights @ v.repeat_interleave(share, 0).double()).transpose(0, 1)
