"""The engine that runs transformers' models: schedule, run, sample, hand out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import partial
from pathlib import Path

import torch

from ...shared.errors import EngineError, Unavailable
from ...shared.messages import GenerateJob
from ..card import load_card, resolve_model
from ..interface import Beside, StepOutput
from ..meter import Meter
from ..settings import WorkerSettings
from .adapter import read_adapter
from .build import build, overlaps
from .grammar import Grammar, Grammars
from .intake import Intake
from .loader import load_model, resolve_device, resolve_dtype
from .lora import linears
from .pipeline import Pipeline
from .preparing import Preparing
from .profiler import Profiler
from .sampler import Sampler
from .stepper import Stepper
from .weights import ServedWeights, blueprint


class TransformersEngine:
    """Continuous batching over one model. Answers to `worker.interface.Engine`.

    Raises:
        ModelRefused, ConfigError: with the key and the value, and what to do.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        card, tokenizer = load_card(settings)
        device, folder = resolve_device(settings), resolve_model(settings)[1]
        load = partial(
            load_model,
            dtype=resolve_dtype(settings, device),
            device=device,
            context_length=card.context_length,
            weight_dtype=settings.weight_dtype,
            attention_backend=settings.attention_backend,
            deterministic=settings.deterministic,
        )
        loaded = load(folder)
        self._weights = ServedWeights(loaded, blueprint(folder), load)
        dtype = str(loaded.dtype).removeprefix("torch.")
        self.card = dataclasses.replace(card, vocab_size=loaded.vocab_size, dtype=dtype)
        self._scheduler, runner = build(settings, self.card, loaded)
        self._adapters = runner.adapters
        self._read_adapter = partial(
            read_adapter,
            linears=linears(loaded.model),
            max_rank=settings.max_lora_rank,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._grammars = Grammars(tokenizer, self.card.vocab_size, self.card.eos_token_ids)
        self._preparing = Preparing(self._grammars)
        self._intake = Intake(self._adapters, share_cache=settings.prefix_cache == "shared")
        self._meter = Meter("schedule", "forward", "sample")
        self._stepper = Stepper(
            self._scheduler,
            runner,
            Sampler(loaded.device),
            self._grammars,
            self._meter,
            vocab_size=self.card.vocab_size,
        )
        overlap = overlaps(settings, loaded.device)
        self._pipeline = Pipeline(self._scheduler, self._stepper, self._meter, overlap=overlap)
        self._profiler = Profiler(settings.profile_dir, self.card.name)
        self._ended: list[StepOutput] = []  # sequences that had nothing left to do when they were added

    def add(self, job: GenerateJob, produced: Ids[int] = ()) -> None:
        if job.rid in self._scheduler or job.rid in self._preparing:
            raise EngineError(f"request {job.rid} is running already")
        sequence = self._intake.sequence(self.card, job, produced)
        finish = sequence.finish()
        if finish is not None and sequence.scored is None:
            # Nothing was asked for, or the worker before us died between the last token and the end mark.
            self._ended.append(StepOutput(job.rid, finish=finish))
        elif (grammar := Grammar.of(job.sampling)) is not None:
            self._preparing.add(sequence, grammar)
        else:
            self._scheduler.add(sequence)

    def abort(self, rid: str) -> None:
        self._scheduler.remove(rid)
        self._preparing.remove(rid)
        self._ended = [output for output in self._ended if output.rid != rid]

    def step(self) -> list[StepOutput]:
        self._begin_prepared()
        ended, self._ended = self._ended, []
        outputs = ended + self._pipeline.step()
        self._profiler.step()
        return outputs

    def has_work(self) -> bool:
        return bool(self._ended) or len(self._scheduler) + len(self._preparing) > 0

    def free_slots(self) -> int:
        return max(self._scheduler.free_slots() - len(self._preparing), 0)

    def running(self) -> list[str]:
        return self._scheduler.rids() + self._preparing.rids() + [output.rid for output in self._ended]

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        put = self._weights.read(Path(folder), beside)

        def use(version: str) -> None:
            self._pipeline.discard()
            if (loaded := put()) is not None:
                self._stepper.runner = self._stepper.runner.with_model(loaded.model, loaded.attention)
            self.card = dataclasses.replace(self.card, weight_version=version)

        return use

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        self._adapters.check_room(name)
        try:
            adapter = self._read_adapter(Path(folder))
        except torch.OutOfMemoryError as e:
            raise Unavailable(f"the worker's memory does not suffice for adapter '{name}'; unload another") from e

        def use() -> str:
            self._adapters.add(name, adapter)
            return adapter.id

        return use

    def drop_lora(self, name: str) -> None:
        self._adapters.drop(name)

    def loras(self) -> dict[str, str]:
        return self._adapters.ids()

    def retract(self) -> None:
        self._pipeline.discard()
        self._scheduler.retract()

    def flush_cache(self) -> int:
        return self._scheduler.cache.flush()

    def stats(self) -> dict[str, float]:
        scheduler, cache = self._scheduler, self._scheduler.cache
        return {
            "steps": self._stepper.steps,
            "prefill_tokens": self._stepper.prefill_tokens,
            "decode_tokens": self._stepper.decode_tokens,
            "sequences_running": len(scheduler.running),
            "sequences_waiting": len(scheduler) - len(scheduler.running) + len(self._preparing),
            "kv_blocks": scheduler.blocks.usable,
            "kv_blocks_used": scheduler.blocks.usable - scheduler.blocks.num_free,
            "prefix_queried_tokens": cache.queried_tokens,
            "prefix_hit_tokens": cache.hit_tokens,
            "preemptions": scheduler.preemptions,
            "draft_tokens": scheduler.speculation.drafted,
            "accepted_tokens": scheduler.speculation.accepted,
            **{f"{phase}_seconds": seconds for phase, seconds in self._meter.seconds.items()},
        }

    def start_profile(self, steps: int) -> str:
        return self._profiler.start(steps)

    def stop_profile(self) -> str:
        return self._profiler.stop()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def close(self) -> None:
        for rid in self._scheduler.rids():
            self._scheduler.remove(rid)
        self._pipeline.discard()
        self._grammars.close()
        self._stepper.runner.close()

    def _begin_prepared(self) -> None:
        """Schedule what waited for its grammar, and end what waited in vain."""
        if not self._preparing:
            return
        if not self._ended and not self._scheduler:
            self._preparing.wait()
        ready, refused = self._preparing.take()
        for sequence in ready:
            self._scheduler.add(sequence)
        self._ended += [StepOutput(rid, finish=finish) for rid, finish in refused]
