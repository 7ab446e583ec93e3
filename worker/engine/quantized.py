"""Checkpoints whose weights are quantised already: which can be read here, said before anything is read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from ...shared.errors import ModelRefused

# What transformers' quantizers import, by the method that config.json names.
_PACKAGES = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "quanto": "optimum.quanto",
    "hqq": "hqq",
    "compressed-tensors": "compressed_tensors",
    "eetq": "kernels",
    "fbgemm_fp8": "fbgemm_gpu",
    "aqlm": "aqlm",
    "vptq": "vptq",
    "spqr": "spqr_quant",
    "higgs": "flute",
    "quark": "quark",
    "auto-round": "auto_round",
}
_GPU_ONLY = frozenset({"fp8", "fbgemm_fp8", "eetq", "higgs", "spqr", "fp_quant"})


def check_quantization(config: Any, folder: Path, device: torch.device) -> str:
    """The method that a checkpoint was quantised by; empty where it was not.

    Raises:
        ModelRefused: it needs a package that is not installed, or a GPU.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    name = str(getattr(method, "value", method) or "a method that config.json does not name")
    if name not in AUTO_QUANTIZER_MAPPING:  # transformers would only warn, and take packed numbers for weights
        raise ModelRefused(f"--model {folder}: its weights are quantised by {name}, which transformers does not know")
    if name in _GPU_ONLY and device.type == "cpu":
        raise ModelRefused(
            f"--model {folder}: its weights are quantised by {name}, which is computed on a GPU only; give --device "
            "cuda, or the unquantised weights"
        )
    package = _PACKAGES.get(name)
    if package is not None and not _installed(package):
        raise ModelRefused(
            f"--model {folder}: its weights are quantised by {name}, and the package {package} is not installed; "
            "install it, or give the unquantised weights"
        )
    return name


def is_quantized(model: Any) -> bool:
    """Whether a loaded model's weights are a quantizer's."""
    return getattr(model, "hf_quantizer", None) is not None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
