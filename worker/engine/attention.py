"""Our attention function, which transformers' models call instead of theirs: K/V go to the paged pool.

transformers finds it by name in ALL_ATTENTION_FUNCTIONS. No mask function is registered under that name, so models
build no mask, and they get no cache object: the flat batch's own metadata says who sees what. A model's modules find
their `PagedAttention` on themselves, so that two models in one process do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .batch import AttentionBatch
from .kv_cache import Pool

IMPLEMENTATION = "headrace_paged"
_ATTRIBUTE = "headrace_attention"


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What a layer does to its scores: `scale` before, `softcap` by tanh, `sinks` [H] as one more column."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class AttentionBackend(Protocol):
    """How a step's queries meet its K/V on one kind of device. It owns the pool."""

    pool: Pool
    invariant: bool  # whether a row's sums run in one order whatever else is in a step, and however its prompt was cut

    def run(
        self,
        batch: AttentionBatch,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: ScoreOptions,
        window: int | None,
    ) -> torch.Tensor:
        """Store the K/V of a flat batch, then attend over what the pool holds of each sequence.

        Args:
            q: [H, T, D].
            k, v: [Hk, T, D], of any strides.
            window: tokens that a query sees, itself among them; None for all.

        Returns:
            [T, H, Dv], contiguous: models take views of it.
        """
        ...


class PagedAttention:
    """What the layers of one model share: the backend with the pool, and the batch that is being computed."""

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.batch: AttentionBatch | None = None
        self.options: dict[int, tuple[ScoreOptions, int | None]] = {}  # of each layer that has attended, and its window

    def attach(self, model: nn.Module) -> None:
        """Let all attention modules of a model find this object."""
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _ATTRIBUTE, self)

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        """Store K/V of the flat batch and attend. q [H, T, D], k and v [Hk, T, D]; returns [T, H, Dv]."""
        assert self.backend is not None
        assert self.batch is not None
        return self.backend.run(self.batch, layer, q, k, v, options, window)


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """A whole prompt over itself. q [H, T, D], k and v [Hk, T, D]; returns [T, H, Dv]."""
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature transformers calls: query [1, H, T, D], key and value [1, Hk, T, D] → [1, T, H, Dv]."""
    paged: PagedAttention = getattr(module, _ATTRIBUTE)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = query[0], key[0], value[0]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    paged.options[layer] = ScoreOptions(scale, softcap, s_aux), sliding_window
    return paged.run(layer, q, k, v, *paged.options[layer])[None], None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention_function)
