"""A GPU's rewrites of a model change nothing but its speed; without a GPU their kernels run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton")

from headrace.worker.engine import fuse_cuda
from headrace.worker.engine.device_linear import GatedMLP, InvariantLinear, PartLinear, merge, multiply_for
from headrace.worker.engine.foreign_sums import ForeignSums
from kit import tiny_models
from kit.pools import DEVICE

# What of each architecture is rewritten: norms, q/k/v products, gated products, rotary positions.
MODELS = {"llama": (5, 2, 2, 2), "qwen3": (9, 2, 2, 2), "gemma2": (9, 2, 2, 2), "gpt2": (0, 0, 0, 0)}


def load(folder: Path) -> Any:
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained
    return from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(DEVICE).eval()


def count(model: torch.nn.Module) -> tuple[int, int, int, int]:
    modules = list(model.modules())
    parts = [m.product for m in modules if isinstance(m, PartLinear)]
    gated = sum(isinstance(m, GatedMLP) for m in modules)
    norms = sum(isinstance(m, fuse_cuda.DeviceRMSNorm) for m in modules)
    return norms, len(set(map(id, parts))) - gated, gated, sum("forward" in vars(m) for m in modules)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_stay(architecture: str, invariant: bool, tmp_path: Path) -> None:
    model = load(tiny_models.build(tmp_path / "m", architecture))
    ids = torch.tensor([[5, 9, 70, 31, 8, 200]], device=DEVICE)
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        fuse_cuda.fuse(model, invariant=invariant)
        with ForeignSums() as sums:
            got = model(ids, use_cache=False).logits
    assert any(isinstance(m, InvariantLinear) for m in model.modules()) == invariant
    assert ("linear" in sums.found or "addmm" in sums.found) != invariant
    assert model.lm_head.weight is model.get_input_embeddings().weight or not model.config.tie_word_embeddings
    assert count(model) == MODELS[architecture]
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_hooks_on_parts_reach_what_follows(tmp_path: Path) -> None:
    """Adapters add to a linear's output in place; other hooks may return another."""
    folder = tiny_models.build(tmp_path / "m", "llama")
    ids = torch.tensor([[5, 9, 70]], device=DEVICE)

    def add(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.flatten(0, -2)[1:] += 0.5

    def replace(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    plain, fused = load(folder), load(folder)
    fuse_cuda.fuse(fused)
    for model in (plain, fused):
        model.model.layers[1].mlp.up_proj.register_forward_hook(replace)
        for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            model.model.layers[0].get_submodule(name).register_forward_hook(add)
    wanted = plain(ids, use_cache=False).logits
    torch.testing.assert_close(fused(ids, use_cache=False).logits, wanted, atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_parts_asked_about_different_inputs_answer_each() -> None:
    torch.manual_seed(0)
    parent = torch.nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(parent, name, torch.nn.Linear(6, 4, device=DEVICE))
    linears: list[Any] = [parent.q_proj, parent.k_proj, parent.v_proj]
    x, y = torch.randn(2, 6, device=DEVICE), torch.randn(2, 6, device=DEVICE)
    wanted = [linears[0](x), linears[1](y), linears[2](x), linears[2](x), linears[0](x)]
    assert merge(parent, ("q_proj", "k_proj", "v_proj"), multiply_for(False))
    q, k, v = parent.q_proj, parent.k_proj, parent.v_proj
    for got, want in zip([q(x), k(y), v(x), v(x), q(x)], wanted, strict=True):  # type: ignore[operator]
        torch.testing.assert_close(got, want)


def test_what_cannot_be_merged_is_left_alone() -> None:
    parent = torch.nn.Module()
    parent.q_proj, parent.k_proj = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4, bias=False)
    parent.v_proj = torch.nn.Linear(6, 4)
    assert not merge(parent, ("q_proj", "k_proj", "v_proj"), multiply_for(False))
    assert type(parent.q_proj) is torch.nn.Linear
