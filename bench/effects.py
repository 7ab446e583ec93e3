"""What each of the engine's devices gains: the bare engine loop with and without it, a line each.

    python bench/effects.py --model DIR [--concurrency 1 8] [--only WORD …] [--output FILE.csv] [worker flags]

The engine as it is takes turns with one that differs, so that both see the same neighbours; the ratio is that of the
medians of their decoding steps, without over with. What a flag turns on or off is turned by it; rewrites, which have
none, are left out at load. Both engines keep a K/V pool, so that a GPU needs --kv-memory of less than half of it. The
prefix cache and guessed tokens depend on the requests: `prefix_cache.py` and `speculation.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from headrace.shared.errors import HeadraceError
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine import fused_stack, known_layers, linear
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.lora import linears
from headrace.worker.settings import WorkerSettings
from safetensors.torch import save_file
from table import Table

PROMPT, STEPS, ROUNDS = 100, 12, 8
COLUMNS = ("model", "effect", "sequences", "step_ms_without", "step_ms", "ratio")
ADAPTER, RANK = "adapter", 16


@contextmanager
def without_merges() -> Iterator[None]:
    with mock.patch.object(linear, "_TOGETHER", ()), mock.patch.object(linear, "_fused", return_value=None):
        yield


def without_programs() -> Any:
    return mock.patch.object(fused_stack, "install", return_value=None)


def without_fused_layers() -> Any:
    return mock.patch.object(known_layers, "install", return_value=[])


@dataclass(frozen=True)
class Effect:
    """An engine that differs from the engine as it is.

    Attributes:
        flags, leave_out: what makes it differ: a worker's flags, or a rewrite that is not made at load.
        adds: whether it has what the engine as it is lacks; else it lacks what that one has.
        adapter: the model that its requests name.
    """

    name: str
    flags: tuple[str, ...] = ()
    leave_out: Callable[[], Any] = nullcontext
    adds: bool = False
    adapter: str = ""


EFFECTS = {
    "cpu": (
        Effect("two-byte weights, packed, and all that follows", ("--weight-dtype", "float32")),
        Effect("q/k/v and gate/up merged (and layers fused, which need it)", leave_out=without_merges),
        Effect("fused layers", leave_out=without_fused_layers),
        Effect("the layers as one program", leave_out=without_programs),
        Effect("--deterministic", ("--deterministic",), adds=True),
        Effect("--overlap on", ("--overlap", "on"), adds=True),
        Effect("--weight-dtype int8", ("--weight-dtype", "int8"), adds=True),
        Effect("an adapter", adds=True, adapter=ADAPTER),
    ),
    "cuda": (
        Effect("CUDA graphs", ("--no-cuda-graphs",)),
        Effect("--overlap on", ("--overlap", "off")),
        Effect("fused layers", leave_out=without_fused_layers),
        Effect("--deterministic", ("--deterministic",), adds=True),
        Effect("an adapter", adds=True, adapter=ADAPTER),
    ),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    made.add_argument("--only", nargs="+", default=[""], help="effects whose names hold one of these")
    made.add_argument("--output", type=Path)
    return made


def main() -> int:
    args, flags = parser().parse_known_args()
    as_it_is = TransformersEngine(load(WorkerSettings, flags, "effects.py"))
    device, failed = as_it_is._stepper.runner._cache.device, 0
    table = Table(device, COLUMNS, args.output)
    for effect in EFFECTS[device.type]:
        if not any(word in effect.name for word in args.only):
            continue
        try:
            for line in lines(effect, as_it_is, flags, args.concurrency):
                table.add({"model": as_it_is.card.name, "effect": effect.name, **line})
        except (HeadraceError, RuntimeError) as e:  # the others are measured all the same
            failed = 1
            print(f"{effect.name}: {e}", file=sys.stderr)
    as_it_is.close()
    return failed


def lines(
    effect: Effect, as_it_is: TransformersEngine, flags: list[str], levels: list[int]
) -> Iterator[dict[str, Any]]:
    with effect.leave_out():
        other = TransformersEngine(load(WorkerSettings, [*flags, *effect.flags], "effects.py"))
    try:
        if effect.adapter:
            with tempfile.TemporaryDirectory() as folder:
                save_adapter(Path(folder), other._stepper.runner._model)
                other.read_lora(effect.adapter, folder)()
        for level in levels:
            medians = compare(as_it_is, other, level, effect.adapter)
            without, with_it = medians if effect.adds else reversed(medians)
            yield {
                "sequences": level,
                "step_ms_without": round(without, 2),
                "step_ms": round(with_it, 2),
                "ratio": round(without / with_it, 2),
            }
    finally:
        other.close()


def save_adapter(folder: Path, model: Any) -> None:
    """A random adapter for every linear that takes one."""
    tensors, names = {}, set()
    for path, (inputs, outputs) in linears(model).items():
        names.add(path.split(".")[-1])
        for which, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            tensors[f"base_model.model.{path}.lora_{which}.weight"] = torch.randn(shape) * 1e-3
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def compare(one: TransformersEngine, other: TransformersEngine, level: int, adapter: str) -> tuple[float, float]:
    """Median milliseconds of both engines' decoding steps; `other` serves `adapter`."""
    times: dict[TransformersEngine, list[float]] = {one: [], other: []}
    for engine, model in ((one, ""), (other, adapter)):
        for number in range(level):
            engine.add(job(number, level, model))
        while sum(bool(output.token_ids) for output in engine.step()) < level:
            pass
    for _ in range(ROUNDS):
        for engine, steps in times.items():
            for _ in range(STEPS):
                began = time.perf_counter()
                engine.step()
                steps.append((time.perf_counter() - began) * 1e3)
    for engine in times:
        for rid in engine.running():
            engine.abort(rid)
    return statistics.median(times[one]), statistics.median(times[other])


def job(number: int, level: int, model: str) -> GenerateJob:
    prompt = tuple(range(100 + 7 * number + level, 100 + 7 * number + level + PROMPT))
    sampling = SamplingParams(max_new_tokens=2 * ROUNDS * STEPS, temperature=0.0, ignore_eos=True)
    return GenerateJob(f"{level}-{number}", model, "", "", prompt, sampling)


if __name__ == "__main__":
    sys.exit(main())
