"""Output that follows a grammar: what every grammar allows, and nothing else, whatever the model would say."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.shared.errors import InvalidRequest
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.grammar import COMPILING, Grammar, Grammars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import engines, tiny_models, tokenizers
from tokenizers import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
        "ok": {"enum": [True, None]},
    },
    "required": ["name", "age", "ok"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("grammar") / "m")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def text_of(folder: Path) -> Callable[[engines.Generation], str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda generation: str(tokenizer.decode(generation.token_ids, skip_special_tokens=True))


def constrained(rid: str = "a", **sampling: Any) -> Any:
    plain: dict[str, Any] = {"temperature": 1.5, "ignore_eos": False, "max_new_tokens": 200, "sampling_seed": 1}
    return engines.job(rid, (70, 71, 72), **(plain | sampling))


CHOICES = ("yes", "no", 'a "quoted"\\\n one', "聪明")
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
    "end": "!",
}
KINDS: list[tuple[str, Any, Callable[[str], Any]]] = [
    ("regex", r"[a-c]{3}-\d+ (é|聪)!", re.compile(r"[a-c]{3}-\d+ (é|聪)!").fullmatch),
    ("choice", CHOICES, CHOICES.__contains__),
    ("ebnf", 'root ::= "(" root ")" | "x"', lambda text: text == f"{'(' * (len(text) // 2)}x{')' * (len(text) // 2)}"),
    ("json_schema", json.dumps(PERSON), lambda text: json.loads(text).keys() == {"name", "age", "ok"}),
    (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": TAG}),
        re.compile(r"<f>\s*(true|false)\s*!").fullmatch,
    ),
]


@pytest.mark.parametrize(("kind", "source", "matches"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_each_kind_is_followed_by_many_seeds_in_one_batch(
    engine: TransformersEngine, text_of: Any, kind: str, source: Any, matches: Callable[[str], Any]
) -> None:
    jobs = [constrained(f"{i}", sampling_seed=i, temperature=(i % 3) * 0.8, **{kind: source}) for i in range(6)]
    for generation in engines.run(engine, [*jobs, engines.job("free", (9, 9, 9))]).values():
        text = text_of(generation)
        if generation.finish is not None and generation.finish.type == "stop":
            assert matches(text), text
            assert generation.token_ids[-1] == tiny_models.EOS_ID
    assert len(engines.drain(engine)) == 0


def test_a_free_neighbour_says_what_it_says_alone(engine: TransformersEngine) -> None:
    free = engines.job("free", (9, 8, 7), max_new_tokens=12)
    alone = engines.run(engine, [free])["free"].token_ids
    together = engines.run(engine, [constrained(regex="[ab]{20}"), free, constrained("b", choice=("left", "right"))])
    assert together["free"].token_ids == alone


def test_another_worker_goes_on_within_the_grammar(folder: Path, engine: TransformersEngine) -> None:
    job = constrained(json_schema=json.dumps(PERSON))
    whole = engines.run(engine, [job])["a"].token_ids
    other = engines.tiny_engine(folder)
    for cut in (1, len(whole) // 2, len(whole) - 1):
        other.add(job, whole[:cut])
        assert whole[:cut] + engines.drain(other)["a"].token_ids == whole
    other.add(job, [*whole[:4], *whole[:4]])
    finish = engines.drain(other)["a"].finish
    assert finish is not None
    assert (finish.type, finish.status) == ("error", 500)
    other.close()


@pytest.mark.parametrize(
    ("sampling", "ends"),
    [
        ({"regex": "ab"}, ("stop", tiny_models.EOS_ID)),
        ({"regex": "ab", "ignore_eos": True}, ("stop", tiny_models.EOS_ID)),  # what else could follow
        ({"regex": "ab", "min_new_tokens": 9}, ("stop", None)),
        ({"ebnf": "root ::= root"}, ("error", None)),
        ({"choice": ("aaaa",), "max_new_tokens": 2}, ("length", None)),
    ],
    ids=str,
)
def test_ends(engine: TransformersEngine, sampling: dict[str, Any], ends: tuple[str, int | None]) -> None:
    finish = engines.run(engine, [constrained(**sampling)])["a"].finish
    assert finish is not None
    assert (finish.type, finish.matched) == ends


def test_bans_that_leave_nothing_are_an_error_of_the_request(engine: TransformersEngine, folder: Path) -> None:
    banned = tuple((i,) for i in range(tiny_models.VOCAB_SIZE))
    jobs = [constrained(regex="[ab]+", bad_words=banned), constrained("b", bad_words=banned), engines.job("c", (5,))]
    done = engines.run(engine, jobs)
    for rid in "ab":
        finish = done[rid].finish
        assert finish is not None
        assert (finish.type, finish.status) == ("error", 400)
    assert len(done["c"].token_ids) == 8


def test_a_bias_does_not_lead_out_of_the_grammar(engine: TransformersEngine, text_of: Any) -> None:
    job = constrained(regex="[a-z]{4}", logit_bias=tuple((i, 100.0) for i in range(5, 40)))
    assert re.fullmatch("[a-z]{4}", text_of(engines.run(engine, [job])["a"]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type": "strange"}'}, "strange"),
    ({"json_schema": "{"}, "JSON"),
    ({"json_schema": '{"$ref": "#"}'}, "ircular"),
    ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "minimum"),
    ({"json_schema": '{"properties": {"a":' * 20000 + "{}" + "}}" * 20000}, ""),
    ({"regex": "("}, "parenthesis"),
    ({"regex": r"\bword"}, "oundary"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, "limit"),
    ({"ebnf": "nonsense"}, ""),
    ({"ebnf": 'foo ::= "a"'}, "root"),
    ({"structural_tag": "[]"}, "object"),
]


@pytest.mark.parametrize(("sampling", "says"), BAD, ids=[f"{i}" for i in range(len(BAD))])
def test_a_bad_grammar_ends_its_own_request_as_a_400(
    engine: TransformersEngine, sampling: dict[str, Any], says: str
) -> None:
    done = engines.run(engine, [constrained(**sampling), engines.job("b", (5, 6))])
    finish = done["a"].finish
    assert finish is not None
    assert (finish.type, finish.status, finish.param) == ("error", 400, next(iter(sampling)))
    assert says in (finish.message or "")
    assert "/" not in (finish.message or "").replace("#/", "")
    assert len(done["b"].token_ids) == 8


@pytest.mark.parametrize("regex", ["(a+)+$", "(a*)*b", "((((a{100}){100}){100}){100}){1,9}", "([a-z]*[a-y]*){1,1000}"])
def test_regexes_that_blow_up_elsewhere(engine: TransformersEngine, regex: str) -> None:
    done = engines.run(engine, [constrained(regex=regex, max_new_tokens=4), engines.job("b", (5, 6))])
    assert len(done["a"].token_ids) >= 1
    assert len(done["b"].token_ids) == 8


def test_others_run_while_a_grammar_compiles(engine: TransformersEngine) -> None:
    values = [f"value {i} of many" for i in range(3000)]
    engine.add(constrained(json_schema=json.dumps({"enum": values}), max_new_tokens=4))
    engine.add(engines.job("b", (5, 6)))
    assert sorted(engine.running()) == ["a", "b"]
    assert engine.free_slots() == 6
    engine.abort("a")
    assert engines.drain(engine).keys() == {"b"}


def test_grammars_that_never_compile_are_refused_and_others_are_not(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compilers = threading.Event(), engine._grammars._compilers
    compile_at_once = compilers.compile

    def compile(grammar: Grammar) -> Any:
        assert grammar.kind != "ebnf" or go.wait(60)
        return compile_at_once(grammar)

    monkeypatch.setattr(engine._grammars._turns, "_compile", compile)
    monkeypatch.setattr(engine._grammars._turns, "_limit_s", 0.1)
    for n in range(COMPILING):
        engine.add(constrained(rid=f"stuck {n}", ebnf=f'root ::= "{n}"'))
    engine.add(constrained(rid="behind", regex="[ab]{3}"))
    done = engines.drain(engine)
    assert done["behind"].finish is not None
    assert done["behind"].finish.type == "stop"
    for n in range(COMPILING):
        finish = done[f"stuck {n}"].finish
        assert finish is not None
        assert (finish.status, finish.param) == (400, "ebnf")
        assert "takes more than" in (finish.message or "")
    engine.add(constrained(rid="one more", regex="[ab]{4}"))
    finish = engines.drain(engine)["one more"].finish
    assert finish is not None
    assert finish.status == 429
    go.set()
    while engine._grammars._turns._lost:
        time.sleep(0.001)
    engine.add(constrained(rid="late", ebnf='root ::= "0"'))
    finish = engines.drain(engine)["late"].finish
    assert finish is not None
    assert finish.type == "stop"


def test_a_compiled_grammar_is_kept(folder: Path) -> None:
    grammars = Grammars((folder / "tokenizer.json").read_bytes(), tiny_models.VOCAB_SIZE, (tiny_models.EOS_ID,))
    first = grammars.compile(Grammar("regex", "a+"))
    assert grammars.compile(Grammar("regex", "a+")) is first
    assert grammars.compile(Grammar("ebnf", "a+")) is not first


def test_special_tokens_are_no_text(folder: Path) -> None:
    grammars = Grammars((folder / "tokenizer.json").read_bytes(), tiny_models.VOCAB_SIZE, (tiny_models.EOS_ID,))
    matcher = grammars.matcher(grammars.compile(Grammar("regex", r"[^x]+")).result(30), [])
    for special in range(len(tiny_models.SPECIALS)):
        assert not matcher.accept(special)
    assert not matcher.complete
    assert matcher.accept(70)
    assert matcher.complete
    assert matcher.accept(tiny_models.EOS_ID)
    assert matcher.terminated
    matcher.rollback(2)
    assert not matcher.complete


def test_tokenizers_of_other_families() -> None:
    fallback = tokenizers.byte_fallback()
    grammars = Grammars(fallback.blob, 400, (2,))
    matcher = grammars.matcher(grammars.compile(Grammar("choice", ("é ok",))).result(30), [])
    assert [matcher.accept(i) for i in fallback.spelled("é ok")] == [True] * 5
    assert matcher.complete
    for odd in (tokenizers.word_piece(), tokenizers.metaspace()):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            Grammars(odd.blob, 20, (1,)).compile(Grammar("regex", "a")).result(30)


def schemas() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(
        [
            {"type": "integer", "minimum": -9, "maximum": 99},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[a-d]{2,3}$"},
            {"enum": ["é", 1, None, "x y"]},
            {"const": {"a": [1]}},
        ]
    )
    names = st.sampled_from(["a", "b c", "é", '"'])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3).map(
                lambda p: {"type": "object", "properties": p, "required": sorted(p), "additionalProperties": False}
            ),
            st.tuples(inner, st.integers(0, 2)).map(
                lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": pair[1] + 1}
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
        ),
        max_leaves=4,
    )


def conforms(value: Any, schema: Any) -> bool:
    """JSON schema, as far as `schemas` goes."""
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            pattern = schema.get("pattern")
            return isinstance(value, str) and (
                bool(re.search(pattern, value)) if pattern else len(value.replace("\ufffd", "")) <= 4
            )
        case "array":
            sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return sized and all(conforms(one, schema["items"]) for one in value)
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and value.keys() == properties.keys()
        and all(conforms(value[k], properties[k]) for k in value)
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_any_schema_is_followed(engine: TransformersEngine, text_of: Any, schema: Any, seed: int) -> None:
    job = constrained(json_schema=json.dumps(schema), sampling_seed=seed, max_new_tokens=240)
    generation = engines.run(engine, [job])["a"]
    assert generation.finish is not None
    if generation.finish.type == "stop":
        assert conforms(json.loads(text_of(generation)), schema)
    else:
        assert generation.finish.type == "length"
