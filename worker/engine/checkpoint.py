"""The safetensors files of a model folder, read a few rows at a time.

The files stay open, so a folder that is deleted or replaced by another of its name still gives what it held. They are
read, not mapped: a file that is cut short under our hands is an error and not the process's end.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

CHUNK_BYTES = 4 << 20  # of a file, read at once

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_HEADER = 100 << 20


class Unreadable(Exception):
    """The files are not what safetensors' are, or not whole. The text completes "the weights cannot be read: …"."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies."""

    file: int  # descriptor
    dtype: torch.dtype | None  # None: of a kind that is not computed with, as integers
    shape: tuple[int, ...]
    begin: int  # byte within the file
    size: int  # bytes


class Checkpoint:
    """The tensors of a folder, by name.

    Raises:
        Unreadable: there are no such files, or a header does not fit its file.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Stored] = {}
        for path in _files(folder):
            try:
                file = os.open(path, os.O_RDONLY)
            except OSError as e:
                raise Unreadable(f"{path.name}: {e.strerror}") from e
            weakref.finalize(self, os.close, file)
            try:
                self.tensors |= _header(file)
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise Unreadable(f"{path.name} is cut short or no safetensors file") from e

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor as a matrix [rows, last dimension], from its first row on: (number of the first row, rows).

        Raises:
            Unreadable: the file has become shorter.
        """
        stored = self.tensors[name]
        assert stored.dtype is not None, f"{name} is of a kind that nobody reads"
        columns = stored.shape[-1] if stored.shape else 1
        count = math.prod(stored.shape) // max(columns, 1)
        width = columns * stored.dtype.itemsize
        step = max(CHUNK_BYTES // max(width, 1), 1)
        for first in range(0, count, step):
            data = torch.empty(min(step, count - first) * width, dtype=torch.uint8)
            _fill(stored.file, data.numpy().data, stored.begin + first * width)
            yield first, data.view(stored.dtype).view(-1, columns)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if (whole := folder / "model.safetensors").exists() or not index.exists():
        return [whole]
    try:
        return sorted({folder / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise Unreadable(f"{index.name} is not understood") from e


def _header(file: int) -> dict[str, Stored]:
    """Raises ValueError, KeyError, TypeError or AttributeError where it is none."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < size < _MOST_HEADER:
        raise ValueError(size)
    header = json.loads(os.pread(file, size, 8))
    header.pop("__metadata__", None)
    end, out = os.fstat(file).st_size, {}
    for name, told in header.items():
        begin, stop = (8 + size + int(place) for place in told["data_offsets"])
        dtype, shape = _DTYPES.get(told["dtype"]), tuple(map(int, told["shape"]))
        whole = dtype is None or math.prod(shape) * dtype.itemsize == stop - begin
        if not (8 + size <= begin <= stop <= end and whole):
            raise ValueError(name)
        out[name] = Stored(file, dtype, shape, begin, stop - begin)
    return out


def _fill(file: int, data: memoryview, place: int) -> None:
    while data:
        got = os.preadv(file, [data], place)
        if got == 0:
            raise Unreadable("a file has become shorter while it was read")
        data, place = data[got:], place + got
