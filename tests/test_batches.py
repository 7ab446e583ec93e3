"""`/v1/batches` as the official client sees it: cases 11 and 15-18 of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from headrace.api.batches.settings import BatchSettings
from headrace.api.batches.slices import QUEUE
from kit.batches import (
    CHAT,
    create,
    lines,
)
from kit.files_app import files_app
from kit.loopback import serve


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> BatchSettings:
    return BatchSettings(redis_url=redis_url, data_dir=str(tmp_path), batch_window=4, max_batch_lines=100)


@pytest.fixture
def url(settings: BatchSettings) -> Iterator[str]:
    with serve(files_app(settings)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_create_enqueues_one_slice(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(1))
    with redis.Redis.from_url(settings.redis_url) as store:
        assert store.lrange(f"rq:queue:{QUEUE}", 0, -1) == [f"{made.id}-1".encode()]
        description = store.hget(f"rq:job:{made.id}-1", "description")
        assert isinstance(description, bytes)
        assert b"drive_slice" in description


def test_an_idempotency_key_makes_one_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(1)), purpose="batch")

    def make(key: str) -> Any:
        return client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_headers={"Idempotency-Key": key}
        )

    with ThreadPoolExecutor(4) as threads:
        ids = {batch.id for batch in threads.map(make, ["one"] * 8)}
    assert len(ids) == 1
    assert make("two").id not in ids
    assert len(client.batches.list().data) == 2


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        ({f"k{i}": "v" for i in range(16)}, True),
        ({f"k{i}": "v" for i in range(17)}, False),
        ({"k" * 64: "v"}, True),
        ({"k" * 65: "v"}, False),
        ({"k": "é" * 512}, True),
        ({"k": "v" * 513}, False),
        ({"tags": ["a"]}, False),
        ({"n": 1}, False),
        (["a"], False),
    ],
)
def test_metadata(client: openai.OpenAI, metadata: Any, accepted: bool) -> None:
    if accepted:
        assert create(client, lines(1), metadata=metadata).metadata == metadata
        return
    with pytest.raises(openai.BadRequestError) as e:
        create(client, lines(1), metadata=metadata)
    assert (e.value.param or "").startswith("metadata")


@pytest.mark.parametrize(
    ("changes", "status", "message", "param", "code"),
    [
        ({"input_file_id": None}, 400, "Missing required parameter: 'input_file_id'.", "input_file_id",
         "missing_required_parameter"),
        ({"endpoint": None}, 400, "Missing required parameter: 'endpoint'.", "endpoint", "missing_required_parameter"),
        ({"endpoint": "/v1/images"}, 400,
         "Invalid value: '/v1/images'. "
         "Supported values are: '/v1/chat/completions', '/v1/completions', '/v1/embeddings'.",
         "endpoint", "invalid_value"),
        ({"completion_window": "7d"}, 400, "Invalid value: '7d'. Supported values are: '24h'.", "completion_window",
         "invalid_value"),
        ({"metadata": {"tags": []}}, 400,
         "Invalid type for 'metadata.tags': expected a string, but got an array instead.", "metadata.tags",
         "invalid_type"),
        ({"input_file_id": "file-x"}, 404, "No such File object: file-x", "input_file_id", None),
        ({"input_file_id": 7}, 400, "Invalid type for 'input_file_id': expected a string, but got an integer instead.",
         "input_file_id", "invalid_type"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400,
         "Invalid 'output_expires_after.seconds': integer below minimum value. "
         "Expected a value >= 3600, but got 60 instead.",
         "output_expires_after.seconds", "integer_below_min_value"),
    ],
)  # fmt: skip
def test_create_refuses(
    url: str, client: openai.OpenAI, changes: dict[str, Any], status: int, message: str, param: str, code: str | None
) -> None:
    file = client.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | changes
    reply = httpx.post(f"{url}/v1/batches", json={k: v for k, v in body.items() if v is not None})
    assert reply.status_code == status
    assert reply.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    }
    assert client.batches.list().data == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"'])
def test_a_body_that_is_no_object_is_a_400(url: str, body: bytes) -> None:
    assert httpx.post(f"{url}/v1/batches", content=body).status_code == 400


def test_a_file_of_another_purpose_or_deleted_is_refused(client: openai.OpenAI) -> None:
    other = client.files.create(file=("x", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="has purpose 'user_data'"):
        client.batches.create(input_file_id=other.id, endpoint=CHAT, completion_window="24h")
    client.files.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=other.id, endpoint=CHAT, completion_window="24h")


# -- read and list -----------------------------------------------------------------------------------------------------


def test_unknown_batches_are_404_in_openais_shape(client: openai.OpenAI) -> None:
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as e:
            call("batch_x")
        assert e.value.body == {
            "message": "No batch found with id 'batch_x'.",
            "type": "invalid_request_error",
            "param": "batch_id",
            "code": None,
        }


def test_the_clients_iterator_sees_every_batch_once(url: str, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    made = {client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id for _ in range(25)}
    seen = [batch.id for batch in client.batches.list(limit=20)]
    assert len(seen) == 25
    assert set(seen) == made
    page = httpx.get(f"{url}/v1/batches").json()
    assert (len(page["data"]), page["has_more"], page["first_id"]) == (20, True, seen[0])
    assert httpx.get(f"{url}/v1/batches?limit=25").json()["has_more"] is False


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=101", "limit=x", "after=batch_x"])
def test_a_list_asked_for_wrongly_is_a_400(url: str, query: str) -> None:
    reply = httpx.get(f"{url}/v1/batches?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.split("=")[0]
