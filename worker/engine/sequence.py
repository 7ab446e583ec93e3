"""One generation in progress. Pure Python: nothing here touches a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...shared.chunks import Finish, PromptLogprobs, TokenLogprob
from ...shared.messages import GenerateJob, Lane, SamplingParams

if TYPE_CHECKING:
    import torch

    from .adapter import Adapter
    from .adjust import TokenCounts
    from .grammar import Matcher
    from .plan import Slice
    from .speculation import Drafter

FUTURE = -1  # stands in `token_ids` for a token that the device has drawn and nobody has read yet


@dataclass(slots=True, eq=False)
class Sequence:
    """A job on its way.

        token_ids   |<--- prompt --->|<--- output --->|
                    |<- num_computed ->|<- pending -->|       K/V of the computed ones stand in block_table

    A sequence that decodes has one pending token, its newest; one that prefills has more.
    """

    job: GenerateJob
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int  # prompt and output together: where "length" ends it
    stop_ids: frozenset[int]
    seed: int
    arrival: int  # the older goes first within a lane
    adapter: Adapter | None = None  # the one it runs with to its end, whatever is loaded under its name meanwhile
    cache_seed: bytes = b""  # see prefix.py; sequences of different seeds share no K/V
    media: tuple[tuple[int, bytes], ...] = ()  # (position, content hash) of inputs that stand for tokens
    reads_cache: bool = True  # False: the logits of every prompt token are wanted, so all are computed

    # Kept by the scheduler and the prefix cache.
    running: bool = False
    order: tuple[int, int] = (0, 0)  # the lower goes first: lane, then arrival; a lane less for each long wait
    waited: int = 0  # steps in which it could have computed and was not let
    preempted: bool = False  # lost its blocks to others once: it starts again when all it may need is free
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    writing: Slice | None = None  # the newest that writes to block_table, until its K/V are known to be finite
    taint: torch.Tensor | None = None  # 0, or NaN where K/V of its prompt are not finite; see taint.py
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    num_named: int = 0  # blocks of block_table that the prefix cache knows by block_keys
    cache_generation: int = 0
    cached_tokens: int | None = None  # prompt tokens found in the cache when it first started
    announced: bool = False  # whether an output has been sent for it
    matcher: Matcher | None = None  # where it stands in its grammar, if it has one
    token_counts: TokenCounts | None = None  # where it has penalties
    drafter: Drafter | None = None  # guesses its next tokens, where the engine speculates
    max_chunk: int = sys.maxsize  # tokens of it that one step may prefill
    plain: bool = False  # whether a draw from the logits as they are is all that its job asks for
    scored: list[TokenLogprob] | None = None  # of its prompt, as far as they are known; None where nobody asked

    @property
    def rid(self) -> str:
        return self.job.rid

    @property
    def lane(self) -> Lane:
        return self.job.lane

    @property
    def params(self) -> SamplingParams:
        return self.job.sampling

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def tokens_left(self) -> int:
        """How many more it may write."""
        return self.max_tokens - len(self.token_ids)

    @property
    def ends_in_future(self) -> bool:
        """Whether it waits for nothing but the token that the device draws now."""
        return len(self.token_ids) >= self.max_tokens and self.token_ids[-1] == FUTURE

    def unscored(self, start: int, end: int) -> range:
        """Of the places `start … end`, those whose logits are wanted: each tells of the prompt token after it."""
        if self.scored is None:
            return range(0)
        first = self.job.logprob_start_len + len(self.scored) - 1
        return range(max(start, first), min(end, self.num_prompt_tokens - 1))

    def take_scored(self) -> PromptLogprobs | None:
        """All that was asked of the prompt, once."""
        if self.scored is None:
            return None
        scored, self.scored, self.reads_cache = tuple(self.scored), None, True
        return PromptLogprobs(tuple(self.prompt_ids[self.job.logprob_start_len :]), scored)

    def append(self, token_id: int) -> Finish | None:
        """Take the next output token; says why the sequence ends with it, or None where it goes on."""
        self.token_ids.append(token_id)
        if self.matcher is None:
            return self.finish()
        if not self.matcher.accept(token_id):
            return Finish("error", message=f"token {token_id} was sampled, and the grammar does not allow it")
        ended = Finish("stop", matched=token_id) if self.matcher.terminated else None
        return self.finish() or ended

    def finish(self) -> Finish | None:
        """Why the sequence ends after its newest output token, or None where it goes on."""
        last, count = self.token_ids[-1], len(self.token_ids)
        if last in self.stop_ids and count - self.num_prompt_tokens > self.params.min_new_tokens:
            return Finish("stop", matched=last)
        return Finish("length") if count >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits: what comes after all tokens of `sequence` and after `draft`, ids that were guessed to follow."""

    sequence: Sequence
    draft: tuple[int, ...] = ()

    @property
    def job(self) -> GenerateJob:
        return self.sequence.job

    @property
    def params(self) -> SamplingParams:
        return self.sequence.job.sampling

    @property
    def token_ids(self) -> list[int]:
        return [*self.sequence.token_ids, *self.draft] if self.draft else self.sequence.token_ids

    @property
    def num_output_tokens(self) -> int:
        return self.sequence.num_output_tokens + len(self.draft)

    @property
    def output_ids(self) -> list[int]:
        return [*self.sequence.output_ids, *self.draft]

    def output_tail(self, count: int) -> list[int]:
        """The last `count` output ids, or all there are."""
        first = max(self.sequence.num_prompt_tokens, len(self.sequence.token_ids) - count)
        return [*self.sequence.token_ids[first:], *self.draft][-count:] if count else []


def stop_ids(params: SamplingParams, eos_token_ids: Ids[int], vocab_size: int) -> frozenset[int]:
    """The ids that end a sequence: the model's, unless told to ignore them, and the request's own. Those outside the
    vocabulary can never come and are dropped, for the sampler uses ids as an index."""
    ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
    return frozenset(i for i in ids if 0 <= i < vocab_size)
