"""A decoding step against what memory allows: the bytes that it must read, over the bandwidth of this machine.

    python bench/floor.py --model smollm2-135m [any flag of a worker]

A step reads each weight once, whatever its batch, and the K/V of its sequences. The bandwidth is that of a sum over
much memory by all threads, measured between the steps, so that both see the same neighbours.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Any

import torch
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.settings import load
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.linear import PackedLinear, Part
from headrace.worker.settings import WorkerSettings
from torch import nn

LEVELS = (1, 8, 32)
PROMPT, STEPS, ROUNDS = 100, 8, 12
MEMORY = torch.zeros(100_000_000)  # 400 MB, more than any cache


def main(argv: list[str]) -> None:
    settings = load(WorkerSettings, argv, "bench/floor.py")
    engine = TransformersEngine(settings)
    weights = weight_bytes(engine._stepper.runner._model)  # no user of an engine needs its modules
    print("| sequences | read a step | floor | step, best | median | best over floor | tokens/s at best |")
    print("|---|---|---|---|---|---|---|")
    for level in LEVELS:
        steps, bandwidth = run(engine, level)
        # Half of the levels' steps come after the middle: that many tokens does a sequence have by then.
        tokens = level * (PROMPT + ROUNDS * STEPS // 2)
        read = weights + tokens * kv_bytes(engine)
        floor, best = read / bandwidth * 1e3, min(steps)
        print(
            f"| {level} | {read / 1e6:.0f} MB | {floor:.1f} ms at {bandwidth / 1e9:.1f} GB/s | {best:.1f} ms | "
            f"{statistics.median(steps):.1f} ms | {best / floor:.2f} | {level / best * 1e3:.0f} |",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - MEMORY.nbytes
    print(f"\nweights {weights / 1e6:.0f} MB, peak memory of the process {peak / 1e6:.0f} MB")


def run(engine: TransformersEngine, level: int) -> tuple[list[float], float]:
    """Milliseconds of steps in which `level` sequences decode, and bytes a second that memory gave between them."""
    for number in range(level):
        engine.add(job(number, level))
    while sum(bool(output.token_ids) for output in engine.step()) < level:
        pass
    steps, bandwidth = [], 0.0
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            began = time.perf_counter()
            engine.step()
            steps.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        MEMORY.sum()
        bandwidth = max(bandwidth, MEMORY.nbytes / (time.perf_counter() - began))
    for rid in engine.running():
        engine.abort(rid)
    return steps, bandwidth


def job(number: int, level: int) -> GenerateJob:
    source = torch.Generator().manual_seed(100 * level + number)
    prompt = tuple(torch.randint(100, 20_000, (PROMPT,), generator=source).tolist())
    sampling = SamplingParams(max_new_tokens=PROMPT + 2 * ROUNDS * STEPS, temperature=0.0, ignore_eos=True)
    return GenerateJob(f"{level}-{number}", "", "", "", prompt, sampling)


def weight_bytes(model: nn.Module) -> int:
    """Of all weights but embeddings, of which a step reads a row for each sequence."""
    tensors: dict[int, Any] = {}
    for module in model.modules():
        own = list(module.parameters(recurse=False)) if not isinstance(module, nn.Embedding) else []
        if isinstance(module, (PackedLinear, Part)):
            own.append(module.together.whole.panels if isinstance(module, Part) else module.panels)
        tensors |= {tensor.data_ptr(): tensor for tensor in own}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def kv_bytes(engine: TransformersEngine) -> int:
    """Of one token in all layers."""
    pool = engine._stepper.runner._cache
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in pool.layers) * pool.dtype.itemsize


if __name__ == "__main__":
    main(sys.argv[1:])
