"""Runs a compiled function on torch's own threads.

Two pools of threads on the same cores fight each other, so our kernels use the OpenMP runtime that torch brings along:
`GOMP_parallel` runs a C function of one pointer on every thread of the team. Threads take pieces of the work as they
come, so that one which the system has put aside holds up no more than its own piece.

    words  int64 [next piece, argument 0, argument 1, …] ──► kernel(words) on each thread, until `take` has no more
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.ir as ir
import numba
import torch
from numba import types
from numba.extending import intrinsic

_SIGNATURE = types.void(types.CPointer(types.int64))


def _cache_folder() -> str:
    """Where compiled kernels are kept: a folder of its own for each state of the sources, since numba itself looks only
    at the file of the function it compiles and not at what that calls."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    name = hashlib.blake2b(sources, digest_size=8).hexdigest()
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "headrace" / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # a home that is read-only, another user's, or unknown
        return tempfile.mkdtemp(prefix="headrace-kernels-")
    return str(folder)


numba.config.CACHE_DIR = _cache_folder()

# No fast-math: a sum has the order it is written in, whatever the batch.
cpu_jit = functools.partial(numba.njit, cache=True, error_model="numpy")


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """torch's OpenMP runtime, or None where it has none that we know: kernels then run on one thread."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(path))  # loaded already; this only gives it a name
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
        return library
    return None


@intrinsic
def take(typing: Any, words: Any) -> Any:
    """The number of the next piece of work that no thread has taken."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.IntType(64)(1), "monotonic")

    return types.int64(words), generate


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """The float64 whose bits an int64 holds: how a kernel gets a number that is not whole."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(bits), generate


@intrinsic
def floats_at(typing: Any, address: Any) -> Any:
    """An address as a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), generate


@intrinsic
def integers_at(typing: Any, address: Any) -> Any:
    """An address as a pointer to int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(address), generate


def bits(number: float) -> int:
    """A float as `as_float` reads it."""
    return ctypes.c_int64.from_buffer(ctypes.c_double(number)).value


def address(tensor: torch.Tensor | None) -> int:
    """Of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def kernel(function: Callable[[Any], None]) -> Callable[..., None]:
    """Compile `function(words)`, when it is first launched, to run on a team of threads.

    What it makes takes whole numbers (sizes, addresses, bits of floats), which stand in `words` in that order from 1
    on. A decoding step launches hundreds of these, so a launch does nothing but that.
    """

    @functools.cache
    def compiled() -> int:
        return int(numba.cfunc(_SIGNATURE, cache=True, error_model="numpy")(function).address)

    library = _openmp()
    if library is None:

        @functools.wraps(function)
        def launch(*arguments: int) -> None:
            words = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled())(ctypes.addressof(words))

    else:
        run, threads = library.GOMP_parallel, torch.get_num_threads

        @functools.wraps(function)
        def launch(*arguments: int) -> None:
            words = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
            run(compiled(), ctypes.addressof(words), threads(), 0)

    return launch
