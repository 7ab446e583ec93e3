"""Which attention serves a device, and the pool that it brings along."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.cpu.attention import BLOCK_SIZE
from .attention import AttentionBackend
from .attention_cpu import CpuAttention
from .attention_torch import TorchAttention
from .attention_triton import TritonAttention, triton_is_installed
from .kv_cache import KVCache, LayerShape
from .panel_cache import PanelCache


def make_backend(
    name: str,
    layers: Sequence[LayerShape],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None = None,
    invariant: bool = False,
) -> AttentionBackend:
    """The backend `name`, where "auto" is the fastest that serves this device, dtype and block size.

    Args:
        context_length: tokens of the longest sequence; None: all that the pool holds.
        invariant: let Triton's kernels sum each row in the same order whatever else is in a step.

    Raises:
        ConfigError: the backend is asked for by name, and what it needs is not installed.
    """
    if _takes_panels(name, block_size, dtype, device):
        return CpuAttention(PanelCache(layers, num_blocks=num_blocks))
    cache = KVCache(layers, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
    if name == "triton" or (name == "auto" and device.type == "cuda" and triton_is_installed()):
        return TritonAttention(cache, context_length=context_length or num_blocks * block_size, invariant=invariant)
    return TorchAttention(cache)


def bytes_per_token(
    name: str, layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """What a token's K/V take in the pool of the backend that `make_backend` gives."""
    if _takes_panels(name, block_size, dtype, device):
        return PanelCache.bytes_per_token(layers)
    return sum(shape.bytes_per_token(dtype) for shape in layers)


def _takes_panels(name: str, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled CPU kernels serve."""
    return name == "auto" and device.type == "cpu" and dtype == torch.float32 and block_size == BLOCK_SIZE
