"""Fusing norms: done where it changes nothing, left where it would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headrace.worker.engine.fuse import fuse_norms
from kit import tiny_models
from torch import nn


class PlainRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0, power: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32) - offset)
        self.eps = 1e-6
        self._offset, self._power = offset, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps) ** -self._power * (self._offset + self.weight)


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if gate is None else y * gate


@pytest.mark.parametrize(
    ("norm", "fused"),
    [
        (PlainRMSNorm(), True),
        (PlainRMSNorm(offset=1.0), True),
        (PlainRMSNorm(power=0.49), False),
        (GatedRMSNorm(), False),
    ],
    ids=["weight", "one plus weight", "another formula", "a gate"],
)
def test_numbers_decide(norm: nn.Module, fused: bool) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(norm)
    wanted = model(x)
    assert fuse_norms(model) == int(fused)
    assert isinstance(model[0], nn.RMSNorm) is fused
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize(
    ("architecture", "count"), [("llama", 5), ("qwen3", 9), ("gemma3_text", 13), ("gpt_oss", 5), ("gpt2", 0)]
)
def test_every_norm_of_real_architectures_is_found(tmp_path: Path, architecture: str, count: int) -> None:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tiny_models.build(tmp_path, architecture)).eval()
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        assert fuse_norms(model) == count
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, atol=1e-3, rtol=1e-3)
