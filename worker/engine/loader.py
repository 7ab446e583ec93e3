"""From a model folder to a model that runs over our pool, or a clear refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...shared.errors import ConfigError, ModelRefused
from ..settings import WorkerSettings
from . import fused_layer, fused_stack, known_layers, onednn, rope, trial
from .attention import IMPLEMENTATION, PagedAttention
from .attention_triton import triton_is_installed
from .checkpoint import Checkpoint, Unreadable
from .fuse import fuse_norms
from .in_place import InPlace, ties_of
from .kv_cache import LayerShape
from .linear import WeightDtype, pack_linears
from .model_folder import HINT, MODEL_ERRORS, generator_config, one_line, read_weights
from .quantized import check_quantization, is_quantized
from .trial import Proof

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was tried: every layer reaches our attention function."""

    model: nn.Module
    attention: PagedAttention
    layers: tuple[LayerShape, ...]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    invariant: bool  # whether a token's logits were the same bit for bit alone and in a batch
    in_place: InPlace | None = None  # where each tensor of its files is kept, if that is known


# How far rounded weights may move the logits, as a share of their length: a guard against another formula, not against
# the rounding that was asked for.
_ROUNDED = {"bfloat16": 0.1, "int8": 0.5}


def resolve_device(settings: WorkerSettings) -> torch.device:
    """Raises ConfigError where a GPU is asked for that torch does not see."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device (HEADRACE_DEVICE): torch sees {torch.cuda.device_count()} GPUs, got {device}")
    return device


def resolve_dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, whose kernels read two-byte weights as they are; on a GPU bfloat16, or float16 where
    bfloat16 is emulated."""
    if settings.dtype != "auto":
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.dtype]
        if device.type == "cpu" and dtype != torch.float32 and not onednn.supported():
            log.warning("--dtype %s is emulated on this CPU; float32 is several times faster", settings.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float32


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    weight_dtype: WeightDtype = "auto",
    attention_backend: str = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """Load weights and try the model.

    Args:
        deterministic: on a GPU, multiply by kernels whose rows do not depend on the batch.

    Raises:
        ModelRefused: the folder is broken, weights are missing, or the architecture cannot run over a paged pool.
    """
    if device.index is not None:  # "cuda:N"; a thread's own, and where Triton launches its kernels
        torch.cuda.set_device(device)
    config = generator_config(folder)
    check_quantization(config, folder, device)
    model = read_weights(folder, dtype).to(device).eval().requires_grad_(False)
    ties = ties_of(model)
    num_layers = int(config.get_text_config().num_hidden_layers)
    loaded = adopt(
        model,
        name=str(folder),
        num_layers=num_layers,
        context_length=context_length,
        weight_dtype=weight_dtype,
        attention_backend=attention_backend,
        deterministic=deterministic,
    )
    try:
        return replace(loaded, in_place=InPlace.of(loaded.model, ties, Checkpoint(folder)))
    except Unreadable:  # weights in another form of file, which transformers reads
        return loaded


def adopt(
    model: Any,
    *,
    name: str,
    num_layers: int,
    context_length: int,
    weight_dtype: WeightDtype,
    attention_backend: str,
    deterministic: bool,
) -> LoadedModel:
    """Put our attention into a transformers model and prove that it computes what it did before.

    Raises:
        ModelRefused: naming the architecture and what is wrong with it.
    """
    kind = type(model).__name__
    parameter = next(model.parameters())
    vocab_size = int(model.config.get_text_config().vocab_size)
    attention = PagedAttention()
    stage = "failed on a first try"
    try:
        rope.freeze(model, context_length)
        model.set_attn_implementation("eager")
        wanted = trial.reference(model, vocab_size, parameter.device)
        stage = "does not run with another attention function"
        model.set_attn_implementation(trial.PROBE)
        layers = trial.layers_of(trial.look(model, parameter.device), num_layers, context_length)
        model.set_attn_implementation(IMPLEMENTATION)
        attention.attach(model)
        _rewrite(model, parameter, weight_dtype, attention_backend, deterministic)
        prove = partial(
            trial.prove,
            model,
            attention,
            layers,
            wanted,
            _ROUNDED.get(weight_dtype),
            backend=attention_backend,
            invariant=deterministic,
        )
        proof = prove()
        by_triton = _by_triton(parameter, attention_backend)
        proof = _fuse_layers(model, attention, partial(prove, like=proof), proof, by_triton)
    except trial.Mismatch as e:
        raise ModelRefused(f"--model {name}: {kind} {e}. {HINT}") from e
    except MODEL_ERRORS as e:
        raise ModelRefused(f"--model {name}: {kind} {stage}: {one_line(e)}. {HINT}") from e
    return LoadedModel(model, attention, layers, vocab_size, parameter.dtype, parameter.device, proof.invariant)


def _rewrite(
    model: Any, parameter: torch.Tensor, weight_dtype: WeightDtype, attention_backend: str, deterministic: bool
) -> None:
    """Everything that changes a model's speed and not what it computes."""
    if is_quantized(model):  # its linears keep the weights that their quantizer made
        log.info("%s: %d norms fused, quantised weights as they are", type(model).__name__, fuse_norms(model))
        return
    by_triton = _by_triton(parameter, attention_backend)
    if by_triton:
        from .fuse_cuda import fuse

        fuse(model, invariant=deterministic)
    norms, packed = fuse_norms(model), 0
    if weight_dtype != "float32" and not by_triton and parameter.dtype == torch.float32:
        packed = pack_linears(model, weight_dtype)
        rope.fuse(model)
    elif not by_triton and parameter.dtype == torch.bfloat16 and onednn.supported():
        packed = onednn.pack(model)
    log.info("%s: %d norms fused, %d linears packed", type(model).__name__, norms, packed)


def _by_triton(parameter: torch.Tensor, attention_backend: str) -> bool:
    """Whether a model is rewritten for Triton's kernels: on a GPU, and where they are asked for by name."""
    return (parameter.device.type == "cuda" or attention_backend == "triton") and triton_is_installed()


def _fuse_layers(
    model: Any, attention: PagedAttention, prove: Callable[[], Proof], proof: Proof, by_triton: bool
) -> Proof:
    """Let layers run as a few launches each where the model then still computes the same; returns the proof of that."""
    forward_of: Callable[..., Any] = fused_layer.fused
    if by_triton:
        from . import device_layer

        forward_of = device_layer.fused
    fused = known_layers.install(model, partial(forward_of, attention=attention))
    if not fused:
        return proof
    try:
        proof = prove()
    except (trial.Mismatch, *MODEL_ERRORS) as e:
        log.info("%s keeps its layers' own forward: fused, it %s", type(model).__name__, one_line(e))
        known_layers.remove(fused)
        return proof
    log.info("%s: %d layers fused", type(model).__name__, len(fused))
    return proof if by_triton else _stack_layers(fused, attention, prove, proof)


def _stack_layers(
    layers: list[nn.Module], attention: PagedAttention, prove: Callable[[], Proof], proof: Proof
) -> Proof:
    """Let fused layers decode as one program where the model then still computes the same."""
    stack = fused_stack.install(layers, attention)
    if stack is None:
        return proof
    try:
        return prove()
    except (trial.Mismatch, *MODEL_ERRORS) as e:
        log.info("the layers keep their own launches: in one program, the model %s", one_line(e))
        fused_stack.remove(layers, stack)
        return proof
