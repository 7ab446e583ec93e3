"""Jobs come in: what can never run here is refused, the others become sequences."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence as Ids

from ...shared.chunks import TokenLogprob
from ...shared.errors import ContextLengthExceeded, InvalidRequest
from ...shared.messages import GenerateJob
from ...shared.model_card import ModelCard
from .device_sampler import is_plain
from .logprobs import most_scored
from .lora import Adapters
from .prefix import cache_seed
from .sequence import Sequence, stop_ids


class Intake:
    """Makes sequences of jobs, in the order in which they arrive.

    Args:
        adapters: where the one that a job names is found.
        share_cache: whether tenants find each other's K/V.
    """

    def __init__(self, adapters: Adapters, *, share_cache: bool) -> None:
        self._adapters = adapters
        self._share_cache = share_cache
        self._arrivals = 0

    def sequence(self, card: ModelCard, job: GenerateJob, produced: Ids[int]) -> Sequence:
        """The sequence of a job after `produced`, output ids that another worker published.

        Raises:
            InvalidRequest: the job can never run on the model that `card` describes.
        """
        _check(card, job, produced)
        params = job.sampling
        room = card.context_length
        if params.max_new_tokens is not None:
            room = min(room, len(job.input_ids) + params.max_new_tokens)
        self._arrivals += 1
        scores = job.scores_prompt and not produced  # else they went out with the first of these
        return Sequence(
            job=job,
            token_ids=[*job.input_ids, *produced],
            num_prompt_tokens=len(job.input_ids),
            max_tokens=room,
            stop_ids=stop_ids(params, card.eos_token_ids, card.vocab_size),
            seed=params.sampling_seed if params.sampling_seed is not None else _seed_of(job.rid),
            arrival=self._arrivals,
            announced=bool(produced),
            reads_cache=not scores,
            max_chunk=most_scored(card.vocab_size) if scores else sys.maxsize,
            scored=[TokenLogprob(None)] * (job.logprob_start_len == 0) if scores else None,
            adapter=self._adapters.get(job.model),
            plain=is_plain(job),
            cache_seed=self._cache_seed(card, job),
        )

    def _cache_seed(self, card: ModelCard, job: GenerateJob) -> bytes:
        adapter = self._adapters.get(job.model)
        model = adapter.id if adapter is not None else job.model
        return cache_seed(model, "" if self._share_cache else job.tenant, card.weight_version)


def _check(card: ModelCard, job: GenerateJob, produced: Ids[int]) -> None:
    if job.task != "generate":
        raise InvalidRequest(f"'{card.name}' generates text, it does not {job.task} any", param="model")
    if not job.input_ids:
        raise InvalidRequest("the prompt is empty", param="input_ids")
    _check_ids(card, (*job.input_ids, *produced), "input_ids")
    _check_ids(card, [token for token, _ in job.sampling.logit_bias], "logit_bias")
    _check_ids(card, [token for word in job.sampling.bad_words for token in word], "bad_words")
    _check_ids(card, job.token_ids_logprob, "token_ids_logprob")
    if len(job.input_ids) + (job.sampling.max_new_tokens != 0) > card.context_length:
        raise ContextLengthExceeded(
            f"the prompt has {len(job.input_ids)} tokens and leaves no room for output in the context of "
            f"{card.context_length}",
            param="input_ids",
        )


def _check_ids(card: ModelCard, ids: Ids[int], param: str) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= card.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"token id {wrong} is not in the vocabulary of {card.vocab_size}", param=param)


def _seed_of(rid: str) -> int:
    """A seed for a job that came without one; the same on every worker, so that another one can go on."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "big")
