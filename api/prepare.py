"""Everything that can fail without the queue: translation, tokenizing, the context's limit, the shape of the answer."""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from ..shared.errors import ContextLengthExceeded, InvalidRequest
from ..shared.ids import family_from, new_family
from ..shared.messages import GenerateJob, GenerateReqInput
from ..shared.model_card import ModelCard
from .inputs import Caller
from .plan import Plan
from .protocol.chat import ChatCompletionRequest
from .protocol.completions import CompletionRequest
from .protocol.embeddings import EmbeddingRequest, EncodeRequest
from .protocol.native import GenerateRequest
from .tokenize import Tokenizers
from .translate import Endpoint, Translated, Translator

SEEDS = 2**52
MAX_SCORES = 1_000_000  # of one prompt: they travel in one message


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be queued: its jobs, one per prompt, and how it will be answered."""

    plan: Plan
    jobs: tuple[GenerateJob, ...]
    deadline_s: float
    ignored: tuple[str, ...] = ()  # fields of the body that nothing reads
    named: bool = False  # the same request may be in the queue already, or come again

    @property
    def asks_nothing(self) -> bool:
        """Whether no worker needs to see it: no token is wanted, and nothing of the prompt's."""
        return self.jobs[0].sampling.max_new_tokens == 0 and not self.jobs[0].scores_prompt


class Preparer:
    """Turns bodies into jobs.

    Args:
        shards: of the queue: a request's id names its own.
    """

    def __init__(self, translator: Translator, tokenizers: Tokenizers, shards: int) -> None:
        self._translator = translator
        self._tokenizers = tokenizers
        self._shards = shards

    async def prepare(self, endpoint: Endpoint, body: Any, caller: Caller, seed: str | None = None) -> Prepared:
        """A request that can be queued.

        Args:
            body: as decoded from JSON.
            seed: a name of this piece of work; the same name gives the same request, which is queued once.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotFound.
        """
        translated = await self._translator.translate(endpoint, body, caller)
        families = self._families(len(translated.prompts), seed)
        jobs = [
            await self._job(translated, prompt, family)
            for prompt, family in zip(translated.prompts, families, strict=True)
        ]
        plan = _plan(translated, families, caller)
        if isinstance(translated.request, CompletionRequest) and translated.request.echo:
            plan = replace(plan, echo=await self._echo(translated.card, translated.prompts))
        return Prepared(plan, tuple(jobs), caller.deadline_s, translated.ignored, seed is not None)

    def _families(self, count: int, seed: str | None) -> tuple[str, ...]:
        if seed is None:
            return tuple(new_family(self._shards) for _ in range(count))
        return tuple(family_from(f"{seed}/{i}", self._shards) for i in range(count))

    async def _job(self, translated: Translated, prompt: GenerateReqInput, family: str) -> GenerateJob:
        card, ids = translated.card, prompt.input_ids
        if ids is None:
            assert prompt.text is not None
            ids = await self._tokenizers.encode(
                card,
                prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                param=_prompt_param(translated.endpoint),
            )
        if not ids:
            ids = await self._empty_prompt(translated)
        _check_scores(translated, prompt, len(ids))
        limit = prompt.sampling.max_new_tokens
        if prompt.task == "generate":
            limit = _limit(translated, limit, len(ids))
        else:
            _check_length(translated, len(ids))
        seed = _seed(prompt.sampling.sampling_seed)
        words = await self._bad_words(translated)
        sampling = replace(prompt.sampling, max_new_tokens=limit, sampling_seed=seed, bad_words=words)
        return GenerateJob(
            rid=family,
            model=card.name,
            pool=card.pool,
            tokenizer=card.tokenizer,
            input_ids=ids,
            sampling=sampling,
            task=prompt.task,
            return_logprob=prompt.return_logprob,
            top_logprobs_num=prompt.top_logprobs_num,
            logprob_start_len=prompt.logprob_start_len,
            token_ids_logprob=prompt.token_ids_logprob,
            return_token_ids=prompt.return_token_ids,
            stream=prompt.stream,
            lane=prompt.lane,
            tenant=prompt.tenant,
            request_id=prompt.request_id,
        )

    async def _empty_prompt(self, translated: Translated) -> tuple[int, ...]:
        """A model needs one token to begin with: BOS, or EOS where a model has no BOS."""
        tokenizer = await self._tokenizers.get(translated.card.tokenizer)
        for token in (translated.card.bos_token, translated.card.eos_token):
            if token and (token_id := tokenizer.id_of(token)) is not None:
                return (token_id,)
        raise InvalidRequest("The prompt is empty.", param=_prompt_param(translated.endpoint))

    async def _bad_words(self, translated: Translated) -> tuple[tuple[int, ...], ...]:
        """Each bad word as tokens, as it stands at the beginning of a text and within one."""
        if not translated.bad_words:
            return ()
        tokenizer = await self._tokenizers.get(translated.card.tokenizer)
        spelled = [f"{space}{word.lstrip()}" for word in translated.bad_words for space in ("", " ")]
        ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spelled)
        return tuple(dict.fromkeys(word for word in ids if word))

    async def _echo(self, card: ModelCard, prompts: tuple[GenerateReqInput, ...]) -> tuple[str, ...]:
        tokenizer = await self._tokenizers.get(card.tokenizer)
        return tuple(
            p.text if p.text is not None else tokenizer.decode(p.input_ids or (), p.sampling.skip_special_tokens)
            for p in prompts
        )


