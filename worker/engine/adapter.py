"""A LoRA adapter as PEFT saves it: read, checked against the model, ready to be added to its linears.

adapter_config.json          rank, alpha, and what else the training did
adapter_model.safetensors    base_model.model.<path of a linear>.lora_A.weight [rank, in], .lora_B.weight [out, rank]

y = W x + scale * B (A x)    scale = alpha / rank, or alpha / sqrt(rank) with rsLoRA; it is multiplied into B here
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...shared.errors import InvalidRequest
from .linear import PackedLinear

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
# Trained with these, an adapter is more than B A, or has tensors that are no linear's.
_REFUSED = (
    *("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "arrow_config", "use_bdlora"),
)
# Other ways to begin a training change the base model's own weights.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Factors:
    """What an adapter adds to one linear: x [T, in] times a [rank, in] transposed, times b [out, rank] transposed."""

    a: torch.Tensor
    b: torch.Tensor
    packed: tuple[PackedLinear, PackedLinear] | None = None  # on a CPU: a row is the same whatever stands beside it

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out]."""
        if self.packed is None:
            return (x @ self.a.T) @ self.b.T
        down, up = self.packed
        out: torch.Tensor = up(down(x))
        return out

    def on(self, device: torch.device, dtype: torch.dtype) -> Factors:
        a, b = self.a.to(device, dtype), self.b.to(device, dtype)
        if (device.type, dtype) != ("cpu", torch.float32):
            return Factors(a, b)
        return Factors(a, b, (PackedLinear.of(a, None, "auto"), PackedLinear.of(b, None, "auto")))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in the model's dtype, on its device. `id` follows from its files' content: two of one id are equal."""

    id: str
    rank: int  # the largest of its linears
    factors: Mapping[str, Factors]  # by the linear's path in the model


def read_adapter(
    folder: Path,
    linears: Mapping[str, tuple[int, int]],
    *,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Adapter:
    """Read a PEFT folder.

    Args:
        linears: (inputs, outputs) of each linear of the model by its path.

    Raises:
        InvalidRequest: the folder is broken, is not of this model, or asks for what is not served; it says what.
    """
    try:
        config, tensors, content = _read_config(folder), _read_tensors(folder / WEIGHTS), _content_id(folder)
    except OSError as e:
        raise _wrong(f"its files cannot be read: {e.strerror or e}") from e
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise _wrong(f"{key} is no factor of a linear; only plain LoRA is served")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise _wrong(f"{WEIGHTS} holds no tensor")
    factors = {path: _factors(path, pair, linears, config) for path, pair in pairs.items()}
    rank = max(f.a.shape[0] for f in factors.values())
    if rank > max_rank:
        raise _wrong(f"its rank is {rank}, and --max-lora-rank of the worker is {max_rank}")
    placed = {path: each.on(device, dtype) for path, each in factors.items()}
    return Adapter(content, rank, placed)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise _wrong(f"the worker sees no folder {str(folder)!r}")
    path = folder / CONFIG
    if not path.is_file():
        raise _wrong(f"it has no {CONFIG}; it should be a PEFT adapter's folder")
    try:
        config = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as e:
        raise _wrong(f"{CONFIG} is not JSON: {e}") from e
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise _wrong(f"peft_type is {kind!r}; LORA is served")
    for name in _REFUSED:
        if config.get(name):
            raise _wrong(f"{name} is {str(config[name])[:80]!r}; adapters with it are not served")
    if config.get("bias", "none") != "none":
        raise _wrong(f"bias is {config['bias']!r}; adapters that change biases are not served")
    if config.get("init_lora_weights", True) not in _INITS:
        raise _wrong(f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base model's weights")
    return config


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise _wrong(f"it has no {WEIGHTS}; save it with `save_pretrained(…, safe_serialization=True)`")
    try:
        return load_file(path)
    except SafetensorError as e:
        raise _wrong(f"{WEIGHTS} cannot be read: {e}") from e


def _factors(
    path: str, pair: Mapping[str, torch.Tensor], linears: Mapping[str, tuple[int, int]], config: Mapping[str, Any]
) -> Factors:
    if path not in linears:
        raise _wrong(f"{path} is no linear of this model that takes an adapter")
    if pair.keys() != {"A", "B"}:
        raise _wrong(f"{path} has lora_{next(iter(pair))} alone")
    a, b = pair["A"].float(), pair["B"].float()
    inputs, outputs = linears[path]
    rank, alpha = _of(config, "r", "rank_pattern", path), _of(config, "lora_alpha", "alpha_pattern", path)
    if a.shape != (rank, inputs) or b.shape != (outputs, rank):
        raise _wrong(
            f"{path} has factors {list(a.shape)} and {list(b.shape)}; of rank {rank:g} for this model "
            f"they are {[int(rank), inputs]} and {[outputs, int(rank)]}"
        )
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise _wrong(f"{path} holds values that are not finite")
    return Factors(a, b * (alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank))


def _of(config: Mapping[str, Any], name: str, pattern_name: str, path: str) -> float:
    """A number of the configuration: the one of the first pattern that names the linear, else the adapter's."""
    value, patterns = config.get(name), config.get(pattern_name) or {}
    if not isinstance(patterns, dict):
        raise _wrong(f"{pattern_name} is {patterns!r}; it should be an object")
    for pattern, special in patterns.items():
        try:
            names_it = re.fullmatch(rf"(.*\.)?({pattern})", path)
        except re.error as e:
            raise _wrong(f"{pattern_name} holds {pattern!r}, which is no pattern: {e}") from e
        if names_it:
            value = special
            break
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _wrong(f"{name} of {path} is {value!r}; it should be a number above 0")
    return value


def _content_id(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in (CONFIG, WEIGHTS):
        data = (folder / name).read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"the adapter cannot be loaded: {message}", param="lora_path")
