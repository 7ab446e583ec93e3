"""Properties of decoding: one text however it is cut, redelivered and handed over, equal to the whole decode."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from headrace.detok.decoder import ByteDecoder, WindowDecoder
from headrace.detok.state import DecodeState
from headrace.detok.vocab import Vocabulary
from headrace.shared.chunks import Finish, TextChunk, TokenChunk, TokenLogprob
from headrace.shared.messages import DecodeParams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.tokenizers import TestTokenizer, byte_fallback, byte_level, metaspace, word_piece
from tokenizers import Tokenizer

LENGTH = Finish("length")
quick = settings(deadline=None, max_examples=100)
PATTERNS = (r"[a-e]{2}", r"\s\S*\s", r"(a|e).", r"\d")
OUTSIDE = (-1, 2**32, 10**6)
MODEL = os.environ.get("HEADRACE_TEST_MODEL", "")


@dataclass(frozen=True, slots=True)
class Family:
    tokenizer: Tokenizer
    vocab: Vocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Family:
        return cls(tokenizer, Vocabulary(tokenizer))

    def whole(self, prompt: Sequence[int], output: Sequence[int], params: DecodeParams) -> str:
        """decode(prompt + output) - decode(prompt), by the tokenizer's own decode."""
        before, text = (self.one(ids, params) for ids in (prompt, [*prompt, *output]))
        while not text.startswith(before):  # the prompt ends in half a character, and the output completes it
            before = before[:-1]
        return text[len(before) :]

    def one(self, ids: Sequence[int], params: DecodeParams) -> str:
        known = [i for i in ids if 0 <= i < self.vocab.size]
        return self.tokenizer.decode(known, skip_special_tokens=params.skip_special_tokens)


class Llama(Family):
    """SentencePiece's own rule, written down a second time: a byte that is part of no character is one U+FFFD."""

    def one(self, ids: Sequence[int], params: DecodeParams) -> str:
        names = [self.tokenizer.id_to_token(i) or "" for i in ids if 0 <= i < self.vocab.size]
        specials = ("<unk>", "<s>", "</s>")
        shown = [n for n in names if not (params.skip_special_tokens and n in specials)]
        data = b"".join(bytes.fromhex(n[3:5]) if n.startswith("<0x") else n.replace("▁", " ").encode() for n in shown)
        text = "".join(c if c < "\udc80" or c > "\udcff" else "\ufffd" for c in data.decode("utf-8", "surrogateescape"))
        return text[1:] if text.startswith(" ") and self.vocab.strips_space else text


FAMILIES: dict[str, Family] = {
    "byte level": Family.of(byte_level().tokenizer),
    "llama": Llama.of(byte_fallback().tokenizer),
    "gemma": Llama.of(byte_fallback(strip=False).tokenizer),
    "word piece": Family.of(word_piece().tokenizer),
    "metaspace": Family.of(metaspace().tokenizer),
}
BY_WINDOW = {name: Vocabulary(FAMILIES[name].tokenizer, by_window=True) for name in ("byte level", "llama", "gemma")}


@dataclass(frozen=True, slots=True)
class Output:
    """One request as drawn: its options, its tokens, and how they are cut."""

    params: DecodeParams
    ids: tuple[int, ...]
    cuts: tuple[int, ...]

    def chunks(self) -> Iterator[TokenChunk]:
        edges = [0, *self.cuts, len(self.ids)]
        for start, end in itertools.pairwise(edges):
            values = tuple(TokenLogprob(-float(i)) for i in range(start, end))
            yield TokenChunk("r", start, self.ids[start:end], values, LENGTH if end == len(self.ids) else None)


@st.composite
def outputs(draw: st.DrawFn, family: Family, stops: bool = False) -> Output:
    ids = st.integers(0, family.vocab.size - 1) | st.sampled_from(OUTSIDE)
    prompt = draw(st.lists(ids, max_size=5))
    output = draw(st.lists(ids, max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(output)), max_size=len(output))))
    params = DecodeParams(
        tokenizer="t",
        prompt_tokens=len(prompt),
        prompt_tail=tuple(prompt),
        skip_special_tokens=draw(st.booleans()),
        return_logprob=True,
        return_token_ids=True,
    )
    if stops:
        text = family.whole(prompt, output, params).replace("\ufffd", "")
        inside = st.builds(lambda at, size: text[at : at + size], st.integers(0, len(text)), st.integers(1, 6))
        params = replace(
            params,
            stop=tuple(draw(st.lists((inside | st.text("ab \n", max_size=3)).filter(bool), min_size=1, max_size=3))),
            no_stop_trim=draw(st.booleans()),
            min_new_tokens=draw(st.integers(0, 4)),
            stop_regex=tuple(
                draw(st.lists(st.builds(re.escape, inside.filter(bool)) | st.sampled_from(PATTERNS), max_size=2))
            ),
        )
    return Output(params, tuple(output), tuple(cuts))


