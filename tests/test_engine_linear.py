"""Packed linears in a model: what they keep, and that they compute what torch's did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from headrace.worker.engine import onednn
from headrace.worker.engine.linear import GatedMLP, PackedLinear, Part, WeightDtype, pack_linears
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D


def model(dtype: torch.dtype = torch.bfloat16, act: str = "silu", bias: bool = False) -> LlamaForCausalLM:
    """A tiny Llama whose weights have no more bits than `dtype`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, hidden_act=act, attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype).float()
    made.eval()  # type: ignore[no-untyped-call]
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_a_packed_model_computes_what_it_did(dtype: torch.dtype, act: str, bias: bool) -> None:
    llama, ids = model(dtype, act, bias), torch.arange(1, 18)[None]
    wanted = llama(ids).logits
    assert pack_linears(llama, "auto") == 15
    torch.testing.assert_close(llama(ids).logits, wanted, rtol=1e-3, atol=1e-5)
    layer: Any = llama.model.layers[0]
    assert isinstance(layer.mlp, GatedMLP) == (act != "relu" and not bias)
    assert isinstance(layer.self_attn.q_proj, Part)
    assert isinstance(llama.lm_head, PackedLinear)
    assert llama.lm_head.panels.dtype == dtype


@torch.inference_mode()
def test_packed_weights_can_be_read_back() -> None:
    llama, plain = model(bias=True), model(bias=True)
    pack_linears(llama, "auto")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        packed, was = (getattr(each.model.layers[1].self_attn, name) for each in (llama, plain))
        assert torch.equal(packed.weight, was.weight)
        assert torch.equal(packed.bias, was.bias)
        assert (packed.in_features, packed.out_features) == (was.in_features, was.out_features)


@pytest.mark.parametrize(("dtype", "stored", "far"), [("bfloat16", torch.bfloat16, 0.02), ("int8", torch.int8, 0.05)])
@torch.inference_mode()
def test_rounded_weights_are_near(dtype: WeightDtype, stored: torch.dtype, far: float) -> None:
    llama, ids = model(torch.float32), torch.arange(1, 18)[None]
    wanted = llama(ids).logits
    pack_linears(llama, dtype)
    got = llama(ids).logits
    assert llama.lm_head.panels.dtype == stored
    assert 0 < float((got - wanted).norm() / wanted.norm()) < far


@torch.inference_mode()
def test_parts_are_right_in_any_order_and_for_inputs_that_differ() -> None:
    llama, plain = model(), model()
    pack_linears(llama, "auto")
    ours, theirs = llama.model.layers[0].self_attn, plain.model.layers[0].self_attn
    x, other = torch.randn(1, 3, 40), torch.randn(1, 3, 40)
    for names, inputs in (
        (("v_proj", "q_proj", "k_proj"), (x, x, x)),
        (("q_proj", "k_proj", "q_proj", "v_proj"), (x, other, other, x)),
        (("k_proj", "k_proj"), (x, x)),
    ):
        for name, value in zip(names, inputs, strict=True):
            wanted = getattr(theirs, name)(value)
            torch.testing.assert_close(getattr(ours, name)(value), wanted, rtol=1e-4, atol=1e-6)


@torch.inference_mode()
def test_a_hook_on_gate_or_up_is_heard() -> None:
    llama, plain = model(), model()
    pack_linears(llama, "auto")
    x = torch.randn(1, 3, 40)
    for each in (llama, plain):
        layer: Any = each.model.layers[0]
        layer.mlp.up_proj.register_forward_hook(lambda _module, _inputs, output: output + 1)
    wanted = plain.model.layers[0].mlp(x)
    torch.testing.assert_close(llama.model.layers[0].mlp(x), wanted, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_transposed_linear_is_packed_too() -> None:
    holder = nn.Sequential(Conv1D(17, 33))  # type: ignore[no-untyped-call]
    x = torch.randn(2, 5, 33)
    wanted = holder(x)
    pack_linears(holder, "auto")
    assert isinstance(holder[0], PackedLinear)
    torch.testing.assert_close(holder(x), wanted, rtol=1e-4, atol=1e-5)


def test_linears_in_onednns_layout_compute_what_torchs_did() -> None:
    """In float32, which every CPU has; bfloat16 takes the same operations where there are instructions for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 70), nn.Sequential(nn.Linear(70, 24, bias=False)), nn.LayerNorm(24)).eval()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for rows in ((1, 1), (1, 8), (40,)):
        x = torch.randn(*rows, 33)
        with torch.inference_mode():
            wanted = model(x)
        packed = copy.deepcopy(model)
        assert onednn.pack(packed) == 2
        with torch.inference_mode():
            torch.testing.assert_close(packed(x), wanted, rtol=1e-5, atol=1e-5)
    kept = [module for module in packed.modules() if isinstance(module, onednn.OneDnnLinear)]
    for new, old in zip(kept, linears, strict=True):
        assert torch.equal(new.weight, old.weight)
        assert (new.in_features, new.out_features) == (old.in_features, old.out_features)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@torch.inference_mode()
def test_a_hook_that_changes_nothing_changes_no_bit(act: str, dtype: WeightDtype) -> None:
    """An adapter's hooks make gate and up two products; rows that do not use it stay what they were."""
    llama = model(act=act)
    pack_linears(llama, dtype)
    mlp = llama.model.layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    x = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(1))
    before = mlp(x)

    def unchanged(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.0

    mlp.gate_proj.register_forward_hook(unchanged)
    assert torch.equal(mlp(x), before)
