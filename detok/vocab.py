"""What a detokenizer knows of a tokenizer: the bytes of each id where the decoder is free of context.

A decoder is *byte level* (GPT-2, Llama 3, Qwen, tekken: each character of a token stands for one byte), *byte fallback*
(Llama 2, Gemma: text with ▁ for spaces, and <0xHH> for single bytes), or *other* (WordPiece, Metaspace, …: what a token
says depends on its neighbours). The first two give a table id → bytes; for the last only the tokenizer itself decodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tokenizers import Tokenizer

from ..shared.errors import ProtocolError

Kind = Literal["byte_level", "byte_fallback", "other"]


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Index: token id. `data[i]` are the id's bytes, `text[i]` the same as text, None where they are no whole UTF-8."""

    data: list[bytes]
    text: list[str | None]

    @classmethod
    def of(cls, data: list[bytes]) -> ByteTable:
        return cls(data, [_utf8(b) for b in data])

    def without(self, ids: Iterable[int]) -> ByteTable:
        """The same table, with these ids empty."""
        data, text = self.data.copy(), self.text.copy()
        for i in ids:
            data[i], text[i] = b"", ""
        return ByteTable(data, text)


class Vocabulary:
    """One tokenizer, ready to decode; shared by all requests that use it.

    Args:
        by_window: let the tokenizer itself decode, also where a table could. With a table the tokenizer is let go: one
            of 262,000 tokens takes 280 MB, its table 40.

    Attributes:
        kind: which family the decoder belongs to.
        size: one past the highest id. Ids outside `0 … size`, and holes, are empty text.
        special_ids: ids that `skip_special_tokens` leaves out.
        strips_space: byte fallback only: the decoder drops one space at the very start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, by_window: bool = False) -> None:
        added = tokenizer.get_added_tokens_decoder()
        specials = {token.content for token in added.values() if token.special}
        tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        tokens |= {i: token.content for i, token in added.items()}
        self.size = max(tokens, default=-1) + 1
        self.special_ids = frozenset(i for i, token in tokens.items() if token in specials)
        self.kind, self.strips_space, space = OTHER if by_window else _classify(tokenizer)
        self._tokenizer = tokenizer if self.kind == "other" else None
        self._holes = frozenset(range(self.size)).difference(tokens)
        self._tables: dict[bool, ByteTable] = {}
        self._pieces: dict[int, tuple[str, tuple[int, ...]]] = {}
        if self.kind != "other":
            to_bytes = _byte_level if self.kind == "byte_level" else lambda token: _byte_fallback(token, space)
            self._tables[False] = ByteTable.of([to_bytes(tokens.get(i, "")) for i in range(self.size)])

    @classmethod
    def from_blob(cls, blob: bytes) -> Vocabulary:
        """Read a `tokenizer.json`. Raises ProtocolError when it is not one."""
        try:
            return cls(Tokenizer.from_buffer(blob))
        except ValueError as e:
            raise ProtocolError(f"tokenizer of {len(blob)} bytes cannot be read: {e}") from e

    def table(self, skip_special_tokens: bool) -> ByteTable:
        """The bytes of every id; special ones are empty where they are skipped. Not for `kind == "other"`."""
        if skip_special_tokens and True not in self._tables:
            self._tables[True] = self._tables[False].without(self.special_ids)
        return self._tables[skip_special_tokens]

    def visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the decoder sees this id at all."""
        return self._known(token_id) and not (skip_special_tokens and token_id in self.special_ids)

    def piece(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """One token on its own, as logprobs show it: its text inside a text, and its bytes. Special ones are shown."""
        piece = self._pieces.get(token_id)
        if piece is None:
            if not self._known(token_id):
                return "", ()
            text, data = self._piece(token_id)
            piece = self._pieces[token_id] = text, tuple(data)
        return piece

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The tokenizer's own decode, for `kind == "other"`.

        Without `spaces_between_special_tokens` a decoder that puts spaces between tokens (WordPiece) puts none around
        special ones; the others never do.
        """
        assert self._tokenizer is not None, f"a {self.kind} vocabulary decodes by its table"
        known = [i for i in ids if self._known(i)]
        if spaces_between_special_tokens:
            return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        shown = [i for i in known if not (skip_special_tokens and i in self.special_ids)]
        return "".join([self._tokenizer.decode(run, skip_special_tokens=False) for run in self._runs(shown)])

    def _known(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and token_id not in self._holes

    def _runs(self, ids: Iterable[int]) -> Iterator[list[int]]:
        """Each special token alone, and what stands between them."""
        for special, run in groupby(ids, self.special_ids.__contains__):
            if special:
                yield from ([i] for i in run)
            else:
                yield list(run)

    def _piece(self, token_id: int) -> tuple[str, bytes]:
        if self.kind != "other":
            data = self._tables[False].data[token_id]
            return data.decode("utf-8", "replace"), data
        # After itself a token has what it lacks alone: the space before a word, or ## left out.
        once, twice = (self.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
        return text, text.encode()


# Family, whether a leading space is stripped, and the replacement that turns ▁ into a space.
_Class = tuple[Kind, bool, tuple[str, str]]
OTHER: _Class = ("other", False, ("", ""))


def _classify(tokenizer: Tokenizer) -> _Class:
    if tokenizer.decoder is None:
        return OTHER
    match _steps(json.loads(tokenizer.decoder.__getstate__())):
        case [{"type": "ByteLevel"}]:
            return "byte_level", False, ("", "")
        case [
            {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(space)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if mark:
            match rest:
                case []:
                    return "byte_fallback", False, (mark, space)
                case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return "byte_fallback", True, (mark, space)
    return OTHER


def _steps(decoder: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level_alphabet() -> dict[int, int]:
    """Code point → byte, as GPT-2 writes bytes: printable Latin-1 stands for itself, the rest from U+0100 on.

    Latin-1 characters outside the alphabet go to U+FFFF, so that encoding the translated token to Latin-1 fails.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: b for b in printable} | {0x100 + n: b for n, b in enumerate(others)}
    return dict.fromkeys(others, 0xFFFF) | alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # an added token with a character outside the alphabet stands for its own text
        return token.encode()


def _byte_fallback(token: str, space: tuple[str, str]) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(*space).encode()


def _utf8(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
