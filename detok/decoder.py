"""Incremental decoding: token ids in, text out, at a cost per token that does not grow with the text.

Both decoders write ``decode(prompt + output) - decode(prompt)``, piece by piece, for any way of cutting the output into
pieces. `ByteDecoder` looks ids up in a table of bytes; `WindowDecoder` asks the tokenizer, for the decoders whose text
depends on context. Their snapshots are small and plain, so that another process goes on exactly where one stopped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from ..shared.messages import DecodeParams
from .vocab import Vocabulary

REPLACEMENT = "\ufffd"
Snapshot = tuple[Any, ...]


class Decoder(Protocol):
    """One output's decoder. A snapshot is a few plain values of bounded size, ready for JSON."""

    def decode(self, ids: Sequence[int]) -> str:
        """Consume ids and return the text that is now certain; half a character waits for its other half."""
        ...

    def flush(self) -> str:
        """The output ends here: return what was waiting, as the tokenizer writes what is not whole."""
        ...

    def snapshot(self) -> Snapshot:
        """The state after the ids consumed so far."""
        ...

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Take the state of another decoder of the same request."""
        ...


def make_decoder(vocab: Vocabulary, params: DecodeParams) -> Decoder:
    return WindowDecoder(vocab, params) if vocab.kind == "other" else ByteDecoder(vocab, params)


def _bytewise(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("headrace.bytewise", _bytewise)


class ByteDecoder:
    """id → bytes → text through an incremental UTF-8 decoder: O(1) per token.

    What is not UTF-8 becomes U+FFFD: with byte level once per broken character, as Unicode recommends; with byte
    fallback once per byte, as SentencePiece does. `tokenizers` differs from SentencePiece in one case: a run of byte
    tokens with a broken character loses its whole ones too. Text that was sent cannot be lost, so ours keeps them.
    """

    __slots__ = ("_data", "_errors", "_owed", "_pending", "_size", "_starting", "_strip", "_text")

    def __init__(self, vocab: Vocabulary, params: DecodeParams) -> None:
        table = vocab.table(params.skip_special_tokens)
        self._data, self._text, self._size = table.data, table.text, vocab.size
        self._errors = "replace" if vocab.kind == "byte_level" else "headrace.bytewise"
        prompt = self._join(params.prompt_tail)
        self._pending = prompt[codecs.utf_8_decode(prompt, self._errors, False)[1] :]
        # The first text may begin with what decode(prompt) had already: U+FFFD for its half character.
        self._owed = self._broken().count(REPLACEMENT)
        self._strip = vocab.strips_space and not prompt and params.prompt_tokens <= len(params.prompt_tail)
        self._starting = bool(self._owed) or self._strip

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._pending and not self._starting:
            i = ids[0]
            if 0 <= i < self._size:
                text = self._text[i]
                if text is not None:
                    return text
        data = self._pending + self._join(ids)
        text, used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        return self._start(text) if self._starting else text

    def flush(self) -> str:
        text = self._broken()
        self._pending = b""
        return self._start(text) if self._starting else text

    def snapshot(self) -> Snapshot:
        return (self._pending.hex() if self._pending else "", self._owed, self._strip, self._starting)

    def restore(self, snapshot: Sequence[Any]) -> None:
        pending, self._owed, self._strip, self._starting = snapshot
        self._pending = bytes.fromhex(pending)

    def _broken(self) -> str:
        """What is pending, if nothing more comes."""
        return codecs.utf_8_decode(self._pending, self._errors, True)[0]

    def _join(self, ids: Sequence[int]) -> bytes:
        data, size = self._data, self._size
        return b"".join([data[i] for i in ids if 0 <= i < size])

    def _start(self, text: str) -> str:
        """The output's first text, less what belongs to the prompt."""
        if not text:
            return text
        self._starting = False
        if self._owed and text.startswith(REPLACEMENT * self._owed):
            return text[self._owed :]
        return text[1:] if self._strip and text.startswith(" ") else text


