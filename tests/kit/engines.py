"""Driving an engine by hand: jobs in, tokens out, and transformers' own eager forward as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from headrace.shared.chunks import Finish, PromptLogprobs, TokenLogprob
from headrace.shared.messages import GenerateJob, Lane, SamplingParams
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings


@dataclass
class Generation:
    """All that an engine said of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    prompt: PromptLogprobs | None = None
    cached_tokens: int | None = None
    steps: int = 0


def job(
    rid: str,
    prompt: Sequence[int],
    *,
    top_logprobs: int | None = None,
    lane: Lane = "std",
    tenant: str = "default",
    **sampling: Any,
) -> GenerateJob:
    """A job that is greedy and goes on past eos, unless `sampling` says otherwise."""
    plain: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 8}
    params = SamplingParams(**(plain | sampling))
    return GenerateJob(
        rid=rid,
        model="m",
        pool="m",
        tokenizer="",
        input_ids=tuple(prompt),
        sampling=params,
        return_logprob=top_logprobs is not None,
        top_logprobs_num=top_logprobs or 0,
        lane=lane,
        tenant=tenant,
    )


def tiny_engine(folder: Path, **settings: Any) -> TransformersEngine:
    """A float32 engine on the CPU with few slots, small blocks and a small budget, so that short tests reach chunked
    prefill, mixed batches and full pools."""
    small: dict[str, Any] = {"max_running": 8, "max_batch_tokens": 24, "block_size": 4, "kv_memory": "64mb"}
    small |= {"device": "cpu", "dtype": "float32"}
    return TransformersEngine(WorkerSettings(model=f"m={folder}", **(small | settings)))


def advance(engine: TransformersEngine, out: dict[str, Generation]) -> None:
    """One step, noted in `out`."""
    for output in engine.step():
        generation = out.setdefault(output.rid, Generation())
        assert generation.finish is None, f"{output.rid} speaks after its end"
        generation.steps += 1
        generation.token_ids += output.token_ids
        generation.logprobs += output.logprobs or ()
        generation.finish = output.finish
        generation.prompt = output.prompt or generation.prompt
        if output.cached_tokens is not None:
            assert generation.cached_tokens is None, f"{output.rid} says twice how much was cached"
            generation.cached_tokens = output.cached_tokens


def run(engine: TransformersEngine, jobs: Sequence[GenerateJob]) -> dict[str, Generation]:
    """Add all jobs at once and step to the end; nothing may be left behind."""
    for one in jobs:
        engine.add(one)
    return drain(engine)


def drain(engine: TransformersEngine) -> dict[str, Generation]:
    out: dict[str, Generation] = {}
    while engine.has_work():
        advance(engine, out)
        engine.check_integrity()
    return out


def random_prompts(lengths: Sequence[int], *, low: int = 5, high: int = 260, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def reference_model(folder: Path) -> Any:
    """transformers' own model with its eager attention, float32."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.inference_mode()
def reference(folder: Path, prompt: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the log-probabilities [count, vocabulary] that each was chosen from; no cache, no batch."""
    ids, rows = list(prompt), []
    for _ in range(count):
        rows.append(reference_model(folder)(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1))
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)
