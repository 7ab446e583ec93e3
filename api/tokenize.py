"""Text to token ids, with the tokenizers that model cards name by hash.

Text that a client wrote never becomes a special token: where a message holds something like `<|im_end|>`, `guard`
puts GUARD into it before the template is rendered, and `encode_chat` tokenizes that piece as ordinary text.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from tokenizers import Tokenizer

from ..shared.errors import ContextLengthExceeded, EngineError
from ..shared.model_card import ModelCard

GUARD = "\uffff"  # a noncharacter: valid in UTF-8, never in a special token
INLINE_CHARS = 2000  # shorter text is tokenized on the event loop: a thread's hand-over costs more than the work


class BlobSource(Protocol):
    """Where tokenizers come from: the model registry."""

    async def blob(self, sha256: str) -> bytes: ...


class PromptTokenizer:
    """One tokenizer for prompts. `encode` and its kin may be called from any thread."""

    def __init__(self, blob: bytes) -> None:
        self._tokenizer = _load(blob)
        self._plain = _load(blob)
        self._plain.encode_special_tokens = True
        special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special and t.content]
        special.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool, bos_token: str = "") -> list[int]:
        """Ids of a prompt. One BOS, also when `text` begins with it and the tokenizer adds its own."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.id_of(bos_token) if bos_token else None
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Ids of a rendered chat, whose template has written its special tokens itself."""
        if GUARD not in text or self._special is None:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for match in self._special.finditer(text):
            ids += self._encode_plain(text[at : match.start()]) + self.encode(match.group(), add_special_tokens=False)
            at = match.end()
        return ids + self._encode_plain(text[at:])

    def _encode_plain(self, text: str) -> list[int]:
        text = text.replace(GUARD, "")
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def guard(self, value: Any) -> Any:
        """`value` (strings, lists, dicts) with GUARD inside whatever reads as a special token."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(_break, value) if self._special.search(value) else value
        if isinstance(value, list):
            return [self.guard(item) for item in value]
        if isinstance(value, dict):
            return {self.guard(key): self.guard(item) for key, item in value.items()}
        return value

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def check_size(self, characters: int, card: ModelCard, param: str) -> None:
        """Refuse, before the work, a text so long that no tokenizer of this vocabulary could fit it into the context.

        Raises:
            ContextLengthExceeded: see above.
        """
        least = -(-characters // self._longest)
        if least > card.context_length:
            raise ContextLengthExceeded(
                f"This model's context is {card.context_length} tokens; the prompt of {characters} characters has at "
                f"least {least}.",
                param=param,
            )


def _break(match: re.Match[str]) -> str:
    return match.group()[0] + GUARD + match.group()[1:]


def _load(blob: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(blob)
    except ValueError as e:
        raise EngineError(f"a registered tokenizer cannot be read: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Tokenizers:
    """Tokenizers by hash, the `size` last used, and the threads that long prompts are tokenized on."""

    def __init__(self, source: BlobSource, threads: int, size: int) -> None:
        self._source = source
        self._size = size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._loaded: OrderedDict[str, asyncio.Task[PromptTokenizer]] = OrderedDict()

    async def get(self, sha256: str) -> PromptTokenizer:
        """The tokenizer of that hash; callers that ask at once wait for one load."""
        task = self._loaded.get(sha256)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loaded[sha256] = asyncio.create_task(self._load(sha256))
            if len(self._loaded) > self._size:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(sha256)
        return await asyncio.shield(task)

    async def _load(self, sha256: str) -> PromptTokenizer:
        blob = await self._source.blob(sha256)
        return await asyncio.get_running_loop().run_in_executor(self._pool, PromptTokenizer, blob)

    async def encode(self, card: ModelCard, text: str, *, add_special_tokens: bool, param: str) -> tuple[int, ...]:
        """Ids of a plain prompt.

        Raises:
            ContextLengthExceeded: the text cannot fit.
        """
        tokenizer = await self.get(card.tokenizer)
        tokenizer.check_size(len(text), card, param)
        if len(text) < INLINE_CHARS:
            return tuple(tokenizer.encode(text, add_special_tokens, card.bos_token))
        return tuple(await self._run(tokenizer.encode, text, add_special_tokens, card.bos_token))

    async def encode_chat(self, card: ModelCard, text: str) -> tuple[int, ...]:
        """Ids of a rendered chat.

        Raises:
            ContextLengthExceeded: the text cannot fit.
        """
        tokenizer = await self.get(card.tokenizer)
        tokenizer.check_size(len(text), card, "messages")
        if len(text) < INLINE_CHARS:
            return tuple(tokenizer.encode_chat(text))
        return tuple(await self._run(tokenizer.encode_chat, text))

    async def _run(self, call: Any, *args: Any) -> list[int]:
        ids: list[int] = await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)
        return ids

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
