"""Constrained output and log-probabilities of prompts over HTTP: real processes, real weights and random ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit import tiny_models
from kit.serving import Serve
from openai import BadRequestError, OpenAI

MODEL = os.environ.get("HEADRACE_TEST_MODEL", "")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["mill", "dam"]},
        "wheels": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "kind", "wheels"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["random", pytest.param("smollm2", marks=pytest.mark.model)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "random":
        return tiny_models.build(tmp_path_factory.mktemp("structured") / "m")
    if not MODEL:
        pytest.skip("HEADRACE_TEST_MODEL names no folder")
    return Path(MODEL)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    data = tmp_path_factory.mktemp("serve") / "data"
    with Serve(data, "--model", f"m={folder}", "--dtype", "float32") as serve:
        url = serve.ready()
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client
        assert serve.stop() == 0


def ask(client: OpenAI, **asked: Any) -> str:
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": "Name a mill, as JSON."}]
    plain: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 0.8, "max_tokens": 120}
    choice = create(**(plain | asked)).choices[0]
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


def test_a_schema_is_held_to_by_many_at_once(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}
    with ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(lambda seed: ask(client, response_format=wanted, seed=seed), range(6)))
    for mill in map(json.loads, texts):
        assert mill.keys() == {"name", "kind", "wheels"}
        assert mill["kind"] in ("mill", "dam")
        assert mill["wheels"] in range(10)
        assert len(mill["name"].replace("\ufffd", "")) <= 8  # half a character shows as one or more of these


def test_the_other_kinds(client: OpenAI) -> None:
    assert ask(client, extra_body={"choice": ["yes", "no"]}) in ("yes", "no")
    assert re.fullmatch(r"\d{3}-[a-f]{2}", ask(client, extra_body={"regex": r"\d{3}-[a-f]{2}"}))
    assert ask(client, extra_body={"ebnf": 'root ::= "((" [0-3] "))"'}) in [f"(({i}))" for i in range(4)]
    assert isinstance(json.loads(ask(client, extra_body={"structured_outputs": {"json": {"type": "boolean"}}})), bool)


def test_a_stream_says_it_too(client: OpenAI) -> None:
    create: Any = client.chat.completions.create
    stream = create(
        model="m",
        messages=[{"role": "user", "content": "Yes or no?"}],
        stream=True,
        extra_body={"regex": "(yes|no), (yes|no)!"},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert re.fullmatch("(yes|no), (yes|no)!", text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ({"regex": "(never closed"}, "regex"),
        ({"ebnf": 'side ::= "a"'}, "ebnf"),
    ],
    ids=str,
)
def test_a_bad_grammar_is_a_400_that_names_it(client: OpenAI, bad: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=bad, stream=stream)
    assert caught.value.param == param


def test_echo_scores_the_prompt_as_transformers_does(client: OpenAI, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    text = "A headrace brings water to the wheel; a tailrace takes it away."
    create: Any = client.completions.create
    for tokens in (0, 3):
        choice = create(model="m", prompt=text, max_tokens=tokens, echo=True, logprobs=1, temperature=0).choices[0]
        logprobs = choice.logprobs
        assert choice.text.startswith(text)
        assert logprobs.token_logprobs[0] is None
        count = len(logprobs.tokens) - tokens
        assert "".join(logprobs.tokens[:count]) == text
        assert [
            text[place:].startswith(token)
            for place, token in zip(logprobs.text_offset, logprobs.tokens[:count], strict=False)
        ]

        ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
        load: Any = AutoModelForCausalLM.from_pretrained
        with torch.inference_mode():
            rows = load(folder, dtype=torch.float32).eval()(ids).logits[0].log_softmax(-1)
        wanted = rows[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert logprobs.token_logprobs[1:count] == pytest.approx(wanted, abs=2e-3)
