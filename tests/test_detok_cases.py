"""The detokenizer's cases of streams: what exact tokens become, step by step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from headrace.detok.state import SILENT_TOKENS, DecodeState
from headrace.detok.vocab import Vocabulary
from headrace.shared.chunks import Finish, PromptLogprobs, TextChunk, TokenChunk, TokenLogprob, Usage
from headrace.shared.errors import ProtocolError
from headrace.shared.messages import DecodeParams
from kit.tokenizers import TestTokenizer, byte_fallback, byte_level, metaspace, word_piece

BYTES = byte_level()
BYTES_VOCAB = Vocabulary.from_blob(BYTES.blob)
LLAMA = byte_fallback()
LLAMA_VOCAB = Vocabulary.from_blob(LLAMA.blob)
LENGTH = Finish("length")


def params(prompt: Sequence[int] = (), **options: Any) -> DecodeParams:
    return DecodeParams(tokenizer="t", prompt_tokens=len(prompt), prompt_tail=tuple(prompt[-5:]), **options)


def decode(
    steps: Sequence[Sequence[int]],
    options: DecodeParams | None = None,
    finish: Finish | None = LENGTH,
    vocab: Vocabulary = BYTES_VOCAB,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> list[TextChunk]:
    """Push each step, the last with `finish`, and return the chunks that came out."""
    state = DecodeState("r", options or params(), vocab)
    out, start = [], 0
    for n, step in enumerate(steps):
        values = None if logprobs is None else tuple(logprobs[start : start + len(step)])
        end = finish if n == len(steps) - 1 else None
        chunk = state.push(TokenChunk("r", start, tuple(step), values, end))
        start += len(step)
        if chunk is not None:
            out.append(chunk)
    return out


def deltas(chunks: Sequence[TextChunk]) -> list[str]:
    """The texts that a client sees: a chunk without text is no content delta."""
    return [chunk.text for chunk in chunks if chunk.text]


def steps(kit: TestTokenizer, *parts: str | int | tuple[str | int, ...]) -> list[list[int]]:
    return [kit.ids(*(part if isinstance(part, tuple) else (part,))) for part in parts]


def both(kit: TestTokenizer, *parts: str | int, **options: Any) -> list[TextChunk]:
    """Decode one part a step, and all in one step; the text and the finish are the same. Returns the former."""
    vocab = BYTES_VOCAB if kit is BYTES else LLAMA_VOCAB
    streamed = decode(steps(kit, *parts), params(**options), vocab=vocab)
    whole = decode([kit.ids(*parts)], params(**options), vocab=vocab)
    assert "".join(deltas(streamed)) == "".join(deltas(whole))
    assert (streamed[-1].finish, streamed[-1].usage) == (whole[-1].finish, whole[-1].usage)
    return streamed


def test_01_the_cursor_never_retreats() -> None:
    chunks = decode(steps(BYTES, ("A", " ", "世", 0xC4), (0x81, 0xC4), 0x81, "!"))
    assert deltas(chunks) == ["A 世", "ā", "ā", "!"]
    assert [c.offset for c in chunks] == [0, 5, 7, 9]


def test_02_a_prompt_that_ends_in_half_a_character() -> None:
    prompt = [*BYTES.spelled("Hello world "), *BYTES.ids(0xF0, 0x9F)]
    chunks = decode(steps(BYTES, 0x8C, 0xB6, " ok"), params(prompt))
    assert deltas(chunks) == ["🌶", " ok"]
    assert chunks[-1].usage == Usage(prompt_tokens=14, completion_tokens=3)


def test_02_a_half_character_that_stays_broken_is_the_prompts() -> None:
    prompt = BYTES.ids("Hello", 0xF0, 0x9F)
    assert deltas(decode(steps(BYTES, " ok"), params(prompt))) == [" ok"]


def test_03_bytes_left_over_at_the_end() -> None:
    assert deltas(both(BYTES, "o", "k", 0xF0, 0x9F)) == ["o", "k", "�"]


def test_03_a_replacement_character_that_the_model_wrote_is_kept() -> None:
    assert deltas(both(BYTES, "x", 0xEF, 0xBF, 0xBD, "x")) == ["x", "�", "x"]


@pytest.mark.parametrize("seed", [1, 2])
def test_04_random_bytes(seed: int) -> None:
    data = random.Random(seed).randbytes(10_000)
    chunks = decode([BYTES.ids(b) for b in data])
    assert "".join(deltas(chunks)) == data.decode("utf-8", "replace")
    assert chunks[-1].usage.completion_tokens == 10_000


def test_05_ids_outside_the_vocabulary_are_counted() -> None:
    (x,) = BYTES.ids("x")
    chunks = decode([[x], [-1, BYTES_VOCAB.size + 5, 2**32], [x]])
    assert deltas(chunks) == ["x", "x"]
    assert chunks[-1].usage.completion_tokens == 5


def test_06_each_request_by_its_own_options() -> None:
    ids = [BYTES.ids("a", "<|im_end|>", "b")]
    assert deltas(decode(ids, params(skip_special_tokens=True))) == ["ab"]
    assert deltas(decode(ids, params(skip_special_tokens=False))) == ["a<|im_end|>b"]


def test_06_spaces_between_special_tokens() -> None:
    vocab = Vocabulary.from_blob(word_piece().blob)
    ids = [word_piece().ids("[CLS]", "hello", "##ing", "[SEP]", "world")]
    spaced = decode(ids, params(skip_special_tokens=False), vocab=vocab)
    joined = decode(ids, params(skip_special_tokens=False, spaces_between_special_tokens=False), vocab=vocab)
    assert deltas(spaced) == ["[CLS] helloing [SEP] world"]
    assert deltas(joined) == ["[CLS]helloing[SEP]world"]


def test_07_a_character_in_two_steps_is_one_delta() -> None:
    assert deltas(decode([BYTES.ids(*"聪".encode()[:1]), BYTES.ids(*"聪".encode()[1:])])) == ["聪"]


def test_08_sentencepiece_spaces() -> None:
    love = steps(LLAMA, "▁I", "▁love", "▁you")
    assert deltas(decode(love, params(LLAMA.ids("<s>")), vocab=LLAMA_VOCAB)) == ["I", " love", " you"]
    assert deltas(decode(love, params(LLAMA.ids("<s>", "x")), vocab=LLAMA_VOCAB)) == [" I", " love", " you"]


def test_09_a_byte_that_is_never_a_character() -> None:
    assert "".join(deltas(both(BYTES, 0xFF, " x"))) == "� x"


def test_10_a_stop_over_several_steps() -> None:
    chunks = both(BYTES, "DEF", "G", "HI", "J", stop=("DEFGHIJ",))
    assert deltas(chunks) == []
    assert chunks[-1].finish == Finish("stop", "DEFGHIJ")


def test_11_a_stop_that_begins_inside_a_token() -> None:
    chunks = both(BYTES, "x", "\nObs", "erv", "ation", ":", stop=("\nObservation",))
    assert deltas(chunks) == ["x"]
    assert chunks[-1].usage.completion_tokens == 4


def test_12_a_stop_spelled_in_unusual_tokens() -> None:
    assert deltas(both(BYTES, "assist.", "\n", "<|", "im_end|>", stop=("<|im_end|>",))) == ["assist.", "\n"]


def test_13_nothing_is_held_that_is_no_stops_beginning() -> None:
    assert deltas(both(BYTES, "I", " am", " fine", stop=("\n\nHuman:",))) == ["I", " am", " fine"]


def test_14_a_stop_letter_by_letter() -> None:
    chunks = decode([[i] for i in BYTES.spelled("Observation: x")], params(stop=("Observation",)))
    assert deltas(chunks) == []
    assert chunks[-1].usage.completion_tokens == len("Observation")


def test_15_a_stop_before_the_limit_and_nothing_after_it() -> None:
    first, second = BYTES.ids("a", "b"), BYTES.ids("STOP", "x", "k", "o")
    chunks = decode([first, second], params(stop=("STOP",), return_token_ids=True))
    assert [i for c in chunks for i in c.token_ids or ()] == [*first, second[0]]
    assert "".join(deltas(chunks)) == "ab"
    assert chunks[-1].finish == Finish("stop", "STOP")
    assert chunks[-1].usage.completion_tokens == 3


def test_16_what_was_held_is_released_on_mismatch() -> None:
    chunks = both(BYTES, "a", "\n", "b", stop=("\n<|endoftext|>",))
    assert deltas(chunks) == ["a", "\nb"]
    assert chunks[-1].finish == LENGTH


def test_17_the_stop_is_kept_where_asked() -> None:
    chunks = decode([BYTES.ids("a"), BYTES.ids("DEF", "G", "x")], params(stop=("EFG",), no_stop_trim=True))
    assert deltas(chunks) == ["a", "DEFG"]
    assert chunks[-1].finish == Finish("stop", "EFG")


def test_21_a_stop_token_is_counted_and_is_no_text() -> None:
    (end,) = BYTES.ids("!")
    chunks = decode([BYTES.ids("a"), [end]], finish=Finish("stop", end))
    assert deltas(chunks) == ["a"]
    assert chunks[-1].usage.completion_tokens == 2
    kept = decode([BYTES.ids("a"), [end]], params(no_stop_trim=True), finish=Finish("stop", end))
    assert deltas(kept) == ["a", "!"]


def test_25_each_token_has_its_own_tops() -> None:
    ids = BYTES.ids("a", "b", "x")
    given = [TokenLogprob(-float(i), ((i, -0.1), (i + 1, -0.2))) for i in ids]
    for cut in ([ids], [[i] for i in ids]):
        chunks = decode(cut, params(return_logprob=True), logprobs=given)
        got = [p for c in chunks for p in c.logprobs or ()]
        assert [(p.token_id, p.token, p.logprob) for p in got] == list(
            zip(ids, "abx", (-float(i) for i in ids), strict=True)
        )
        assert [[t.token_id for t in p.top] for p in got] == [[i, i + 1] for i in ids]


def test_26_logprobs_over_half_a_character() -> None:
    given = [TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    chunks = decode(steps(BYTES, 0xC3, 0xA9, "x"), params(return_logprob=True), logprobs=given)
    assert deltas(chunks) == ["é", "x"]
    assert [[p.logprob for p in c.logprobs or ()] for c in chunks] == [[-1.0, -2.0], [-3.0]]


def test_logprobs_of_the_prompt_come_once_with_the_first_chunk() -> None:
    prompt = PromptLogprobs(
        tuple(BYTES.ids("a", "x")), (TokenLogprob(None), TokenLogprob(-1.0, ((BYTES.ids("b")[0], -2.0),)))
    )
    state = DecodeState("r", params(return_logprob=True), Vocabulary(BYTES.tokenizer))
    assert state.push(TokenChunk("r", 0, (BYTES.bytes_[0xC3],), (TokenLogprob(-1.0),), prompt=prompt)) is None
    chunk = state.push(TokenChunk("r", 1, (BYTES.bytes_[0xA9],), (TokenLogprob(-2.0),)))
    assert chunk is not None
    assert chunk.text == "é"
    told = chunk.prompt_logprobs
    assert told is not None
    assert [(p.token, p.logprob, [t.token for t in p.top]) for p in told] == [("a", None, []), ("x", -1.0, ["b"])]
    again = TextChunk.decode("r", chunk.offset, chunk.seq, chunk.text.encode(), chunk.encode_meta())
    assert again == chunk
    last = state.push(TokenChunk("r", 2, tuple(BYTES.ids("x")), (TokenLogprob(-2.0),), Finish("length")))
    assert last is not None
    assert last.prompt_logprobs is None
    alone = DecodeState("r", params(return_logprob=True), Vocabulary(BYTES.tokenizer))
    scored = alone.push(TokenChunk("r", 0, finish=Finish("length"), prompt=prompt))
    assert scored is not None
    assert scored.prompt_logprobs == told


def test_the_weights_that_made_the_newest_token_are_told_also_by_a_successor() -> None:
    def told(state: DecodeState, start: int, version: str | None = None) -> str | None:
        chunk = state.push(TokenChunk("r", start, tuple(BYTES.ids("a")), weight_version=version))
        assert chunk is not None
        assert TextChunk.decode("r", chunk.offset, chunk.seq, b"a", chunk.encode_meta()) == chunk
        return chunk.weight_version

    state = DecodeState("r", params(), BYTES_VOCAB)
    assert [told(state, 0), told(state, 1, "two"), told(state, 2)] == [None, "two", "two"]
    successor = DecodeState.decode(state.encode(), "r", params(), BYTES_VOCAB)
    assert [told(successor, 3), told(successor, 4, "three")] == ["two", "three"]


def test_27_the_bytes_of_a_character_in_four_tokens() -> None:
    given = [TokenLogprob(-1.0)] * 5
    ids = [*BYTES.spelled("😊"), *BYTES.ids("<|im_end|>")]
    chunks = decode([ids], params(return_logprob=True), logprobs=given)
    got = chunks[0].logprobs
    assert got is not None
    assert [p.bytes for p in got] == [(240,), (159,), (152,), (138,), tuple(b"<|im_end|>")]
    assert got[-1].token == "<|im_end|>"  # shown, though the text leaves it out
    assert chunks[0].text == "😊"


def test_min_new_tokens_keeps_early_stops_as_text() -> None:
    chunks = both(BYTES, "a", "b", "a", "b", "x", stop=("ab",), min_new_tokens=2)
    assert "".join(deltas(chunks)) == "ab"
    assert chunks[-1].usage.completion_tokens == 4


def test_the_stop_that_completes_first_wins_and_ties_go_by_list_order() -> None:
    assert decode([BYTES.spelled("xabcd")], params(stop=("abcd", "bc")))[-1].finish == Finish("stop", "bc")
    assert decode([BYTES.spelled("xabc")], params(stop=("bc", "abc")))[-1].finish == Finish("stop", "bc")
    assert decode([BYTES.spelled("xabc")], params(stop=("abc", "bc")))[-1].finish == Finish("stop", "abc")


def test_bytes_left_over_can_complete_a_stop() -> None:
    assert decode([BYTES.ids("x", 0xF0)], params(stop=("x�",)))[-1].finish == Finish("stop", "x�")


def test_llama_bytes_left_over_are_one_replacement_each() -> None:
    assert "".join(deltas(both(LLAMA, "o", "k", 0xF0, 0x9F))) == LLAMA.tokenizer.decode(LLAMA.ids("o", "k", 0xF0, 0x9F))


def test_redelivery_changes_nothing_and_a_gap_is_refused() -> None:
    state = DecodeState("r", params(), BYTES_VOCAB)
    a, b, x = BYTES.ids("a", "b", "x")
    assert state.push(TokenChunk("r", 0, (a, b))) == TextChunk("r", 0, "ab", Usage(0, 2))
    assert state.push(TokenChunk("r", 0, (a, b))) is None
    assert state.push(TokenChunk("r", 1, (b, x))) == TextChunk("r", 2, "x", Usage(0, 3))
    with pytest.raises(ProtocolError, match="tokens 3 to 4 of r are missing"):
        state.push(TokenChunk("r", 4, (x,)))
    done = state.push(TokenChunk("r", 3, (), finish=LENGTH))
    assert done == TextChunk("r", 3, "", Usage(0, 3), finish=LENGTH)
    assert state.push(TokenChunk("r", 3, (), finish=LENGTH)) is None


def test_the_position_moves_on_without_text() -> None:
    (end,) = BYTES.ids("<|im_end|>")
    chunks = decode([[end]] * (SILENT_TOKENS + 1), params(return_token_ids=True))
    assert [(c.text, len(c.token_ids or ())) for c in chunks] == [("", SILENT_TOKENS), ("", 1)]


def test_cached_tokens_are_in_the_usage() -> None:
    state = DecodeState("r", params(), BYTES_VOCAB)
    state.push(TokenChunk("r", 0, tuple(BYTES.ids("a")), cached_tokens=7))
    heir = DecodeState.decode(state.encode(), "r", params(), BYTES_VOCAB)
    done = heir.push(TokenChunk("r", 1, (), finish=LENGTH))
    assert done is not None
    assert done.usage == Usage(0, 1, cached_tokens=7)


@pytest.mark.parametrize("data", [b"{", b"[2,0]", b"[1,0]", b'[1,0,0,0,"",["zz",0,false,false]]', b"null"])
def test_a_damaged_state_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="decode state"):
        DecodeState.decode(data, "r", params(), BYTES_VOCAB)


def test_a_damaged_tokenizer_is_refused() -> None:
    with pytest.raises(ProtocolError, match="tokenizer of 2 bytes"):
        Vocabulary.from_blob(b"{}")


def test_a_pattern_that_cannot_be_walked_is_refused_and_not_ignored() -> None:
    with pytest.raises(ProtocolError, match="cannot be walked"):
        DecodeState("r", params(stop_regex=("a$",)), BYTES_VOCAB)


def test_the_families_are_told_apart() -> None:
    kinds = [
        Vocabulary(kit.tokenizer).kind for kit in (BYTES, LLAMA, byte_fallback(strip=False), word_piece(), metaspace())
    ]
    assert kinds == ["byte_level", "byte_fallback", "byte_fallback", "other", "other"]


@pytest.mark.parametrize(
    ("kit", "token", "text"),
    [
        (BYTES, " ok", " ok"),
        (BYTES, "≤≥", "≤≥"),
        (BYTES, "<tool call>", "<tool call>"),
        (LLAMA, "▁love", " love"),
        (word_piece(), "hello", " hello"),
        (word_piece(), "##ing", "ing"),
        (metaspace(), "▁hello", " hello"),
        (metaspace(), "ld", "ld"),
    ],
)
def test_a_token_alone_is_what_it_is_inside_a_text(kit: TestTokenizer, token: str, text: str) -> None:
    piece = Vocabulary(kit.tokenizer).piece(kit.ids(token)[0])
    assert piece == (text, tuple(text.encode()))


def test_ids_outside_the_vocabulary_have_no_piece() -> None:
    assert [BYTES_VOCAB.piece(i) for i in (-1, BYTES_VOCAB.size, 2**32)] == [("", ())] * 3
