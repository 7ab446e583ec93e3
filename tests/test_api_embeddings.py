"""`/v1/embeddings`, `/encode` and `/classify` over HTTP, in front of a queue that answers with given vectors."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from headrace.shared.chunks import Finish
from headrace.shared.codec import encode_vector
from headrace.shared.messages import GenerateJob
from kit.fake_backend import FakeBackend, Step, app, card
from kit.loopback import serve

LOGITS = (2.0, -1.0, 0.5)


def answer(job: GenerateJob, choice: int) -> list[Step]:
    """A unit vector that depends on the text's length, or some logits."""
    if job.task == "classify":
        return [Step("", 0, Finish("stop", data=encode_vector(LOGITS[:1] if job.model == "reward" else LOGITS)))]
    angle = len(job.input_ids) / 10
    return [Step("", 0, Finish("stop", data=encode_vector([math.cos(angle), math.sin(angle), 0, 0])))]


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    cards = [
        card("m"),
        card("e", task="embed", dimensions=4),
        card("c", task="classify", labels=("no", "yes", "perhaps")),
        card("many", task="classify", labels=(), multi_label=True),
        card("reward", task="classify"),
    ]
    return FakeBackend(answer, cards={one.name: one for one in cards})


@pytest.fixture(scope="module")
def http(backend: FakeBackend) -> Iterator[httpx.Client]:
    with serve(app(backend)) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield client


def vector(tokens: int) -> list[float]:
    return [float(np.float32(x)) for x in (math.cos(tokens / 10), math.sin(tokens / 10), 0, 0)]


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def error(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    return found


def test_the_official_client_reads_embeddings(http: httpx.Client, backend: FakeBackend) -> None:
    with closing(openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)) as sdk:
        for encoding in ("float", openai.NOT_GIVEN):  # not given, it asks for base64 and decodes it
            found = sdk.embeddings.create(model="e", input=["abc", "a"], encoding_format=encoding)  # type: ignore[arg-type]
            assert [item.embedding for item in found.data] == [vector(3), vector(1)]
            assert [item.index for item in found.data] == [0, 1]
            assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("e", 4, 4)
    assert [job.task for job in backend.jobs[-2:]] == ["embed", "embed"]


def test_every_form_of_input(http: httpx.Client) -> None:
    for given, lengths in (("ab", [2]), (["a", "bcd"], [1, 3]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])):
        data = post(http, "/v1/embeddings", model="e", input=given)["data"]
        assert [item["embedding"] for item in data] == [vector(length) for length in lengths]


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    data = post(http, "/v1/embeddings", model="e", input="ab", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4").tolist() == vector(2)


def test_fewer_dimensions_are_the_first_ones_at_length_one(http: httpx.Client) -> None:
    data = post(http, "/v1/embeddings", model="e", input="ab", dimensions=1)["data"]
    assert data[0]["embedding"] == [1.0]
    (first, second) = post(http, "/encode", model="e", text="ab", dimensions=2)["embedding"]
    assert (first, second) == pytest.approx(vector(2)[:2])
    for path in ("/v1/embeddings", "/encode"):
        text = {"input": "a"} if path == "/v1/embeddings" else {"text": "a"}
        found = error(http, path, model="e", dimensions=5, **text)
        assert found["message"] == "'dimensions' must be at most 4, those of 'e'; got 5."
        assert found["param"] == "dimensions"


def test_encode_answers_one_text_or_several(http: httpx.Client) -> None:
    one = post(http, "/encode", model="e", text="abc")
    assert one["embedding"] == vector(3)
    assert one["meta_info"]["prompt_tokens"] == 3
    several = post(http, "/encode", model="e", input_ids=[[5], [6, 7]])
    assert [item["embedding"] for item in several] == [vector(1), vector(2)]


def test_classes_have_scores_and_labels(http: httpx.Client) -> None:
    body = post(http, "/classify", model="c", text="abc")
    assert (body["label"], body["labels"], body["logits"]) == ("no", ["no", "yes", "perhaps"], list(LOGITS))
    weights = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert body["scores"] == pytest.approx(weights.tolist())
    several = post(http, "/classify", model="many", text=["a", "b"])
    assert several[1]["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert several[1]["scores"] == pytest.approx([1 / (1 + math.exp(-x)) for x in LOGITS])


def test_a_reward_is_one_logit(http: httpx.Client) -> None:
    body = post(http, "/classify", model="reward", text="abc")
    assert body["logits"] == [2.0]
    assert body.keys() == {"logits", "meta_info"}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            {"model": "e", "messages": [{"role": "user", "content": "a"}]},
            "embeds texts: use /v1",
        ),
        ("/generate", {"model": "c", "text": "a"}, "classifies texts: use /classify"),
        ("/v1/embeddings", {"model": "m", "input": "a"}, "does not embed texts; it generates text: use /v1/chat"),
        ("/encode", {"model": "c", "text": "a"}, "does not embed texts; it classifies texts"),
        ("/classify", {"model": "m", "text": "a"}, "does not classify texts; it generates text"),
    ],
)
def test_a_route_that_is_not_the_models_is_a_clear_400(
    http: httpx.Client, path: str, body: dict[str, Any], says: str
) -> None:
    found = error(http, path, **body)
    assert says in found["message"]
    assert found["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"model": "e"}, "input", "required"),
        ("/v1/embeddings", {"model": "e", "input": []}, "input", ""),
        ("/v1/embeddings", {"model": "e", "input": [[]]}, "input", ""),
        ("/v1/embeddings", {"model": "e", "input": "a", "encoding_format": "hex"}, "encoding_format", ""),
        ("/v1/embeddings", {"model": "e", "input": "a", "dimensions": 0}, "dimensions", ""),
        ("/v1/embeddings", {"model": "e", "input": ["a"] * 2049}, "input", "At most 2048 texts"),
        ("/v1/embeddings", {"model": "e", "input": "a" * 257}, "input", "reads 256 tokens; the text has 257"),
        ("/v1/embeddings", {"model": "e", "input": [10**9]}, "input", "not in the vocabulary"),
        ("/encode", {"model": "e"}, "text", "exactly one of"),
        ("/encode", {"model": "e", "text": "a", "input_ids": [1]}, "text", "exactly one of"),
        ("/classify", {"model": "c", "text": "a", "dimensions": 2}, "dimensions", "of embeddings"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str, says: str) -> None:
    found = error(http, path, **body)
    assert found["param"] is not None
    assert found["param"].startswith(param)
    assert says in found["message"]