def run(vocab: Vocabulary, output: Output) -> list[TextChunk]:
    state = DecodeState("r", output.params, vocab)
    return [chunk for piece in output.chunks() if (chunk := state.push(piece)) is not None]


def text_of(chunks: Sequence[TextChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def check_whole(chunks: Sequence[TextChunk], ids: Sequence[int]) -> None:
    """Chunks follow one another, and cover these ids and their logprobs once."""
    assert [c.offset for c in chunks] == [0, *(c.end for c in chunks[:-1])]
    assert [i for c in chunks for i in c.token_ids or ()] == list(ids)
    assert [p.logprob for c in chunks for p in c.logprobs or ()] == [-float(i) for i in range(len(ids))]
    assert chunks[-1].usage.completion_tokens == len(ids)
    assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=st.data())
def test_deltas_join_to_the_whole_decode(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    output = data.draw(outputs(family))
    chunks = run(family.vocab, output)
    assert text_of(chunks) == family.whole(output.params.prompt_tail, output.ids, output.params)
    check_whole(chunks, output.ids)


def stopped(family: Family, output: Output) -> tuple[str, int, str | None]:
    """Text, tokens and stop of a request, found by decoding every prefix whole."""
    p = output.params
    before = 0
    for n in range(1, len(output.ids) + 1):
        text = family.whole(p.prompt_tail, output.ids[:n], p)
        certain = len(text) if n == len(output.ids) else len(text.rstrip("\ufffd"))
        names = (*p.stop, *p.stop_regex)
        patterns = (*map(re.escape, p.stop), *p.stop_regex)
        spans = [(end, i, at) for i, pattern in enumerate(patterns) for at, end in _matches(text, pattern)]
        spans = [span for span in spans if before < span[0] <= certain]
        if spans and n > p.min_new_tokens:
            end, i, at = min(spans)
            return text[: end if p.no_stop_trim else at], n, names[i]
        before = max(before, certain)
    return family.whole(p.prompt_tail, output.ids, p), len(output.ids), None


def _matches(text: str, pattern: str) -> list[tuple[int, int]]:
    found, spans = re.compile(pattern), itertools.combinations(range(len(text) + 1), 2)
    return [(start, end) for start, end in spans if found.fullmatch(text, start, end)]


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=st.data())
def test_stops_cut_the_whole_decode(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    output = data.draw(outputs(family, stops=True))
    chunks = run(family.vocab, output)
    text, tokens, stop = stopped(family, output)
    assert text_of(chunks) == text
    assert chunks[-1].finish == (LENGTH if stop is None else Finish("stop", stop))
    check_whole(chunks, output.ids[:tokens])


@pytest.mark.parametrize("name", FAMILIES)
@quick
@given(data=st.data())
def test_redelivery_and_successors_change_nothing(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    output = data.draw(outputs(family, stops=True))
    expected = run(family.vocab, replace(output, cuts=()))
    state = DecodeState("r", output.params, family.vocab)
    chunks: list[TextChunk] = []
    for piece in output.chunks():
        again = data.draw(st.integers(0, piece.start))
        if data.draw(st.booleans()):  # another process goes on from what was published
            state = DecodeState.decode(state.encode(), "r", output.params, family.vocab)
            assert (state.published, state.offset) == (state.consumed, chunks[-1].end if chunks else 0)
            again = min(again, state.published)
        end = piece.start + len(piece.token_ids)
        values = tuple(TokenLogprob(-float(i)) for i in range(again, end))
        if (chunk := state.push(TokenChunk("r", again, output.ids[again:end], values, piece.finish))) is not None:
            chunks.append(chunk)
        assert len(state.encode()) < 600
        if state.finish is not None:
            break
    assert text_of(chunks) == text_of(expected)
    assert chunks[-1].finish == expected[-1].finish
    check_whole(chunks, output.ids[: expected[-1].usage.completion_tokens])


@quick
@given(data=st.data())
def test_byte_path_and_window_path_agree(data: st.DataObject) -> None:
    family = FAMILIES["byte level"]
    output = data.draw(outputs(family))
    bytes_ = ByteDecoder(family.vocab, output.params)
    for decoder in (bytes_, WindowDecoder(BY_WINDOW["byte level"], output.params)):
        parts = [decoder.decode(piece.token_ids) for piece in output.chunks()]
        assert "".join([*parts, decoder.flush()]) == family.whole(output.params.prompt_tail, output.ids, output.params)


# A run of byte tokens that spells U+FFFD twice and then half a character looks broken to the window.
WHOLE_TEXT = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), min_size=1)


@quick
@given(text=WHOLE_TEXT, cuts=st.lists(st.integers(1, 4), min_size=1), kit=st.sampled_from(["llama", "gemma"]))
@example(text="😊é\ufffd世", cuts=[1], kit="llama")
def test_llama_text_comes_back_from_both_paths(text: str, cuts: list[int], kit: str) -> None:
    family = FAMILIES[kit]
    tokenizer = byte_fallback(strip=kit == "llama")
    ids = [*tokenizer.ids("<s>", "▁"), *tokenizer.spelled(text)]
    params = DecodeParams("t", 0)
    expected = family.tokenizer.decode(ids)
    for decoder in (ByteDecoder(family.vocab, params), WindowDecoder(BY_WINDOW[kit], params)):
        parts, at, n = [], 0, 0
        while at < len(ids):
            size = cuts[n % len(cuts)]
            parts.append(decoder.decode(ids[at : at + size]))
            at, n = at + size, n + 1
        assert "".join([*parts, decoder.flush()]) == expected


@quick
@given(st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x8A, 0xC3, 0xFF, 0x41]), min_size=1, max_size=60))
def test_the_window_stays_small_on_broken_bytes(data: list[int]) -> None:
    kit: TestTokenizer = byte_level()
    decoder = WindowDecoder(BY_WINDOW["byte level"], DecodeParams("t", 0))
    parts = []
    for token_id in kit.ids(*data):
        parts.append(decoder.decode([token_id]))
        assert len(decoder.decode_ids) <= 16
    assert "".join([*parts, decoder.flush()]) == bytes(data).decode("utf-8", "replace")


