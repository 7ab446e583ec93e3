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
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import llvmlite.ir as ir
import numba
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .large import LARGE, Kept

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


def runs_alone() -> bool:
    """Whether kernels run on the caller's thread only."""
    return _openmp() is None


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


@intrinsic
def arrive(typing: Any, words: Any) -> Any:
    """Count this thread at a barrier: what it wrote before is seen by whoever sees it `arrived`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("add", arguments[0], ir.IntType(64)(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(words), generate


@intrinsic
def arrived(typing: Any, words: Any) -> Any:
    """How many threads have come to barriers so far."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.int64(words), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a loop that waits."""
    machine, void, number = platform.machine(), ir.VoidType(), ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if machine in ("x86_64", "AMD64"):
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(void, []), "llvm.x86.sse2.pause")
            builder.call(function, [])
        elif machine in ("aarch64", "arm64"):
            hint = ir.FunctionType(void, [number])
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint"), [number(1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call(typing: Any, entry: Any, argument: Any) -> Any:
    """Call the C function at an address with one whole number or address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [arguments[1]])
        return context.get_dummy_value()

    return types.void(entry, argument), generate


@intrinsic
def team_size(typing: Any, function: Any) -> Any:
    """The number that the C function at an address returns; 1 for no address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counts = ir.FunctionType(ir.IntType(32), []).as_pointer()
        size = cgutils.alloca_once_value(builder, ir.IntType(64)(1))
        with builder.if_then(builder.icmp_signed("!=", arguments[0], ir.IntType(64)(0))):
            counted = builder.call(builder.inttoptr(arguments[0], counts), [])
            builder.store(builder.zext(counted, ir.IntType(64)), size)
        return builder.load(size)

    return types.int64(function), generate


def bits(number: float) -> int:
    """A float as `as_float` reads it."""
    return ctypes.c_int64.from_buffer(ctypes.c_double(number)).value


def address(tensor: torch.Tensor | None) -> int:
    """Of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


class Recorder(Protocol):
    """Takes launches in place of the team."""

    def add(self, entry: int, arguments: tuple[int, ...]) -> None: ...

    def empty(self, rows: int, *shape: int) -> torch.Tensor: ...


recording: Recorder | None = None
_kept = Kept()


def empty(rows: int, *shape: int) -> torch.Tensor:
    """[rows, *shape] float32 for a kernel to write to."""
    if recording is not None:
        return recording.empty(rows, *shape)
    return _kept.empty(rows, *shape) if rows * shape[0] >= LARGE else torch.empty(rows, *shape, dtype=torch.float32)


def entry(function: Callable[[Any], None]) -> Callable[[], int]:
    """What gives the address of the C function that `function(words)` is compiled to, when it is first asked for."""

    @functools.cache
    def compiled() -> int:
        return int(numba.cfunc(_SIGNATURE, cache=True, error_model="numpy")(function).address)

    return compiled


def kernel(function: Callable[[Any], None]) -> Callable[..., None]:
    """Compile `function(words)`, when it is first launched, to run on a team of threads.

    What it makes takes whole numbers (sizes, addresses, bits of floats), which stand in `words` in that order from 1
    on. A decoding step launches hundreds of these, so a launch does nothing but that.
    """
    compiled = entry(function)

    @functools.wraps(function)
    def launch(*arguments: int) -> None:
        if recording is not None:
            recording.add(compiled(), arguments)
            return
        words = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
        run(compiled(), ctypes.addressof(words))

    return launch


def _runner() -> tuple[Callable[[int, int], None], int]:
    """What calls the C function at an address with `words` on each thread of a team, and the address of the function
    that tells a thread how many they are, 0 where there is but one."""
    library = _openmp()
    if library is None:
        call_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        return (lambda function, words: call_alone(function)(words)), 0
    parallel, threads = library.GOMP_parallel, torch.get_num_threads
    size = ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value or 0
    return (lambda function, words: parallel(function, words, threads(), 0)), size


run, TEAM_SIZE = _runner()
