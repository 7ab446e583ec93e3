"""The engine that runs transformers' models: schedule, run, sample, hand out."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Callable
from collections.abc import Sequence as Ids
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from ...shared.errors import ContextLengthExceeded, EngineError, InvalidRequest
from ...shared.messages import Finish, GenerateJob, ModelCard, TokenLogprob
from ..card import load_card, resolve_model
from ..interface import StepOutput
from ..meter import Meter
from ..settings import WorkerSettings
from .adapter import read_adapter
from .attention_cpu import CpuAttention
from .attention_triton import TritonAttention
from .backends import make_backend
from .blocks import BlockAllocator
from .cuda_graphs import DecodeGraphs, capture_for
from .device_sampler import is_plain, samples
from .grammar import Grammar, Grammars
from .loader import LoadedModel, load_model, resolve_device, resolve_dtype
from .logprobs import grouped, most_scored, score
from .lora import Adapters, linears
from .memory import num_blocks
from .plan import Slice
from .prefix import cache_seed
from .preparing import Preparing
from .profiler import Profiler
from .runner import ModelRunner
from .sampler import Sample, Sampler
from .scheduler import Scheduler
from .sequence import Sequence, stop_ids
from .weights import blueprint, read_beside

log = logging.getLogger(__name__)

_FAILED = Finish("error", message="the model failed on this request", status=500)
_DEAD_END = Finish(
    "error", message="No token may come next: grammar, bans and minimum length exclude all of them.", status=400
)
# What a forward or the sampler can raise for data's sake: torch's errors are RuntimeErrors, out of memory among them.
_STEP_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)


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
        self._load = partial(
            load_model,
            dtype=resolve_dtype(settings, device),
            device=device,
            context_length=card.context_length,
            weight_dtype=settings.weight_dtype,
        )
        self._blueprint = blueprint(folder)
        loaded = self._load(folder)
        dtype = str(loaded.dtype).removeprefix("torch.")
        self.card = dataclasses.replace(card, vocab_size=loaded.vocab_size, dtype=dtype)
        self._scheduler, self._runner = _build(settings, self.card, loaded)
        self._adapters = self._runner.adapters
        self._read_adapter = partial(
            read_adapter,
            linears=linears(loaded.model),
            max_rank=settings.max_lora_rank,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._grammars = Grammars(tokenizer, self.card.vocab_size, self.card.eos_token_ids)
        self._preparing = Preparing(self._grammars)
        self._sampler = Sampler(loaded.device)
        self._shared = settings.prefix_cache == "shared"
        self._arrivals = 0
        self._meter = Meter("schedule", "forward", "sample")
        self._steps = self._prefill_tokens = self._decode_tokens = 0  # since the start
        self._profiler = Profiler(settings.profile_dir, self.card.name)
        self._ended: list[StepOutput] = []  # sequences that had nothing left to do when they were added

    def add(self, job: GenerateJob, produced: Ids[int] = ()) -> None:
        if job.rid in self._scheduler or job.rid in self._preparing:
            raise EngineError(f"request {job.rid} is running already")
        self._check(job, produced)
        sequence = self._sequence(job, produced)
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
        slices = self._meter.timed("schedule", self._scheduler.schedule)
        self._count(slices)
        for group in grouped(slices, self.card.vocab_size):
            ended += self._advance(group)
        self._profiler.step()
        return ended

    def has_work(self) -> bool:
        return bool(self._ended) or len(self._scheduler) + len(self._preparing) > 0

    def free_slots(self) -> int:
        return max(self._scheduler.free_slots() - len(self._preparing), 0)

    def running(self) -> list[str]:
        return self._scheduler.rids() + self._preparing.rids() + [output.rid for output in self._ended]

    def read_weights(self, folder: str) -> Callable[[str], None]:
        loaded = read_beside(Path(folder), self._blueprint, self._load)

        def use(version: str) -> None:
            self._runner = self._runner.with_model(loaded.model, loaded.attention)
            self.card = dataclasses.replace(self.card, weight_version=version)

        return use

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        self._adapters.check_room(name)
        adapter = self._read_adapter(Path(folder))

        def use() -> str:
            self._adapters.add(name, adapter)
            return adapter.id

        return use

    def drop_lora(self, name: str) -> None:
        self._adapters.drop(name)

    def loras(self) -> dict[str, str]:
        return self._adapters.ids()

    def retract(self) -> None:
        self._scheduler.retract()

    def flush_cache(self) -> int:
        return self._scheduler.cache.flush()

    def stats(self) -> dict[str, float]:
        scheduler, cache = self._scheduler, self._scheduler.cache
        return {
            "steps": self._steps,
            "prefill_tokens": self._prefill_tokens,
            "decode_tokens": self._decode_tokens,
            "sequences_running": len(scheduler.running),
            "sequences_waiting": len(scheduler) - len(scheduler.running) + len(self._preparing),
            "kv_blocks": scheduler.blocks.usable,
            "kv_blocks_used": scheduler.blocks.usable - scheduler.blocks.num_free,
            "prefix_queried_tokens": cache.queried_tokens,
            "prefix_hit_tokens": cache.hit_tokens,
            "preemptions": scheduler.preemptions,
            "draft_tokens": scheduler.drafted,
            "accepted_tokens": scheduler.accepted,
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
        self._grammars.close()
        self._runner.close()

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

    def _count(self, slices: list[Slice]) -> None:
        sampled = sum(piece.num_sampled for piece in slices)
        self._steps += bool(slices)
        self._decode_tokens += sampled
        self._prefill_tokens += sum(piece.length for piece in slices) - sampled

    def _advance(self, slices: list[Slice]) -> list[StepOutput]:
        """Compute slices. Where that fails they are tried again in halves, so that only the guilty ones pay.

        Raises EngineError where the device is lost: the process must end, and its sequences go on elsewhere.
        """
        if not slices:
            return []
        try:
            sampled, samples = self._compute(slices)
        except _STEP_ERRORS:
            self._runner.check_device()
            if len(slices) == 1:
                log.exception("request %s failed", slices[0].sequence.rid)
                return [self._fail(slices[0].sequence)]
            log.warning("a step of %d sequences failed; trying halves", len(slices), exc_info=True)
            middle = len(slices) // 2
            return self._advance(slices[:middle]) + self._advance(slices[middle:])
        counts = [(piece, piece.num_sampled) for piece in sampled]  # before tokens are taken
        chunks = [StepOutput(piece.sequence.rid) for piece in slices if not piece.num_sampled]
        for piece in slices:
            self._scheduler.commit(piece)
        drawn = iter(samples)
        return chunks + [self._accept(piece, list(islice(drawn, count))) for piece, count in counts]

    def _compute(self, slices: list[Slice]) -> tuple[list[Slice], list[Sample]]:
        dirty = self._scheduler.blocks.take_dirty()
        if dirty:
            self._runner.zero(dirty)
        for piece in slices:
            piece.sequence.verified = False
        filling = self._grammars.fill([row for piece in slices for row in piece.rows])
        try:
            computed = self._meter.timed("forward", self._runner.run, slices)
        finally:
            masks = filling.result() if filling is not None else None
        for piece, logits in computed.scored:
            score(piece, logits)
        if not computed.sampled:
            return [], []
        rows = [row for piece in computed.sampled for row in piece.rows]
        if computed.drawn is not None and masks is None and all(map(is_plain, rows)):
            return computed.sampled, samples(computed.drawn)
        return computed.sampled, self._meter.timed("sample", self._sampler.sample, computed.logits, rows, masks)

    def _accept(self, piece: Slice, drawn: list[Sample]) -> StepOutput:
        """Take what was sampled from a slice, up to the first token that was not guessed; end the sequence where it
        must end."""
        sequence = piece.sequence
        if drawn[0].token_id is None:
            return self._give_up(sequence, drawn[0])
        finish = sequence.finish()  # where no token was asked for, but what the prompt scores
        taken: list[Sample] = []
        for guess, sampled in zip((*piece.draft, None), drawn, strict=True):
            if finish is not None or sampled.token_id is None:
                break
            finish = sequence.append(sampled.token_id)
            taken.append(sampled)
            if sampled.token_id != guess:
                break
        if all(sampled.token_id is not None or sampled.excluded for sampled in drawn):
            self._scheduler.verify(piece, max(len(taken) - 1, 0))
        else:  # NaN in a guess's K/V, which would spread from behind the sequence's end
            self._scheduler.start_again(sequence)
        if finish is not None:
            self._scheduler.remove(sequence.rid)
        return self._output(sequence, taken, finish)

    @staticmethod
    def _output(sequence: Sequence, taken: list[Sample], finish: Finish | None) -> StepOutput:
        logprobs = tuple(sampled.logprob for sampled in taken if sampled.logprob is not None)
        cached = None if sequence.announced else sequence.cached_tokens
        sequence.announced = True
        token_ids = tuple(sequence.token_ids[len(sequence.token_ids) - len(taken) :])
        return StepOutput(sequence.rid, token_ids, logprobs or None, finish, cached, sequence.take_scored())

    def _give_up(self, sequence: Sequence, drawn: Sample) -> StepOutput:
        """End a sequence for which there is no next token."""
        if not drawn.excluded:
            log.error("request %s: the logits are not finite", sequence.rid)
            return self._fail(sequence)
        complete = sequence.matcher is not None and sequence.matcher.complete
        return self._fail(sequence, Finish("stop") if complete else _DEAD_END)

    def _fail(self, sequence: Sequence, finish: Finish = _FAILED) -> StepOutput:
        self._scheduler.remove(sequence.rid)
        return StepOutput(sequence.rid, finish=finish)

    def _check(self, job: GenerateJob, produced: Ids[int]) -> None:
        """Raises InvalidRequest where the job can never run here."""
        if job.task != "generate":
            raise InvalidRequest(f"'{self.card.name}' generates text, it does not {job.task} any", param="model")
        if not job.input_ids:
            raise InvalidRequest("the prompt is empty", param="input_ids")
        self._check_ids((*job.input_ids, *produced), "input_ids")
        self._check_ids([token for token, _ in job.sampling.logit_bias], "logit_bias")
        self._check_ids([token for word in job.sampling.bad_words for token in word], "bad_words")
        self._check_ids(job.token_ids_logprob, "token_ids_logprob")
        if len(job.input_ids) + (job.sampling.max_new_tokens != 0) > self.card.context_length:
            raise ContextLengthExceeded(
                f"the prompt has {len(job.input_ids)} tokens and leaves no room for output in the context of "
                f"{self.card.context_length}",
                param="input_ids",
            )

    def _check_ids(self, ids: Ids[int], param: str) -> None:
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.card.vocab_size:
            wrong = low if low < 0 else high
            message = f"token id {wrong} is not in the vocabulary of {self.card.vocab_size}"
            raise InvalidRequest(message, param=param)

    def _sequence(self, job: GenerateJob, produced: Ids[int]) -> Sequence:
        params = job.sampling
        room = self.card.context_length
        if params.max_new_tokens is not None:
            room = min(room, len(job.input_ids) + params.max_new_tokens)
        self._arrivals += 1
        adapter = self._adapters.get(job.model)
        scores = job.scores_prompt and not produced  # else they went out with the first of these
        return Sequence(
            job=job,
            token_ids=[*job.input_ids, *produced],
            num_prompt_tokens=len(job.input_ids),
            max_tokens=room,
            stop_ids=stop_ids(params, self.card.eos_token_ids, self.card.vocab_size),
            seed=params.sampling_seed if params.sampling_seed is not None else _seed_of(job.rid),
            arrival=self._arrivals,
            announced=bool(produced),
            reads_cache=not scores,
            max_chunk=most_scored(self.card.vocab_size) if scores else sys.maxsize,
            scored=[TokenLogprob(None)] * (job.logprob_start_len == 0) if scores else None,
            adapter=adapter,
            cache_seed=cache_seed(
                adapter.id if adapter is not None else job.model,
                "" if self._shared else job.tenant,
                self.card.weight_version,
            ),
        )


def _seed_of(rid: str) -> int:
    """A seed for a job that came without one; the same on every worker, so that another one can go on."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "big")


