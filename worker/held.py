"""What a worker has in its hands of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..shared.chunks import Finish, PromptLogprobs, TokenChunk, TokenLogprob
from ..shared.model_card import DEFAULT_VERSION
from ..shared.token_stream import Append
from .interface import StepOutput


@dataclass(slots=True)
class Held:
    """A request in this worker's hands: where its next token goes, and what waits to be published."""

    epoch: int
    position: int  # tokens published, or in flight
    renewed_at: float  # monotonic seconds of the last append
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int | None = None  # waits for the first chunk
    prompt: PromptLogprobs | None = None  # likewise
    weight_version: str = ""  # of the weights that made the newest token
    told_version: str = DEFAULT_VERSION  # the one published last; "": what another worker published we do not know
    fresh: bool = True  # no token published since the claim: the first one goes at once

    def collect(self, output: StepOutput, version: str) -> None:
        """Keep what a step made, with weights of `version`, until it is published."""
        if output.token_ids:
            self.token_ids.extend(output.token_ids)
            self.weight_version = version
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt is not None:
            self.prompt = output.prompt

    def take(self, rid: str, finish: Finish | None, now: float) -> Append:
        """All that waits, to be published at `now`; the lease is renewed with it."""
        ids, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        version = self.weight_version if ids and self.weight_version != self.told_version else None
        chunk = TokenChunk(
            rid, self.position, ids, logprobs or None, finish, self.cached_tokens, self.prompt, weight_version=version
        )
        if ids:
            self.position += len(ids)
            self.token_ids, self.logprobs, self.fresh = [], [], False
            self.cached_tokens = self.prompt = None
        self.told_version = version or self.told_version
        self.renewed_at = now
        return Append(self.epoch, chunk)
