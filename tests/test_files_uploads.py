"""`/v1/uploads` as the official client sees it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
from headrace.api.batches.settings import BatchSettings
from kit.batches import line
from kit.files_app import files_app
from kit.loopback import serve


@pytest.fixture
def client(redis_url: str, tmp_path: Path) -> Iterator[openai.OpenAI]:
    settings = BatchSettings(redis_url=redis_url, data_dir=str(tmp_path))
    with (
        serve(files_app(settings)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def begin(client: openai.OpenAI, size: int, **more: Any) -> Any:
    defaults: dict[str, Any] = {"filename": "in.bin", "mime_type": "text/plain", "purpose": "user_data"}
    return client.uploads.create(bytes=size, **defaults | more)


def test_the_clients_own_chunked_upload(client: openai.OpenAI, tmp_path: Path) -> None:
    data = os.urandom(300_001)
    done = client.uploads.upload_file_chunked(
        file=data,
        filename="x.bin",
        bytes=len(data),
        mime_type="text/plain",
        purpose="user_data",
        part_size=65_536,
        md5=hashlib.md5(data).hexdigest(),
    )
    assert (done.status, done.expires_at - done.created_at) == ("completed", 3600)
    assert done.file is not None
    assert (done.file.bytes, done.file.filename, done.file.purpose) == (len(data), "x.bin", "user_data")
    assert client.files.content(done.file.id).read() == data
    assert [file.id for file in client.files.list()] == [done.file.id]
    assert list((tmp_path / "uploads").iterdir()) == list((tmp_path / "incoming").iterdir()) == []


def test_parts_sent_in_parallel_stand_in_the_order_of_complete(client: openai.OpenAI) -> None:
    pieces = [bytes([65 + i]) * 1000 for i in range(6)]
    upload = begin(client, 6000)
    assert (upload.status, upload.bytes, upload.file) == ("pending", 6000, None)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda data: client.uploads.parts.create(upload.id, data=data), pieces))
    assert {(part.object, part.upload_id) for part in parts} == {("upload.part", upload.id)}
    done = client.uploads.complete(upload.id, part_ids=[part.id for part in reversed(parts)])
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b"".join(reversed(pieces))


def test_what_complete_refuses(client: openai.OpenAI) -> None:
    upload = begin(client, 4)
    part, other = (client.uploads.parts.create(upload.id, data=b"abcd").id for _ in range(2))
    for part_ids, message in (
        ([part, other], "hold 8 bytes, but the upload was announced with 4"),
        ([], "hold 0 bytes"),
        (["part_x"], "no part 'part_x'"),
        ([part, part], "named twice"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.uploads.complete(upload.id, part_ids=part_ids)
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(upload.id, part_ids=[part], md5="00")
    assert client.uploads.complete(upload.id, part_ids=[part]).status == "completed"


def test_nothing_is_added_once_it_is_over(client: openai.OpenAI, redis_url: str) -> None:
    completed, cancelled, expired = (begin(client, 1) for _ in range(3))
    part = client.uploads.parts.create(completed.id, data=b"x").id
    client.uploads.complete(completed.id, part_ids=[part])
    assert client.uploads.cancel(cancelled.id).status == "cancelled"
    assert client.uploads.cancel(cancelled.id).status == "cancelled"
    with redis.Redis.from_url(redis_url) as store:
        store.hset(f"hr:upload:{expired.id}", "created_at", "1")
    for upload, status in ((completed, "completed"), (cancelled, "cancelled"), (expired, "expired")):
        with pytest.raises(openai.BadRequestError, match=f"is {status}"):
            client.uploads.parts.create(upload.id, data=b"x")
        with pytest.raises(openai.BadRequestError, match=f"is {status}"):
            client.uploads.complete(upload.id, part_ids=[])
    assert len(client.files.list().data) == 1


def test_complete_twice_at_once_makes_one_file(client: openai.OpenAI, tmp_path: Path) -> None:
    upload = begin(client, 1)
    part = client.uploads.parts.create(upload.id, data=b"x").id

    def complete(_: int) -> str | None:
        try:
            return client.uploads.complete(upload.id, part_ids=[part]).status
        except openai.BadRequestError:
            return None

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(complete, range(4)))
    assert results.count("completed") == 1
    assert len(list((tmp_path / "files").iterdir())) == len(client.files.list().data) == 1


def test_a_batch_file_in_parts_is_checked_as_a_whole(client: openai.OpenAI) -> None:
    data = line("é")
    upload = begin(client, len(data), filename="in.jsonl", purpose="batch")
    cut = data.index("é".encode()) + 1
    parts = [client.uploads.parts.create(upload.id, data=piece).id for piece in (data[:cut], data[cut:])]
    with pytest.raises(openai.BadRequestError, match="utf-8"):
        client.uploads.complete(upload.id, part_ids=parts[::-1])
    done = client.uploads.complete(upload.id, part_ids=parts)
    assert done.file is not None
    assert done.file.expires_at == done.file.created_at + 30 * 86400


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"bytes": 0}, "bytes"),
        ({"bytes": "7"}, "bytes"),
        ({"bytes": (8 << 30) + 1}, "bytes"),
        ({"purpose": "bacth"}, "purpose"),
        ({"filename": None}, "filename"),
        ({"mime_type": None}, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ],
)
def test_create_refuses(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        begin(client, size=changes.pop("bytes", 1), **changes)
    assert e.value.param == param


def test_an_unknown_upload_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="No such Upload object: upload_x"):
        client.uploads.parts.create("upload_x", data=b"x")
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_x")
