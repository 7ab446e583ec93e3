"""Small tokenizers of every family, built with the `tokenizers` library, each covering all 256 bytes it can cover."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Whole tokens beside the single bytes: those of the cases, and (HALVES) some that begin or end inside a character.
PIECES = (
    *("A", " ", "世", "!", " ok", "o", "k", " x", "x", "Hello", " world", "\n", "b", "a", "ab", "abab", "I", " am"),
    *("DEF", "G", "HI", "J", "\nObs", "erv", "ation", ":", "assist.", "<|", "im_end|>", " fine", "STOP", "é", "聪明"),
)
HALVES = (b" \xe4\xb8", b"\x96!", b"\x9f\x98\x8a", b"\xf0\x9f", b"\xff\xff")


@dataclass(frozen=True, slots=True)
class TestTokenizer:
    """A tokenizer and how to name its tokens."""

    __test__ = False  # not a test class, whatever its name says
    tokenizer: Tokenizer
    bytes_: dict[int, int]  # byte → id
    pieces: dict[str, int]

    @property
    def blob(self) -> bytes:
        return self.tokenizer.to_str().encode()

    def ids(self, *parts: str | int) -> list[int]:
        """Ids of whole tokens by text, and of single bytes by number."""
        return [self.bytes_[part] if isinstance(part, int) else self.pieces[part] for part in parts]

    def spelled(self, text: str) -> list[int]:
        """Every byte of `text` as a token of its own."""
        return [self.bytes_[b] for b in text.encode()]


def byte_level() -> TestTokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    alphabet = _byte_level_alphabet()
    names = ["".join(alphabet[b] for b in piece) for piece in (*(p.encode() for p in PIECES), *HALVES)]
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*alphabet, *names]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("≤≥")])  # not special; characters outside the alphabet
    pieces = {piece: vocab["".join(alphabet[b] for b in piece.encode())] for piece in PIECES}
    pieces |= {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    return TestTokenizer(tokenizer, {b: vocab[alphabet[b]] for b in range(256)}, pieces)


def byte_fallback(*, strip: bool = True) -> TestTokenizer:
    """SentencePiece BPE with byte fallback: Llama 2's decoder, and Gemma's when `strip` is false."""
    words = [piece.replace(" ", "▁") for piece in (*PIECES, " I", " love", " you", "ing", "▁", "</tool>")]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for word in words:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return TestTokenizer(tokenizer, {b: b + 3 for b in range(256)}, vocab)


def word_piece() -> TestTokenizer:
    """WordPiece, whose decoder puts spaces between tokens but before ## and some punctuation."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "hello",
        "world",
        "##ing",
        "##s",
        ".",
        ",",
        "?",
        "'",
        "do",
        "n",
        "ab",
        "世",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in words[:4]])
    return TestTokenizer(tokenizer, {}, vocab)


def metaspace() -> TestTokenizer:
    """Unigram with a Metaspace decoder (T5, XLM-R): the first token of a text loses its ▁."""
    words = ["<unk>", "</s>", "▁", "▁hello", "▁wor", "ld", "▁a", "▁b", "ing", ".", "世", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in words[:2]])
    return TestTokenizer(tokenizer, {}, {word: i for i, word in enumerate(words)})


def _byte_level_alphabet() -> list[str]:
    """The character of each byte, read off the library: what its pre-tokenizer makes of every byte of UTF-8."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    out: dict[int, str] = {}
    for text in map(chr, (*range(0x80), *range(0x80, 0x800, 7), 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF)):
        ((name, _),) = split.pre_tokenize_str(text)
        out |= dict(zip(text.encode(), name, strict=True))
    rest = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(out.values())))
    # Bytes that no UTF-8 text has, in the order in which the alphabet goes on.
    return [out[b] if b in out else next(rest) for b in range(256)]
