"""Other weights for the model that serves: read and tried beside it, then put in its place between two steps.

The new model is loaded as the old one was, with every rewrite and the dry run, so that whatever is merged or packed
there is merged and packed here, and what cannot serve is refused before anything has changed. It costs memory for both
for as long as that takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...shared.errors import InvalidRequest, ModelRefused
from .loader import LoadedModel, read_config

# Fields of a configuration that say nothing about what the weights compute.
_ASIDE = frozenset(
    {
        *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "output_attentions"),
        *(
            "output_hidden_states",
            "return_dict",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "id2label",
            "label2id",
        ),
        *("_attn_implementation", "attn_implementation", "problem_type"),
    }
)


def blueprint(folder: Path) -> dict[str, Any]:
    """What of a folder's configuration decides which weights fit and what they compute.

    Raises:
        ModelRefused: there is no configuration that transformers reads.
    """
    return _flat(read_config(folder).to_dict())


def read_beside(folder: Path, served: dict[str, Any], load: Callable[[Path], LoadedModel]) -> LoadedModel:
    """The weights of `folder`, loaded by `load` as those that serve were.

    Args:
        served: the blueprint of the model that serves.

    Raises:
        InvalidRequest: the folder holds another model, or one that cannot serve; it says why.
    """
    if not folder.is_dir():
        raise InvalidRequest(f"the worker sees no folder {str(folder)!r}", param="model_path")
    try:
        _check_same(blueprint(folder), served)
        return load(folder)
    except ModelRefused as e:
        raise InvalidRequest(str(e).removeprefix(f"--model {folder}: "), param="model_path") from e


def _check_same(wanted: dict[str, Any], served: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() | served.keys()):
        new, old = wanted.get(name), served.get(name)
        if new != old:
            raise InvalidRequest(
                f"its configuration is another model's: {name} is {new!r}, the model that serves has {old!r}",
                param="model_path",
            )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configurations with dotted names."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if name in _ASIDE:
            continue
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