_PROMISES = (
    "may depend on what runs beside it; --deterministic prevents that",
    "do not depend on what runs beside it",
    "do not depend on what runs beside it: each sequence is computed alone, which is slow",
)


def _build(settings: WorkerSettings, card: ModelCard, loaded: LoadedModel) -> tuple[Scheduler, ModelRunner]:
    """The pool that memory allows, who shares it out, and the model over it."""
    on_cpu = loaded.device.type == "cpu"
    max_running = settings.max_running or (32 if on_cpu else 256)
    max_batch_tokens = settings.max_batch_tokens or max(max_running, 256 if on_cpu else 8192)
    blocks = num_blocks(
        settings,
        loaded.layers,
        dtype=loaded.dtype,
        device=loaded.device,
        context_length=card.context_length,
        max_running=max_running,
    )
    size = settings.block_size
    log.info("%s: %d K/V blocks of %d tokens on %s", card.name, blocks - 1, size, loaded.device)
    backend = make_backend(
        settings.attention_backend,
        loaded.layers,
        num_blocks=blocks,
        block_size=settings.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
        context_length=card.context_length,
        invariant=settings.deterministic,
    )
    free = loaded.invariant and isinstance(backend, CpuAttention)
    alone = settings.deterministic and not free
    log.info("%s: an answer's bytes %s", card.name, _PROMISES[free + 2 * alone])
    scheduler = Scheduler(
        BlockAllocator(blocks, size),
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        fixed_chunks=alone,
        prefix_cache=settings.prefix_cache != "off",
        speculate=settings.speculate,
    )
    adapters = Adapters(loaded.model, limit=settings.max_loras, device=loaded.device)
    capture = capture_for(loaded.device)
    record = None
    if capture is not None and isinstance(backend, TritonAttention) and settings.cuda_graphs and not alone:
        record = partial(
            DecodeGraphs,
            max_rows=max_running,
            context_length=card.context_length,
            block_size=size,
            vocab_size=loaded.vocab_size,
            device=loaded.device,
            capture=capture,
        )
    runner = ModelRunner(loaded.model, loaded.attention, backend, adapters, alone=alone, record=record)
    return scheduler, runner
