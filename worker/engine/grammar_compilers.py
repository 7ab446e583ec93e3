"""xgrammar's compilers over one model's vocabulary, as the kinds of grammars need it."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence as Ids
from functools import cached_property
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer

from ...shared.errors import InvalidRequest
from ...shared.messages import GrammarKind

if TYPE_CHECKING:
    import xgrammar

    from .grammar import Grammar

MAX_WHITESPACE = 12  # between two tokens of JSON: a model that writes nothing else would never end

# "[12:34:56] /project/cpp/regex_converter.cc:94: what is wrong"
_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: \(.*?\) is (true|false): )?")
_CONTROLS = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_NO_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")  # bytes that no text has; xgrammar takes them for characters
_SAMPLE_TEXT = '{"a b": [1.5, "é 聪"],\n  "c": null}'


class Compilers:
    """Compiles on any thread.

    Args:
        tokenizer: bytes of tokenizer.json.
        vocab_size: of the model; what the tokenizer does not have is never allowed.
        padded: tokens that a mask has bits for.
        eos_token_ids: what ends an output that is complete.
    """

    def __init__(self, tokenizer: bytes, vocab_size: int, padded: int, eos_token_ids: Ids[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._padded = padded
        self._eos_token_ids = list(eos_token_ids)
        self._building = threading.Lock()

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises InvalidRequest where the grammar is no good."""
        try:
            return self._compile(grammar)
        except (RuntimeError, ValueError, TypeError) as e:  # all that xgrammar raises
            reason = _SOURCE_PLACE.sub("", str(e)).strip()[:300]
            raise InvalidRequest(f"'{grammar.kind}' is not usable: {reason}", param=grammar.kind) from e

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        with self._building:
            compiler = self._compiler_of(grammar.kind)
        if isinstance(grammar.source, tuple):
            return compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, grammar.source))}")
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(grammar.source, max_whitespace_cnt=MAX_WHITESPACE)
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.source)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.source)
        return compiler.compile_structural_tag(grammar.source)

    def _compiler_of(self, kind: GrammarKind) -> xgrammar.GrammarCompiler:
        if kind == "structural_tag":
            return self._of_all
        return self._of_json if kind == "json_schema" else self._of_text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = Tokenizer.from_str(self._tokenizer.decode()).get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special and i < self._vocab_size)

    @cached_property
    def _decoded(self) -> list[bytes]:
        """Bytes of every token id of the model, as the tokenizer writes them within a text.

        Raises:
            InvalidRequest: a token's text depends on its neighbours, so that no grammar can be matched.
        """
        import xgrammar

        tokenizer = Tokenizer.from_str(self._tokenizer.decode())
        fast: Any = transformers.PreTrainedTokenizerFast
        wrapped = fast(tokenizer_object=tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=self._vocab_size, stop_token_ids=[0])
        decoded = [b"" if _NO_UTF8.search(token) else token for token in map(bytes, info.decoded_vocab)]
        ids = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False).ids
        if b"".join(decoded[i] for i in ids).lstrip(b" ") != _SAMPLE_TEXT.encode():
            raise InvalidRequest("This model's tokenizer does not allow constrained generation.", param="model")
        return decoded

    @cached_property
    def _of_text(self) -> xgrammar.GrammarCompiler:
        """Special tokens are no text: their bytes would be matched, and then skipped when decoded."""
        return self._compiler([b"" if i in self.special_ids else token for i, token in enumerate(self._decoded)])

    @cached_property
    def _of_json(self) -> xgrammar.GrammarCompiler:
        """No control characters but newlines: where a string's length is bounded xgrammar lets them in unescaped."""
        special = self.special_ids
        plain = [b"" if i in special or _CONTROLS.search(token) else token for i, token in enumerate(self._decoded)]
        return self._compiler(plain)

    @cached_property
    def _of_all(self) -> xgrammar.GrammarCompiler:
        """Structural tags may begin and end with special tokens, and leave free text between."""
        return self._compiler(self._decoded)

    def _compiler(self, vocabulary: list[bytes]) -> xgrammar.GrammarCompiler:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            vocabulary + [b""] * (self._padded - self._vocab_size),
            xgrammar.VocabType.RAW,
            vocab_size=self._padded,
            stop_token_ids=self._eos_token_ids or [0],
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _quoted(text: str) -> str:
    """A string literal of the grammar language."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'
