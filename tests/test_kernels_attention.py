"""Attention over the paged pool: each kernel against its twin, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.decode_attention import decode_attention, decode_attention_reference
from headrace.kernels.extend_attention import extend_attention, extend_attention_reference
from headrace.kernels.store_kv import store_kv, store_kv_reference
from kit.pools import DEVICE, DTYPES, TOLERANCE, Pools, pools, random

# Query heads, KV heads, key and value sizes, block size, and what is done to the scores.
CASES: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "grouped": (6, 2, 64, 64, 16, {}),
    "one KV head": (5, 1, 32, 32, 4, {"window": 9}),
    "a head each, odd sizes": (3, 3, 80, 80, 5, {"softcap": 3.0}),
    "sinks": (8, 2, 16, 16, 16, {"sinks": True}),
    "values narrower than keys": (4, 2, 96, 64, 8, {"sinks": True, "window": 70, "softcap": 2.0}),
    "wide": (2, 1, 256, 256, 16, {"window": 33}),
}


def options(case: dict[str, Any], heads: int, dim: int) -> dict[str, Any]:
    sinks = {"sinks": random(heads, seed=7)} if case.get("sinks") else {}
    return {"scale": dim**-0.5} | case | sinks


def assert_like_twin(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert bool(wanted.isfinite().all())
    torch.testing.assert_close(got, wanted, **TOLERANCE[wanted.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_decode(name: str, dtype: torch.dtype) -> None:
    heads, kv_heads, key_dim, value_dim, block_size, case = CASES[name]
    p = pools([1, 17, 150], kv_heads=kv_heads, block_size=block_size, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    q = random(3, heads, key_dim, dtype=dtype, seed=5)
    kwargs = options(case, heads, key_dim)
    wanted = decode_attention_reference(q, p.keys, p.values, p.block_tables, p.kv_lens, **kwargs)
    # Splits of 64 keys: the third sequence has three, others one; the fourth program of each has nothing to do.
    got = decode_attention(q, p.keys, p.values, p.block_tables, p.kv_lens, num_splits=4, split_size=64, **kwargs)
    assert_like_twin(got, wanted)


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_decode_splits_grow_where_there_are_too_few(num_splits: int) -> None:
    p = pools([300, 64, 65], kv_heads=1, block_size=16, key_dim=32)
    q = random(3, 2, 32, seed=5)
    arguments = (q, p.keys, p.values, p.block_tables, p.kv_lens)
    got = decode_attention(*arguments, scale=0.3, sinks=random(2), num_splits=num_splits, split_size=64)
    assert_like_twin(got, decode_attention_reference(*arguments, scale=0.3, sinks=random(2)))


def test_decode_of_a_padding_row_is_zero_and_harms_nobody() -> None:
    p = pools([40, 20], kv_heads=2, block_size=8, key_dim=32)
    q = random(2, 4, 32, seed=5)
    lens = torch.tensor([40, 0], dtype=torch.int32, device=DEVICE)
    got = decode_attention(q, p.keys, p.values, p.block_tables, lens, scale=1.0, num_splits=2)
    wanted = decode_attention_reference(q[:1], p.keys, p.values, p.block_tables[:1], p.kv_lens[:1], scale=1.0)
    assert_like_twin(got[:1], wanted)
    assert not got[1].any()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_is_bitwise_the_same_alone_and_among_others(num_splits: int) -> None:
    p = pools([130, 300, 7], kv_heads=1, block_size=16, key_dim=32)
    q = random(3, 2, 32, seed=5)
    kwargs: dict[str, Any] = {"scale": 0.2, "num_splits": num_splits, "split_size": 64}
    together = decode_attention(q, p.keys, p.values, p.block_tables, p.kv_lens, **kwargs)
    for row in (slice(0, 1), slice(1, 2), slice(2, 3)):
        alone = decode_attention(q[row], p.keys, p.values, p.block_tables[row], p.kv_lens[row], **kwargs)
        assert torch.equal(alone, together[row])


def extend(p: Pools, q: torch.Tensor, lengths: list[int], twin: bool = False, **kwargs: Any) -> torch.Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    function = extend_attention_reference if twin else extend_attention
    return function(q, p.keys, p.values, p.block_tables, p.kv_lens, bounds, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_extend(name: str, dtype: torch.dtype) -> None:
    """A whole prompt, a chunk after a prefix, and a single token, in one batch."""
    heads, kv_heads, key_dim, value_dim, block_size, case = CASES[name]
    p = pools(
        [37, 150, 66], kv_heads=kv_heads, block_size=block_size, key_dim=key_dim, value_dim=value_dim, dtype=dtype
    )
    lengths = [37, 29, 1]
    q = random(heads, sum(lengths), key_dim, dtype=dtype, seed=5).transpose(0, 1)
    kwargs = options(case, heads, key_dim)
    assert_like_twin(extend(p, q, lengths, **kwargs), extend(p, q, lengths, twin=True, **kwargs))


def test_extend_finds_each_row_of_many_short_sequences() -> None:
    lengths = [1, 33, 1, 1, 32, 2, 31, 1]
    p = pools([n + extra for extra, n in enumerate(lengths)], kv_heads=1, block_size=4, key_dim=16)
    q = random(sum(lengths), 2, 16, seed=5)
    assert_like_twin(extend(p, q, lengths, scale=0.5), extend(p, q, lengths, twin=True, scale=0.5))


@pytest.mark.parametrize("window", [None, 21])
def test_extend_is_the_same_however_a_prompt_is_cut(window: int | None) -> None:
    p = pools([100], kv_heads=1, block_size=8, key_dim=32)
    q = random(100, 3, 32, seed=5)
    whole = extend(p, q, [100], scale=0.2, window=window)
    done = 0
    for length in (1, 16, 50, 33):
        cut = Pools(p.keys, p.values, p.block_tables, torch.tensor([done + length], dtype=torch.int32, device=DEVICE))
        part = extend(cut, q[done : done + length], [length], scale=0.2, window=window)
        if DEVICE.type == "cuda":
            assert torch.equal(part, whole[done : done + length])
        else:  # the interpreter's products are a BLAS library's, whose rows round by where they stand
            torch.testing.assert_close(part, whole[done : done + length], atol=1e-6, rtol=1e-5)
        done += length


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "key_dim", "value_dim", "block_size"), [(3, 80, 80, 5), (1, 64, 32, 16)])
def test_store_kv(kv_heads: int, key_dim: int, value_dim: int, block_size: int, dtype: torch.dtype) -> None:
    slots = torch.tensor([7, -1, 0, 4 * block_size - 1, 8], device=DEVICE)
    keys = random(kv_heads, 5, key_dim, dtype=dtype).transpose(0, 1)  # strided, as models give it
    values = random(5, kv_heads, value_dim, dtype=dtype)
    pool = [torch.zeros(4, kv_heads, block_size, dim, dtype=dtype, device=DEVICE) for dim in (key_dim, value_dim)]
    twin = [x.clone() for x in pool]
    store_kv(keys, values, pool[0], pool[1], slots)
    store_kv_reference(keys, values, twin[0], twin[1], slots)
    for got, wanted in zip(pool, twin, strict=True):
        assert torch.equal(got, wanted)
        assert got.any(-1).sum() == 4 * kv_heads  # the slot of -1 wrote nothing


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a pool of 4.5 GB; needs a GPU")
def test_offsets_beyond_two_to_the_31() -> None:
    block_size, dim = 16, 128
    num_blocks = 2**31 // (block_size * dim) + 64
    pool = torch.zeros(num_blocks, 1, block_size, dim, dtype=torch.float16, device=DEVICE)
    tokens = random(2, 1, dim, dtype=torch.float16)
    last = num_blocks - 1
    store_kv(tokens, tokens, pool, pool, torch.tensor([last * block_size, last * block_size + 1], device=DEVICE))
    table, lens = torch.tensor([[last]], dtype=torch.int32, device=DEVICE), torch.tensor([2], device=DEVICE).int()
    small = pool[last:].clone()
    q = random(1, 1, dim, dtype=torch.float16)
    got = decode_attention(q, pool, pool, table, lens, scale=0.1)
    assert_like_twin(got, decode_attention_reference(q, small, small, torch.zeros_like(table), lens, scale=0.1))
