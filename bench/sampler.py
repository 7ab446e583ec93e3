"""A step of the sampler alone, on a CPU: host and kernel together, per kind of request.

python bench/sampler.py [--rows 32 256] [--vocab 49152] [--threads 1]
python bench/sampler.py --logprobs --rows 1 32 --vocab 49152  # log-probabilities alone, beside torch's own operations
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from headrace.kernels.cpu.logprobs import summarize
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.worker.engine.grammar import Grammar, Grammars
from headrace.worker.engine.logprobs import LEAST, logprobs_of
from headrace.worker.engine.sampler import Sampler
from headrace.worker.engine.sequence import Row, Sequence

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
    "frequency and repetition penalty": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "temperature, 5 logprobs": {},
}
PROMPT, OUTPUT = 100, 300  # tokens
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}


def rows_of(kind: str, count: int, vocab: int) -> list[Row]:
    rows = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocab, (PROMPT + OUTPUT,), generator=generator).tolist()
        tops = 5 if "logprobs" in kind else 0
        job = GenerateJob(str(seed), "m", "m", "", tuple(ids[:PROMPT]), SamplingParams(**KINDS[kind]), tops > 0, tops)
        rows.append(Row(Sequence(job, ids, PROMPT, 10_000, frozenset((2,)), seed, seed)))
    return rows


def best_ms(step: Any, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        prepared = step()
        begun = time.perf_counter()
        prepared()
        best = min(best, time.perf_counter() - begun)
    return best * 1000


def measure(kind: str, logits: torch.Tensor) -> float:
    sampler, rows = Sampler(torch.device("cpu")), rows_of(kind, *logits.shape)
    sampler.sample(logits.clone(), rows)  # the prompt is counted once

    def step() -> Any:
        for row in rows:
            row.sequence.append(7)
        given = logits.clone()
        return lambda: sampler.sample(given, rows)

    return best_ms(step)


def measure_mask(folder: Path, count: int, vocab: int, text: str) -> tuple[float, float]:
    """Milliseconds to fill the masks of `count` rows, beside the forward, and to apply them, after it."""
    grammars = Grammars((folder / "tokenizer.json").read_bytes(), vocab, (2,))
    compiled = grammars.compile(Grammar("json_schema", json.dumps(SCHEMA))).result()
    rows = rows_of("temperature", count, vocab)
    for row in rows:
        row.sequence.matcher = grammars.matcher(compiled, [2])
        row.sequence.matcher.handle.accept_string(text)

    def fill() -> Any:
        filling = grammars.fill(rows)
        assert filling is not None
        return filling.result()

    masks = fill()
    filled = best_ms(lambda: fill)
    logits = torch.zeros(count, vocab)
    applied = best_ms(lambda: lambda: masks.apply(logits, rows))
    grammars.close()
    return filled, applied


def measure_logprobs(logits: torch.Tensor, tops: int) -> tuple[float, float, float]:
    """Milliseconds of a step's log-probabilities, of the kernel alone, and of torch's log_softmax and topk for what it
    finds; by turns."""
    count = len(logits)
    jobs = [GenerateJob(str(row), "m", "m", "", (1,), SamplingParams(), True, tops) for row in range(count)]
    steps: tuple[Callable[[], Any], ...] = (
        lambda: logprobs_of(logits, [7] * count, jobs),
        lambda: summarize(logits, tops),
        lambda: logits.log_softmax(-1).clamp_min(LEAST).topk(tops),
    )
    turns = [[best_ms(lambda step=step: step, 3) for step in steps] for _ in range(20)]
    whole, kernel, theirs = (min(times) for times in zip(*turns, strict=True))
    return whole, kernel, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a folder with tokenizer.json: measures grammar masks, too")
    parser.add_argument("--logprobs", action="store_true", help="measure nothing but log-probabilities")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    for count in settings.rows:
        for shape, spread in (("peaked", 4.0), ("flat", 1.0)):
            noise = torch.Generator().manual_seed(0)
            logits = torch.randn(count, settings.vocab, generator=noise) * spread
            for tops in (0, 5, 20) if settings.logprobs else ():
                whole, kernel, theirs = measure_logprobs(logits, tops)
                found = f"kernel {kernel:.3f} ms, torch {theirs:.3f} ms, {theirs / kernel:.1f} times"
                print(f"{count} rows, {shape}, {tops} logprobs: {whole:.3f} ms; {found}", flush=True)
            for kind in () if settings.logprobs else KINDS:
                print(f"{count} rows, {shape}, {kind}: {measure(kind, logits):.2f} ms", flush=True)
        if settings.model:
            for text in ('{"name": "some', '{"name": "x", "tags": ["a",'):
                filled, applied = measure_mask(settings.model, count, settings.vocab, text)
                print(
                    f"{count} masks after {text!r}: filled in {filled:.2f} ms, applied in {applied:.2f} ms", flush=True
                )


if __name__ == "__main__":
    main()
