"""What each of the engine's devices gains: the bare engine loop with and without it, a line each.

    python bench/effects.py --model DIR [--concurrency 1 8] [worker flags]

Two engines take turns, so that both see the same neighbours; the ratio is that of the medians of their decoding steps.
What a flag turns off is turned off by it; merges and programs, which have none, by leaving them out at load. The prefix
cache and guessed tokens depend on the requests: `prefix_cache.py` and `speculation.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine import fused_layer, fused_stack, linear
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings

PROMPT, STEPS, ROUNDS = 100, 12, 8


@contextmanager
def without_merges() -> Iterator[None]:
    with mock.patch.object(linear, "_TOGETHER", ()), mock.patch.object(linear, "_fused", return_value=None):
        yield


def without_programs() -> Any:
    return mock.patch.object(fused_stack, "install", return_value=None)


def without_fused_layers() -> Any:
    return mock.patch.object(fused_layer, "install", return_value=[])


# What it is, and what leaves it out: flags, or a rewrite that is not made. And the flags that put it in.
EFFECTS: tuple[tuple[str, list[str], Any, list[str]], ...] = (
    ("two-byte weights, packed, and all that follows", ["--weight-dtype", "float32"], nullcontext, []),
    ("q/k/v and gate/up merged (and layers fused, which need it)", [], without_merges, []),
    ("fused layers", [], without_fused_layers, []),
    ("the layers as one program", [], without_programs, []),
    ("--deterministic", [], nullcontext, ["--deterministic"]),
    ("--overlap on", ["--overlap", "off"], nullcontext, ["--overlap", "on"]),
    ("--weight-dtype int8", [], nullcontext, ["--weight-dtype", "int8"]),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    args, flags = parser.parse_known_args()
    print("| effect | sequences | step without, ms | with | ratio |\n|---|---|---|---|---|")
    for name, off, leave_out, on in EFFECTS:
        with leave_out():
            plain = TransformersEngine(load(WorkerSettings, [*flags, *off], "effects.py"))
        better = TransformersEngine(load(WorkerSettings, [*flags, *on], "effects.py"))
        for level in args.concurrency:
            without, with_it = compare(plain, better, level)
            print(f"| {name} | {level} | {without:.1f} | {with_it:.1f} | {without / with_it:.2f} |", flush=True)
        plain.close()
        better.close()


def compare(plain: TransformersEngine, better: TransformersEngine, level: int) -> tuple[float, float]:
    """Median milliseconds of both engines' decoding steps."""
    times: dict[TransformersEngine, list[float]] = {plain: [], better: []}
    for engine in times:
        for number in range(level):
            engine.add(job(number, level))
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
    return statistics.median(times[plain]), statistics.median(times[better])


def job(number: int, level: int) -> GenerateJob:
    prompt = tuple(range(100 + 7 * number + level, 100 + 7 * number + level + PROMPT))
    sampling = SamplingParams(max_new_tokens=2 * ROUNDS * STEPS, temperature=0.0, ignore_eos=True)
    return GenerateJob(f"{level}-{number}", "", "", "", prompt, sampling)


if __name__ == "__main__":
    main()
