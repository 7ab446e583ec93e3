"""Other weights for the model that serves.

Where the map of `in_place` holds, the new files are checked beside the steps, a few rows at a time, and then written
over what serves, between two of them: no second model, and nobody waits for the disk. Otherwise a second model is
loaded as the first was, with every rewrite and the dry run, while no step runs, and takes the first one's place. Either
way what cannot serve is refused before anything has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from ...shared.errors import Conflict, EngineError, InvalidRequest, ModelRefused
from ..interface import Beside
from .checkpoint import Checkpoint, Unreadable
from .in_place import NotFinite
from .loader import LoadedModel
from .model_folder import read_config

log = logging.getLogger(__name__)

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


class ServedWeights:
    """The weights of an engine's model.

    Args:
        loaded: the model.
        served: its blueprint.
        load: how it was loaded.
    """

    def __init__(self, loaded: LoadedModel, served: dict[str, Any], load: Callable[[Path], LoadedModel]) -> None:
        self._in_place = loaded.in_place
        self._blueprint = served
        self._load = load
        self._proven = False
        self._turn = Lock()

    def read(self, folder: Path, beside: Beside) -> Callable[[], LoadedModel | None]:
        """Check the weights of `folder`; called on any thread.

        Returns:
            What puts them to use, called between two steps: a model to take the old one's place, or None where it now
            has them. Raises EngineError where the files have changed since; the old weights serve on.

        Raises:
            InvalidRequest: the folder holds another model, or one that cannot serve; it says why.
            Conflict: an earlier reading that was given up has not come to its end.
        """
        if not self._turn.acquire(blocking=False):
            raise Conflict("Weights are still being read that were given up; try again later.", param="model_path")
        try:
            return self._read(folder, beside)
        finally:
            self._turn.release()

    def _read(self, folder: Path, beside: Beside) -> Callable[[], LoadedModel | None]:
        if not folder.is_dir():
            raise InvalidRequest(f"the worker sees no folder {str(folder)!r}", param="model_path")
        try:
            _check_same(blueprint(folder), self._blueprint)
            return self._read_in_place(folder, beside) or self._read_beside(folder, beside)
        except ModelRefused as e:
            raise InvalidRequest(str(e).removeprefix(f"--model {folder}: "), param="model_path") from e
        except Unreadable as e:
            raise InvalidRequest(f"the weights cannot be read: {e}", param="model_path") from e
        except NotFinite as e:
            raise InvalidRequest(str(e), param="model_path") from e

    def _read_in_place(self, folder: Path, beside: Beside) -> Callable[[], None] | None:
        """None where these weights cannot be put into the model that serves."""
        place = self._in_place
        if place is None:
            return None
        new = Checkpoint(folder)
        _check_shapes(new, place.shapes)
        if not place.takes(new):
            return None
        if not self._proven and not place.proven(beside.check):
            log.warning("weights are not kept where they were looked for; this model's are replaced as a whole")
            self._in_place = None
            return None
        self._proven = True
        if place.loses(new, beside.check):
            return None

        def use() -> None:
            try:
                place.put(new)
            except Unreadable as e:
                raise EngineError(f"{folder} has changed since it was checked: {e}; the old weights serve on") from e

        return use

    def _read_beside(self, folder: Path, beside: Beside) -> Callable[[], LoadedModel]:
        beside.rest()
        loaded = self._load(folder)

        def use() -> LoadedModel:
            self._in_place, self._proven = loaded.in_place, False
            return loaded

        return use


def _check_shapes(new: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises InvalidRequest, naming a tensor."""
    missing = sorted(shapes.keys() - new.tensors.keys())
    if missing:
        raise InvalidRequest(
            f"{len(missing)} weights are missing, such as {', '.join(missing[:3])}", param="model_path"
        )
    for name, shape in sorted(shapes.items()):
        if (got := new.tensors[name].shape) != shape:
            raise InvalidRequest(
                f"{name} is {list(got)}, by config.json it should be {list(shape)}", param="model_path"
            )


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