def real_tokenizers() -> list[Path]:
    """`tokenizer.json` of HEADRACE_TEST_MODEL, and any more in the folders named in HEADRACE_TEST_TOKENIZERS."""
    folders = [MODEL, *os.environ.get("HEADRACE_TEST_TOKENIZERS", "").split(os.pathsep)]
    return sorted({path for folder in folders if folder for path in Path(folder).glob("**/tokenizer.json")})


TEXT = "Hello, world! naïve — 世界 😊🌶️ \t\n\n def f(x):\n    return x**2  # ß\u200d\ufffd <|im_end|> مرحبا 👩‍👩‍👧 "


@pytest.mark.model
@pytest.mark.skipif(not real_tokenizers() and not os.environ.get("CI"), reason="HEADRACE_TEST_MODEL names no model")
def test_real_tokenizers() -> None:
    paths = real_tokenizers()
    assert paths, "CI has to name a model: HEADRACE_TEST_MODEL"
    for path in paths:
        tokenizer = Tokenizer.from_file(str(path))
        family = Family.of(tokenizer)
        ids = tokenizer.encode(TEXT * 3, add_special_tokens=False).ids
        for skip in (False, True):
            params = DecodeParams("t", 0, skip_special_tokens=skip, return_logprob=True, return_token_ids=True)
            for size in (1, 3, len(ids)):
                output = Output(params, tuple(ids), tuple(range(size, len(ids), size)))
                chunks = run(family.vocab, output)
                assert text_of(chunks) == tokenizer.decode(ids, skip_special_tokens=skip), (path, skip, size)
                check_whole(chunks, ids)


@pytest.mark.model
@pytest.mark.skipif(not real_tokenizers() and not os.environ.get("CI"), reason="HEADRACE_TEST_MODEL names no model")
@quick
@given(data=st.data())
def test_random_ids_of_real_tokenizers(data: st.DataObject) -> None:
    family = _real(data.draw(st.sampled_from(real_tokenizers())))
    output = data.draw(outputs(family))
    if family.vocab.kind == "byte_level":
        whole = family.whole(output.params.prompt_tail, output.ids, output.params)
        assert text_of(run(family.vocab, output)) == whole
    check_whole(run(family.vocab, output), output.ids)


_READ: dict[Path, Family] = {}


def _real(path: Path) -> Family:
    if path not in _READ:
        _READ[path] = Family.of(Tokenizer.from_file(str(path)))
    return _READ[path]