UNCONFIRMED_TOKENS = 8  # at most: what bounds the window
HELD_REPLACEMENTS = 3  # U+FFFD still held when it is full: they may become a character, which has four bytes at most


class WindowDecoder:
    """The two-offset window over the tokenizer's own decode.

        decode_ids   a b c │ d e            surr_offset: start of the window, whose text gives spacing and bytes context
                     ▲     ▲                read_offset: end of what is confirmed; the prompt's end at first
                     surr  read

    New text is decode(ids[surr:]) minus decode(ids[surr:read]). If it does not end in U+FFFD it is confirmed and both
    offsets advance; otherwise its printable part is sent and nothing advances, and `sent` remembers how much of the
    unconfirmed text is out. Ids before surr_offset are dropped, so surr_offset is 0 and the window has at most 16 ids.
    """

    __slots__ = ("_skip_special_tokens", "_spaces", "_vocab", "decode_ids", "read_offset", "sent")

    def __init__(self, vocab: Vocabulary, params: DecodeParams) -> None:
        self._vocab = vocab
        self._skip_special_tokens = params.skip_special_tokens
        self._spaces = params.spaces_between_special_tokens
        self.decode_ids = self._visible(params.prompt_tail)
        self.read_offset = len(self.decode_ids)
        self.sent = 0  # characters

    def decode(self, ids: Sequence[int]) -> str:
        # One at a time: a character that is whole for a moment must be confirmed before the next one is half there.
        # Ids that the decoder never sees do not enter: a window of nothing else would give no context.
        return "".join([self._step(i) for i in self._visible(ids)])

    def flush(self) -> str:
        _, new = self._window()
        out = new[self.sent :]
        self._confirm(len(self.decode_ids), 0)
        return out

    def snapshot(self) -> Snapshot:
        return (self.decode_ids[:], self.read_offset, self.sent)

    def restore(self, snapshot: Sequence[Any]) -> None:
        ids, self.read_offset, self.sent = snapshot
        self.decode_ids = list(ids)

    def _step(self, token_id: int) -> str:
        self.decode_ids.append(token_id)
        prefix, new = self._window()
        certain = len(new.rstrip(REPLACEMENT))
        full = len(self.decode_ids) - self.read_offset >= UNCONFIRMED_TOKENS
        if full:
            certain = max(certain, len(new) - HELD_REPLACEMENTS)
        out = new[self.sent : certain]
        self.sent = max(self.sent, certain)
        if new and certain == len(new):
            self._confirm(len(self.decode_ids), 0)
        elif full:
            out += self._confirm_part(prefix, new)
        return out

    def _window(self) -> tuple[str, str]:
        """Text of what is confirmed, and the text after it."""
        prefix, text = self._text(self.read_offset), self._text(len(self.decode_ids))
        while not text.startswith(prefix):  # the prompt's half character is whole now, and belongs to the output
            prefix = prefix[:-1]
        return text[: len(prefix)], text[len(prefix) :]

    def _confirm(self, end: int, sent: int) -> None:
        self.decode_ids, self.read_offset, self.sent = self.decode_ids[self.read_offset :], end - self.read_offset, sent

    def _confirm_part(self, prefix: str, new: str) -> str:
        """Advance though no character is whole, up to the last few ids, which may still become one."""
        out = prefix + new[: self.sent]
        for end in range(len(self.decode_ids) - 1, self.read_offset, -1):
            text = self._text(end)
            if out.startswith(text):
                self._confirm(end, len(out) - len(text))
                return ""
        rest = new[self.sent :]
        self._confirm(len(self.decode_ids), 0)
        return rest

    def _text(self, end: int) -> str:
        return self._vocab.decode(
            self.decode_ids[:end],
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces,
        )

    def _visible(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if self._vocab.visible(i, self._skip_special_tokens)]
