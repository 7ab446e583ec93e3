"""What the choices of a request came to, and the pieces that every kind of answer shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from ...shared.chunks import Finish, TextChunk, TextLogprob, Usage
from ...shared.errors import RequestError
from ...shared.model_card import DEFAULT_VERSION
from ..plan import Plan
from ..protocol.common import UsageBody, usage_body


class GenerationFailed(RequestError):
    """A choice ended by error, by its deadline, or was cancelled from outside; the status came with it."""

    def __init__(self, finish: Finish) -> None:
        cancelled = finish.type == "abort"
        super().__init__(
            finish.message or ("The request was cancelled." if cancelled else "The generation failed."),
            param=finish.param,
            code="request_cancelled" if cancelled else "generation_failed",
        )
        self.status = 499 if cancelled else finish.status
        self.type = "invalid_request_error" if 400 <= self.status < 500 else "server_error"


class TextOffsets:
    """Where tokens stand in one choice's text, in characters; `start` is the length of what stands before it."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._pending = b""  # bytes of a character that later tokens complete

    def of(self, chunk: TextChunk) -> list[int]:
        """The offset of each token of the next chunk."""
        offset, offsets = self._at, []
        for entry in chunk.logprobs or ():
            offsets.append(offset)
            characters, self._pending = _characters(self._pending + bytes(entry.bytes))
            offset += characters
        self._at += len(chunk.text)
        return offsets


def prompt_offsets(prompt: str, logprobs: Sequence[TextLogprob]) -> list[int]:
    """Where the tokens of a prompt stand in its text, in characters. A token that is not in it (a BOS, a space that the
    tokenizer put before it) stands where the next one does."""
    data, at, offset, pending, offsets = prompt.encode(), 0, 0, b"", []
    for entry in logprobs:
        offsets.append(offset)
        token = bytes(entry.bytes)
        if at == 0 and not data.startswith(token):
            token = token.removeprefix(b" ")
        if data.startswith(token, at):
            characters, pending = _characters(pending + token)
            offset += characters
            at += len(token)
    return offsets


def _characters(data: bytes) -> tuple[int, bytes]:
    """How many whole characters `data` holds, and the bytes of one that it only begins."""
    for held in range(min(3, len(data)) + 1):
        try:
            return len(data[: len(data) - held].decode()), data[len(data) - held :]
        except UnicodeDecodeError:
            continue
    return len(data.decode(errors="replace")), b""


@dataclass(slots=True)
class Choice:
    """One choice as far as it is known."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TextLogprob, ...] = ()
    weight_version: str = DEFAULT_VERSION  # of the weights that made the newest token
    offsets: list[int] = field(default_factory=list)  # of the tokens under `logprobs`, in characters of the text
    places: TextOffsets = field(default_factory=TextOffsets)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    finish: Finish | None = None

    def add(self, chunk: TextChunk) -> None:
        """Raises GenerationFailed when the chunk ends the choice with an error."""
        refuse_failed(chunk.finish)
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids or ())
        self.logprobs.extend(chunk.logprobs or ())
        self.weight_version = chunk.weight_version or self.weight_version
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self.offsets.extend(self.places.of(chunk))
        self.usage = chunk.usage
        self.finish = chunk.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def matched(self) -> str | int | None:
        """The stop string, or the id of the stop or eos token, that ended it."""
        return self.finish.matched if self.finish is not None else None

    @property
    def reason(self) -> str:
        assert self.finish is not None
        return self.finish.type


def refuse_failed(finish: Finish | None) -> None:
    """Raises GenerationFailed when a choice ended by error or from outside."""
    if finish is not None and finish.type in ("abort", "error"):
        raise GenerationFailed(finish)


async def collect(plan: Plan, chunks: AsyncIterator[tuple[int, TextChunk]]) -> list[Choice]:
    """All choices of a request, once every one has ended.

    Raises:
        GenerationFailed: one of them ended by error or from outside.
    """
    choices = [Choice() for _ in plan.rids]
    async for index, chunk in chunks:
        choices[index].add(chunk)
    return choices


def best_of(plan: Plan, choices: Sequence[Choice]) -> list[Choice]:
    """Of each prompt's choices the `plan.best` of the highest mean log-probability, best first."""
    groups = [choices[at : at + plan.n] for at in range(0, len(choices), plan.n)]
    return [choice for group in groups for choice in sorted(group, key=_mean_logprob, reverse=True)[: plan.best]]


def _mean_logprob(choice: Choice) -> float:
    values = [entry.logprob for entry in choice.logprobs if entry.logprob is not None]
    return sum(values) / len(values) if values else 0.0


def usage_of(plan: Plan, usages: Sequence[Usage]) -> UsageBody:
    """The usage of all choices together."""
    return usage_body([list(usages[at : at + plan.n]) for at in range(0, len(usages), plan.n)])