def _check_scores(translated: Translated, prompt: GenerateReqInput, prompt_tokens: int) -> None:
    """Raises InvalidRequest where log-probabilities are asked of more than the prompt, or too many of them."""
    start = prompt.logprob_start_len
    if start > prompt_tokens:
        raise InvalidRequest(f"The prompt has {prompt_tokens} tokens; got {start}.", param="logprob_start_len")
    wanted = (prompt_tokens - start) * (1 + prompt.top_logprobs_num + len(prompt.token_ids_logprob))
    if start >= 0 and wanted > MAX_SCORES:
        param = "logprobs" if translated.endpoint == "/v1/completions" else "logprob_start_len"
        raise InvalidRequest(f"At most {MAX_SCORES} scores of a prompt are told at once; got {wanted}.", param=param)


def _limit(translated: Translated, wanted: int | None, prompt_tokens: int) -> int:
    """How many tokens may be generated: what was asked for, or what the context leaves.

    Raises:
        ContextLengthExceeded: the prompt leaves no room, or less than was asked for.
    """
    context = translated.card.context_length
    room = context - prompt_tokens
    param = _prompt_param(translated.endpoint)
    if room < 0 or (room == 0 and wanted != 0):
        raise ContextLengthExceeded(
            f"This model's context is {context} tokens; the prompt has {prompt_tokens} and leaves no room.", param=param
        )
    if wanted is None or (wanted > room and not translated.max_tokens_given):
        return room
    if wanted > room:
        raise ContextLengthExceeded(
            f"This model's context is {context} tokens; the prompt has {prompt_tokens} and {wanted} were asked for.",
            param=param,
        )
    return wanted


def _check_length(translated: Translated, tokens: int) -> None:
    """Raises ContextLengthExceeded where a text to embed or classify is longer than the model reads."""
    if tokens > translated.card.context_length:
        raise ContextLengthExceeded(
            f"This model reads {translated.card.context_length} tokens; the text has {tokens}.",
            param=_prompt_param(translated.endpoint),
        )


def _prompt_param(endpoint: Endpoint) -> str:
    named = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
    return named.get(endpoint, "text")


def _seed(given: int | None) -> int:
    """A seed from 0 to SEEDS − 1. Choices count up from it in Redis, whose numbers are exact to 2^53 only."""
    return random.randrange(SEEDS) if given is None else given % SEEDS


def _plan(translated: Translated, families: tuple[str, ...], caller: Caller) -> Plan:
    request, first = translated.request, translated.prompts[0]
    options = request.stream_options if isinstance(request, (ChatCompletionRequest, CompletionRequest)) else None
    encode = request if isinstance(request, (EmbeddingRequest, EncodeRequest)) else None
    return Plan(
        endpoint=translated.endpoint,
        families=families,
        n=first.n,
        model=translated.card.name,
        tenant=caller.tenant,
        created=int(time.time()),
        fingerprint=_fingerprint(translated.card),
        best=first.best,
        stream=first.stream,
        logprobs=_shows_logprobs(translated),
        top_logprobs=first.top_logprobs_num,
        named_logprobs=bool(first.token_ids_logprob),
        prompt_logprobs=_shows_logprobs(translated) and first.logprob_start_len >= 0,
        token_ids=first.return_token_ids,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
        cumulative=isinstance(request, GenerateRequest) and not request.incremental_streaming_output,
        dimensions=(encode.dimensions or 0) if encode is not None else 0,
        base64=encode is not None and encode.encoding_format == "base64",
        labels=translated.card.labels,
        multi_label=translated.card.multi_label,
    )


def _shows_logprobs(translated: Translated) -> bool:
    """Whether the client asked for them: the choice of the best ones needs them as well."""
    request = translated.request
    if isinstance(request, CompletionRequest):
        return request.logprobs is not None
    return request.return_logprob if isinstance(request, GenerateRequest) else translated.prompts[0].return_logprob


def _fingerprint(card: ModelCard) -> str:
    """`system_fingerprint`: changes with what a model's output depends on."""
    parts = "\0".join((card.pool, card.tokenizer, card.weight_version, card.dtype))
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:10]}"
