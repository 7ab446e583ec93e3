"""`/v1/files` as the official client sees it: cases 1-6, 12, 14, 16-18 of the contract on files."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from headrace.api.batches.settings import BatchSettings
from headrace.api.files.durable import Durability
from headrace.api.files.store import FileStore
from headrace.shared.clients import connect_async
from headrace.shared.errors import ConfigError, StoreUnavailable
from kit.files_app import files_app
from kit.loopback import serve

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}\n'
MB = 1 << 20


@pytest.fixture
def url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    settings = BatchSettings(redis_url=redis_url, data_dir=str(tmp_path), max_file_mb=5, max_batch_file_mb=2)
    with serve(files_app(settings)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def upload(client: openai.OpenAI, data: bytes, name: str = "in.jsonl", purpose: Any = "batch", **more: Any) -> Any:
    return client.files.create(file=(name, data), purpose=purpose, **more)


def test_a_file_comes_back_as_it_was_sent(client: openai.OpenAI) -> None:
    data = os.urandom(3 * MB + 1)
    file = upload(client, data, "photo.bin", "user_data")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(data), "photo.bin", "user_data")
    assert file.id.startswith("file-")
    assert file.expires_at is None
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.content(file.id).read() == data


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, MB, MB + 1, 2 * MB - 1])
def test_a_part_that_looks_like_its_boundary_comes_back(url: str, size: int) -> None:
    """Sizes around the buffers, and a body made of what the parser must tell from a boundary."""
    data = (b"\r\n--boundar\r\n-" * (size // 14 + 1))[:size]
    body = (
        b'--boundary\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + data + b"\r\n"
        b'--boundary\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--boundary--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=boundary"}
    reply = httpx.post(f"{url}/v1/files", content=body, headers=headers)
    assert reply.json()["bytes"] == size
    assert httpx.get(f"{url}/v1/files/{reply.json()['id']}/content").content == data


def test_batch_files_expire_after_thirty_days_unless_told_otherwise(client: openai.OpenAI) -> None:
    file = upload(client, LINE)
    assert file.expires_at - file.created_at == 30 * 86400
    short = upload(client, LINE, expires_after={"anchor": "created_at", "seconds": 3600})
    assert short.expires_at - short.created_at == 3600


@pytest.mark.parametrize(
    ("expiry", "param", "code"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "expires_after[seconds]", "integer_below_min_value"),
        ({"anchor": "created_at", "seconds": 2592001}, "expires_after[seconds]", "integer_above_max_value"),
        ({"anchor": "last_active_at", "seconds": 3600}, "expires_after[anchor]", "invalid_value"),
        ({"anchor": "created_at"}, "expires_after[seconds]", "missing_required_parameter"),
    ],
)
def test_a_lifetime_out_of_range_is_refused(client: openai.OpenAI, expiry: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        upload(client, LINE, expires_after=expiry)
    assert (e.value.param, e.value.code) == (param, code)


def test_expired_files_are_gone(client: openai.OpenAI, redis_url: str, tmp_path: Path) -> None:
    file = upload(client, LINE)
    with redis.Redis.from_url(redis_url) as store:
        store.hset(f"hr:file:{file.id}", "expires_at", "1")
        store.zadd("hr:files:expiry", {file.id: 1})
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert client.files.list().data == []
    assert not (tmp_path / "files" / file.id).exists()


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (LINE.decode().encode("utf-16"), "in.jsonl", "Invalid file for Batch API. Must be utf-8 encoded"),
        (LINE * 6 + b'{"custom_id":"\xff"}\n' + LINE, "in.jsonl", "Invalid file for Batch API. Must be utf-8 encoded"),
        (LINE + b"\xe2\x82", "in.jsonl", "Invalid file for Batch API. Must be utf-8 encoded"),
        (LINE, "in.json", "Invalid file format for Batch API. Must be .jsonl"),
        (b"", "in.jsonl", "The file is empty."),
        (b"\n", "in.jsonl", "The file is empty."),
        (b"\xef\xbb\xbf\r\n", "in.jsonl", "The file is empty."),
    ],
    ids=["utf-16", "a bad byte", "a cut character", "not jsonl", "empty", "one newline", "a mark and a newline"],
)
def test_what_cannot_be_a_batch_is_refused_at_upload(
    client: openai.OpenAI, tmp_path: Path, data: bytes, name: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        upload(client, data, name)
    assert e.value.body == {"message": message, "type": "invalid_request_error", "param": "file", "code": None}
    assert client.files.list().data == []
    assert list((tmp_path / "files").iterdir()) == list((tmp_path / "incoming").iterdir()) == []


def test_a_character_across_two_writes_is_utf8(client: openai.OpenAI) -> None:
    data = b"x" * (MB - 1) + "é".encode() + b"x" * 65535 + "é".encode()
    assert upload(client, data).bytes == len(data)


def test_a_byte_order_mark_and_other_purposes_are_accepted(client: openai.OpenAI) -> None:
    assert upload(client, b"\xef\xbb\xbf" + LINE).bytes == len(LINE) + 3
    assert upload(client, b"\xff\xfe", "x.bin", "assistants").bytes == 2


@pytest.mark.parametrize(
    ("fields", "files", "param", "code"),
    [
        ({"purpose": "batch"}, {}, "file", "missing_required_parameter"),
        ({}, {"file": ("in.jsonl", LINE)}, "purpose", "missing_required_parameter"),
        ({"purpose": "bacth"}, {"file": ("in.jsonl", LINE)}, "purpose", "invalid_value"),
        ({"purpose": "batch_output"}, {"file": ("in.jsonl", LINE)}, "purpose", "invalid_value"),
    ],
)
def test_a_form_that_lacks_something_stores_nothing(
    url: str, tmp_path: Path, fields: dict[str, str], files: dict[str, Any], param: str, code: str
) -> None:
    # httpx sends a form without files as urlencoded; a nameless extra part keeps it multipart.
    reply = httpx.post(f"{url}/v1/files", data=fields, files=files or {"other": ("", b"")})
    assert reply.status_code == 400
    assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (param, code)
    assert list((tmp_path / "files").iterdir()) == list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=x", b"nonsense"),
        ("multipart/form-data; boundary=" + "x" * 5000, b"--x--"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n',
        ),
    ],
)
def test_a_body_that_is_no_form_is_a_400(url: str, content_type: str, body: bytes) -> None:
    reply = httpx.post(f"{url}/v1/files", content=body, headers={"content-type": content_type})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("count", "size"), [(65, 1), (3, MB // 2)])
def test_a_form_is_not_a_way_to_fill_the_memory(url: str, tmp_path: Path, count: int, size: int) -> None:
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n%s\r\n' % (i, b"y" * size) for i in range(count)
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    reply = httpx.post(f"{url}/v1/files", content=body + b"--x--\r\n", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert list((tmp_path / "files").iterdir()) == list((tmp_path / "incoming").iterdir()) == []


def test_parts_come_in_any_order(url: str) -> None:
    boundary, parts = "b", []
    for head, value in ((b'name="file"; filename="in.jsonl"', LINE), (b'name="purpose"', b"batch")):
        parts.append(b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + value + b"\r\n")
    for order in (parts, parts[::-1]):
        body = b"".join(order) + b"--b--\r\n"
        headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
        assert httpx.post(f"{url}/v1/files", content=body, headers=headers).json()["purpose"] == "batch"


def test_sizes_over_the_limit_are_413(client: openai.OpenAI) -> None:
    for data, purpose in ((b"x" * (2 * MB + 1), "batch"), (b"x" * (5 * MB + 1), "user_data")):
        with pytest.raises(openai.APIStatusError) as e:
            upload(client, data, purpose=purpose)
        assert e.value.status_code == 413
    assert client.files.list().data == []


def test_uploads_of_one_name_at_once_are_all_kept(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(4) as threads:
        files = list(threads.map(lambda i: upload(client, LINE * (i + 1)), range(8)))
    assert len({file.id for file in files}) == 8
    assert [client.files.retrieve(file.id).bytes for file in files] == [len(LINE) * (i + 1) for i in range(8)]


def test_unknown_files_are_404_in_openais_shape(client: openai.OpenAI) -> None:
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as e:
            call("file-x")
        assert e.value.body == {
            "message": "No such File object: file-x",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }


def test_deletion(client: openai.OpenAI, tmp_path: Path) -> None:
    file = upload(client, LINE)
    assert client.files.delete(file.id).model_dump() == {"id": file.id, "object": "file", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert client.files.list().data == []
    assert not (tmp_path / "files" / file.id).exists()


def test_the_clients_iterator_sees_every_file_once(client: openai.OpenAI) -> None:
    ids = [upload(client, LINE).id for _ in range(7)]
    other = upload(client, b"x", "x", "vision").id
    assert sorted(f.id for f in client.files.list(limit=3)) == sorted([*ids, other])
    assert sorted(f.id for f in client.files.list(limit=3, purpose="batch", order="asc")) == sorted(ids)
    ascending = [f.id for f in client.files.list(limit=2, order="asc")]
    assert [f.id for f in client.files.list(limit=5)] == ascending[::-1]


def test_has_more_is_exact_and_a_deleted_cursor_works(url: str, client: openai.OpenAI) -> None:
    for _ in range(4):
        upload(client, LINE)
    first = httpx.get(f"{url}/v1/files?limit=2").json()
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][1]["id"])
    client.files.delete(first["last_id"])
    last = httpx.get(f"{url}/v1/files?limit=2&after={first['last_id']}").json()
    assert (len(last["data"]), last["has_more"]) == (2, False)
    empty = httpx.get(f"{url}/v1/files?after={last['last_id']}").json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "integer_below_min_value"),
        ("limit=-1", "limit", "integer_below_min_value"),
        ("limit=10001", "limit", "integer_above_max_value"),
        ("limit=x", "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("purpose=bacth", "purpose", "invalid_value"),
        ("after=file-x", "after", None),
    ],
)
def test_a_list_asked_for_wrongly_is_a_400(url: str, query: str, param: str, code: str | None) -> None:
    reply = httpx.get(f"{url}/v1/files?{query}")
    assert reply.status_code == 400
    assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (param, code)


def test_a_name_with_a_path_keeps_its_last_part(client: openai.OpenAI, tmp_path: Path) -> None:
    file = upload(client, LINE, "../../etc/passwd.jsonl")
    assert file.filename == "passwd.jsonl"
    assert (tmp_path / "files" / file.id).read_bytes() == LINE


def test_a_range_of_a_file(url: str, client: openai.OpenAI) -> None:
    file = upload(client, LINE)
    part = httpx.get(f"{url}/v1/files/{file.id}/content", headers={"range": "bytes=2-10"})
    assert (part.status_code, part.content) == (206, LINE[2:11])


def test_two_hosts_must_see_the_same_folder(redis_url: str, tmp_path: Path) -> None:
    async def open_store(folder: str) -> None:
        redis = connect_async(redis_url)
        try:
            await FileStore.open(str(tmp_path / folder), redis)
        finally:
            await redis.aclose()

    asyncio.run(open_store("a"))
    asyncio.run(open_store("a"))
    with pytest.raises(ConfigError, match="mount the folder"):
        asyncio.run(open_store("b"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-dir"):
        asyncio.run(open_store("file"))


def test_a_redis_that_cannot_be_waited_for_is_refused(redis_url: str, tmp_path: Path) -> None:
    async def open_store(durability: Durability) -> None:
        redis = connect_async(redis_url)
        try:
            store = await FileStore.open(str(tmp_path), redis, durability=durability)
            await store.flush.wait()
        finally:
            await redis.aclose()

    with redis.Redis.from_url(redis_url) as server:
        asyncio.run(open_store("strict"))
        server.config_set("appendonly", "no")
        try:
            with pytest.raises(ConfigError, match="--durability relaxed"):
                asyncio.run(open_store("strict"))
            asyncio.run(open_store("relaxed"))
        finally:
            server.config_set("appendonly", "yes")


def test_a_file_is_not_called_safe_by_a_primary_that_has_no_append_only_file(redis_url: str, tmp_path: Path) -> None:
    """One that was promoted may be set up in another way than the one before."""

    async def go(server: Any) -> None:
        async with connect_async(redis_url) as client:
            store = await FileStore.open(str(tmp_path), client, durability="strict")
            server.config_set("appendonly", "no")
            with pytest.raises(StoreUnavailable, match="cannot flush"):
                await store.flush.wait()

    with redis.Redis.from_url(redis_url) as server:
        try:
            asyncio.run(go(server))
        finally:
            server.config_set("appendonly", "yes")


def test_leftovers_of_a_killed_process_are_removed_after_a_day(redis_url: str, tmp_path: Path) -> None:
    async def sweep() -> None:
        redis = connect_async(redis_url)
        store = await FileStore.open(str(tmp_path), redis)
        for name, age_s in (("old", 2 * 86400), ("new", 60)):
            path = tmp_path / "incoming" / name
            path.touch()
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        store.remove_leftovers()
        await redis.aclose()

    asyncio.run(sweep())
    assert [path.name for path in (tmp_path / "incoming").iterdir()] == ["new"]


def test_upload_from_a_file_object(client: openai.OpenAI) -> None:
    source = io.BytesIO(LINE)
    source.name = "in.jsonl"
    assert client.files.create(file=source, purpose="batch").filename == "in.jsonl"
