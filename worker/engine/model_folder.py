"""What transformers reads from a model folder, configuration and weights, and its errors as ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ...shared.errors import ModelRefused

log = logging.getLogger(__name__)

# What a model's own code raises on inputs that it is not made for.
MODEL_ERRORS = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, OSError, ImportError),
    *(StrictDataclassError, SafetensorError),
)
HINT = "Serve a decoder-only model whose layers all use transformers' attention interface (llama, qwen, gemma, …)"


def one_line(error: BaseException) -> str:
    """An error of foreign code as a part of a sentence; what says only a key or nothing gets its kind in front."""
    text = " ".join(str(error).split())
    plain = isinstance(error, (OSError, ValueError, RuntimeError, StrictDataclassError)) and text
    return text if plain else f"{type(error).__name__}: {text}".rstrip(": ")


def read_config(folder: Path) -> Any:
    """transformers' configuration of a model folder.

    Raises:
        ModelRefused: there is none that it understands.
    """
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except MODEL_ERRORS as e:
        raise ModelRefused(f"--model {folder}: config.json is not understood: {one_line(e)}") from e


def generator_config(folder: Path) -> Any:
    """The configuration of a folder whose model generates text.

    Raises:
        ModelRefused: it does not, or there is none.
    """
    config = read_config(folder)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"--model {folder}: {config.model_type} is an encoder-decoder. {HINT}")
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelRefused(f"--model {folder}: {config.model_type} does not generate text. {HINT}")
    return config


def read_weights(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a folder, on the CPU.

    Raises:
        ModelRefused: files are broken, weights are missing or of other shapes.
    """
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained  # its types know no loading info
    try:
        with quiet():
            model, info = from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,  # a pickle runs what its writer wanted
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except MODEL_ERRORS as e:
        raise ModelRefused(f"--model {folder}: the weights cannot be read: {one_line(e)}") from e
    for name, got, wanted in sorted(info["mismatched_keys"]):
        raise ModelRefused(f"--model {folder}: {name} is {list(got)}, by config.json it should be {list(wanted)}")
    if info["unexpected_keys"]:
        some = ", ".join(sorted(info["unexpected_keys"])[:3])
        log.warning("%s: %d weights have no place in the model, such as %s", folder, len(info["unexpected_keys"]), some)
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelRefused(f"--model {folder}: {len(info['missing_keys'])} weights are missing, such as {some}")
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar of transformers on a worker's standard error."""
    logging_utils: Any = transformers.utils.logging
    shown = logging_utils.is_progress_bar_enabled()
    logging_utils.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging_utils.enable_progress_bar()
