"""Batches driven over real stores by drivers that come, go and die: cases 19-28 of the contract."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.exceptions
from conftest import Server, a_server_binary
from headrace.api.batches.lease import BatchLease
from headrace.api.batches.model import Batch
from headrace.api.batches.results import LineResult, write_segment
from headrace.api.batches.settings import BatchSettings
from headrace.api.batches.slices import DRIVE, QUEUE, slice_queue
from headrace.api.batches.store import ENDED_KEPT_S, segments_key
from headrace.api.batches.stores import open_stores
from headrace.api.batches.window import LineRequest
from headrace.api.batches.worker import DriverThread, _SliceWorker
from headrace.shared.clients import connect
from headrace.shared.errors import Fenced, StoreUnavailable
from kit.batches import (
    EchoAnswerer,
    completed,
    counts,
    create,
    drive,
    drive_to_end,
    driver,
    eventually,
    line,
    lines,
    read,
    set_field,
)
from kit.files_app import files_app
from kit.loopback import serve
from redis.asyncio.client import Pipeline
from rq.exceptions import InvalidJobOperation
from rq.serializers import JSONSerializer


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


# -- to the end --------------------------------------------------------------------------------------------------------
def test_a_batch_from_create_to_its_output(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(10), metadata={"job": "nightly"})
    assert (made.status, made.object, counts(made), made.model) == ("validating", "batch", (0, 0, 0), None)
    assert made.expires_at - made.created_at == 86400
    assert made.metadata == {"job": "nightly"}
    assert client.batches.retrieve(made.id) == made
    answerer = EchoAnswerer()
    drive(settings, made.id, answerer)
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch), batch.model) == ("completed", (10, 10, 0), "m")
    assert made.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]
    assert (batch.error_file_id, batch.errors, batch.failed_at, batch.cancelled_at) == (None,) * 4
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (30, 20, 50)
    assert batch.usage.input_tokens_details.cached_tokens == 10
    output = read(client, batch.output_file_id)
    assert {k: v["response"]["body"]["content"] for k, v in output.items()} == {f"c{i}": f"say {i}" for i in range(10)}
    assert all(v["response"]["status_code"] == 200 and v["error"] is None for v in output.values())
    assert all(v["id"].startswith("batch_req_") and v["response"]["request_id"] for v in output.values())
    assert answerer.most_at_once <= settings.batch_window
    file = client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.expires_at) == ("batch_output", None)


def test_output_files_expire_when_asked(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(1), output_expires_after={"anchor": "created_at", "seconds": 7200})
    drive(settings, made.id)
    file = client.files.retrieve(client.batches.retrieve(made.id).output_file_id or "")
    assert file.expires_at == file.created_at + 7200


def test_good_and_failed_lines_go_to_their_files(client: openai.OpenAI, settings: BatchSettings) -> None:
    data = line("good", "fine") + line("no", "bad") + line("engine", "broken") + line("ours", "bug") + line("f", "full")
    batch = client.batches.retrieve(drive(settings, create(client, data).id).id)
    assert (batch.status, counts(batch)) == ("completed", (5, 2, 3))
    assert sorted(read(client, batch.output_file_id)) == ["f", "good"]
    errors = read(client, batch.error_file_id)
    assert {k: v["response"]["status_code"] for k, v in errors.items()} == {"no": 400, "engine": 500, "ours": 500}
    assert all(v["error"] is None for v in errors.values())
    assert errors["no"]["response"]["body"]["error"] == {
        "message": "no such thing",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }
    assert errors["ours"]["response"]["body"]["error"]["message"] == "The server failed to process this request."


def test_a_batch_of_failures_is_completed(client: openai.OpenAI, settings: BatchSettings) -> None:
    batch = client.batches.retrieve(drive(settings, create(client, line("a", "bad") + line("b", "bad")).id).id)
    assert (batch.status, counts(batch), batch.output_file_id) == ("completed", (2, 0, 2), None)
    assert sorted(read(client, batch.error_file_id)) == ["a", "b"]


def test_a_bad_file_fails_the_batch(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, b"{\n" + line("a") + b"}\n" + line("a"))
    answerer = EchoAnswerer()
    drive(settings, made.id, answerer)
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch)) == ("failed", (0, 0, 0))
    assert batch.failed_at
    assert (batch.in_progress_at, batch.output_file_id, batch.error_file_id) == (None,) * 3
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.object == "list"
    assert [(e.code, e.param, e.line) for e in batch.errors.data] == [
        ("invalid_json_line", None, 1),
        ("invalid_json_line", None, 3),
        ("duplicate_custom_id", "custom_id", 4),
    ]
    assert not answerer.submitted


# -- cancel, expire ----------------------------------------------------------------------------------------------------


def test_cancel_half_way(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(8, lambda i: "done" if i < 4 else "wait"))
    answerer = EchoAnswerer()

    async def run() -> None:
        async with driver(settings, answerer) as one:
            slice_ = asyncio.create_task(one.drive(made.id))
            await eventually(lambda: completed(client, made.id) == 4)
            cancelling = await asyncio.to_thread(client.batches.cancel, made.id)
            assert (cancelling.status, cancelling.output_file_id) == ("cancelling", None)
            await slice_

    asyncio.run(run())
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch)) == ("cancelled", (8, 4, 0))
    assert batch.cancelling_at <= batch.cancelled_at  # type: ignore[operator]
    assert sorted(read(client, batch.output_file_id)) == ["c0", "c1", "c2", "c3"]
    errors = read(client, batch.error_file_id)
    assert sorted(errors) == ["c4", "c5", "c6", "c7"]
    assert all((e["response"], e["error"]["code"]) == (None, "batch_cancelled") for e in errors.values())
    assert answerer.abandoned == {f"{made.id}/{n}/0" for n in (5, 6, 7, 8)}
    assert client.batches.cancel(made.id) == batch


def test_cancel_before_anybody_looked_at_it(client: openai.OpenAI, settings: BatchSettings) -> None:
    good, bad = create(client, lines(2)), create(client, b"{")
    for made in (good, bad):
        first = client.batches.cancel(made.id)
        assert first.status == "cancelling"
        assert client.batches.cancel(made.id) == first
        drive(settings, made.id)
    batch = client.batches.retrieve(good.id)
    assert (batch.status, counts(batch), batch.output_file_id) == ("cancelled", (2, 0, 0), None)
    assert sorted(read(client, batch.error_file_id)) == ["c0", "c1"]
    batch = client.batches.retrieve(bad.id)
    assert (batch.status, counts(batch), batch.error_file_id) == ("cancelled", (0, 0, 0), None)


def test_an_ended_batch_cannot_be_cancelled(client: openai.OpenAI, settings: BatchSettings) -> None:
    for data, status in ((lines(1), "completed"), (b"{", "failed")):
        made = create(client, data)
        drive(settings, made.id)
        with pytest.raises(openai.ConflictError) as e:
            client.batches.cancel(made.id)
        assert e.value.body == {
            "message": f"Cannot cancel a batch with status '{status}'.",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }


def test_a_batch_whose_time_is_over(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(10, lambda i: "done" if i < 1 else "wait"))
    answerer = EchoAnswerer()
    short = settings.model_copy(update={"batch_slice_s": 0.01})

    async def run() -> None:
        async with driver(short, answerer) as one:
            batch = await one.drive(made.id)
        assert batch is not None
        assert batch.counts.completed == 1
        set_field(settings, made.id, "expires_at", made.created_at - 1)
        await drive_to_end(settings, made.id, answerer)

    asyncio.run(run())
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch)) == ("expired", (10, 1, 0))
    assert batch.expired_at
    assert batch.finalizing_at
    assert batch.completed_at is None
    assert sorted(read(client, batch.output_file_id)) == ["c0"]
    errors = read(client, batch.error_file_id)
    assert len(errors) == 9
    assert {e["error"]["code"] for e in errors.values()} == {"batch_expired"}


def test_a_batch_that_nobody_drove_in_time(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(3))
    set_field(settings, made.id, "expires_at", made.created_at - 1)
    answerer = EchoAnswerer()
    drive(settings, made.id, answerer)
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch), batch.output_file_id) == ("expired", (3, 0, 0), None)
    assert len(read(client, batch.error_file_id)) == 3
    assert not answerer.submitted


def test_a_batch_that_was_done_in_time_is_completed_later(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(3))

    async def answer_all_and_vanish() -> None:
        folder = Path(settings.data_dir) / "batches" / made.id
        async with open_stores(settings) as stores:
            lease = await BatchLease.take(stores.batches, made.id, "one", 10)
            assert lease is not None
            await lease.start(3, "m")
            results = [LineResult(n + 1, f"c{n}", "r", 200, {}) for n in range(3)]
            await lease.commit(write_segment(folder, "000001-000000.seg", made.id, results))

    asyncio.run(answer_all_and_vanish())
    set_field(settings, made.id, "expires_at", made.created_at - 1)
    set_field(settings, made.id, "lease_until", 0)
    drive(settings, made.id)
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (3, 3, 0), None)


# -- drivers that die --------------------------------------------------------------------------------------------------


def test_the_input_may_be_deleted_while_the_batch_runs(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(5))
    client.files.delete(made.input_file_id)
    drive(settings, made.id)
    batch = client.batches.retrieve(made.id)
    assert len(read(client, batch.output_file_id)) == 5


def test_many_short_slices_answer_every_line_once(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(30))
    answerer = EchoAnswerer()
    short = settings.model_copy(update={"batch_slice_s": 0.0, "batch_window": 3})
    ended = asyncio.run(drive_to_end(short, made.id, answerer))
    assert ended.epoch >= 1
    batch = client.batches.retrieve(made.id)
    assert counts(batch) == (30, 30, 0)
    assert len(read(client, batch.output_file_id)) == 30
    assert len(answerer.submitted) == 30


def test_a_driver_that_vanishes_is_followed_by_another(client: openai.OpenAI, settings: BatchSettings) -> None:
    """The first driver stops between any two steps; what it had committed stays, the rest is answered again."""
    made = create(client, lines(12, lambda i: "done" if i < 6 else "wait"))

    async def run() -> None:
        first = EchoAnswerer()
        async with driver(settings, first) as one:
            slice_ = asyncio.create_task(one.drive(made.id))
            await eventually(lambda: completed(client, made.id) == 6)
            slice_.cancel()  # nothing is released
            with pytest.raises(asyncio.CancelledError):
                await slice_
        second = EchoAnswerer()
        second.gate.set()
        async with driver(settings, second) as two:
            assert await two.drive(made.id) is None, "the first one's lease"
            set_field(settings, made.id, "lease_until", 0)
            batch = await two.drive(made.id)
        assert batch is not None
        assert batch.status == "completed"
        assert batch.epoch == 2
        assert not {f"{made.id}/{n}/0" for n in range(1, 7)} & second.submitted.keys()

    asyncio.run(run())
    batch = client.batches.retrieve(made.id)
    assert counts(batch) == (12, 12, 0)
    assert len(read(client, batch.output_file_id)) == 12


def test_a_fenced_driver_changes_nothing(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(2))
    folder = Path(settings.data_dir) / "batches" / made.id

    async def run() -> None:
        async with open_stores(settings) as stores:
            old = await BatchLease.take(stores.batches, made.id, "old", 10)
            assert old is not None
            await old.start(2, "m")
            assert await BatchLease.take(stores.batches, made.id, "new", 10) is None
            set_field(settings, made.id, "lease_until", 0)
            new = await BatchLease.take(stores.batches, made.id, "new", 10)
            assert new is not None
            segment = write_segment(folder, "000001-000000.seg", made.id, [LineResult(1, "c0", "r", 200, {})])
            for attempt in (
                old.renew(), old.commit(segment), old.finalize("completed"), old.publish(None, None), old.release()
            ):  # fmt: skip
                with pytest.raises(Fenced):
                    await attempt
            assert await new.segments() == []
            assert (await new.commit(segment)).counts.completed == 1
            assert (await new.commit(segment)).counts.completed == 1, "a commit sent twice counts once"

    asyncio.run(run())
    assert client.batches.retrieve(made.id).status == "in_progress"


def test_a_segment_that_was_not_committed_is_ignored(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(3))
    folder = Path(settings.data_dir) / "batches" / made.id
    write_segment(folder, "000000-000000.seg", made.id, [LineResult(1, "c0", "r", 200, {"content": "torn"})])
    (folder / "000001-000000.seg").write_bytes(b'{"torn')
    drive(settings, made.id)
    output = read(client, client.batches.retrieve(made.id).output_file_id)
    assert output["c0"]["response"]["body"]["content"] == "say 0"
    assert len(output) == 3


def test_a_segment_that_the_disk_lost_is_answered_again(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(6, lambda i: "done" if i < 3 else "wait"))
    folder = Path(settings.data_dir) / "batches" / made.id
    answerer = EchoAnswerer()

    async def run() -> None:
        async with driver(settings.model_copy(update={"batch_slice_s": 0.01}), answerer) as one:
            batch = await one.drive(made.id)
        assert batch is not None
        assert batch.counts.completed == 3
        for path in folder.glob("*.seg"):
            path.write_bytes(path.read_bytes()[:-1])
        answerer.gate.set()
        await drive_to_end(settings, made.id, answerer)

    asyncio.run(run())
    batch = client.batches.retrieve(made.id)
    assert counts(batch) == (6, 6, 0)
    assert len(read(client, batch.output_file_id)) == 6


@pytest.mark.parametrize("slices", [0, 1], ids=["before it was read", "in its middle"])
def test_a_batch_whose_input_the_disk_lost_fails(client: openai.OpenAI, settings: BatchSettings, slices: int) -> None:
    made = create(client, lines(6, lambda i: "done" if i < 3 else "wait"))
    if slices:
        short = settings.model_copy(update={"batch_slice_s": 0.01})

        async def one_slice() -> None:
            async with driver(short, EchoAnswerer()) as running:
                await running.drive(made.id)

        asyncio.run(one_slice())
    (Path(settings.data_dir) / "batches" / made.id / "input.jsonl").unlink()
    drive(settings, made.id)
    batch = client.batches.retrieve(made.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["input_file_lost"]


def test_a_slice_ends_soon_after_it_is_asked_to(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(4, lambda i: "wait"))

    async def run() -> Batch | None:
        async with driver(settings, EchoAnswerer(), draining=lambda: True) as one:
            return await one.drive(made.id)

    batch = asyncio.run(run())
    assert batch is not None
    assert (batch.status, batch.lease_until) == ("in_progress", 0), "the next driver need not wait for the lease"


def test_a_batch_is_made_once_though_its_connection_breaks_while_it_is_made(
    client: openai.OpenAI, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py tells of a lost connection as of a key that has changed."""
    watch, broken = Pipeline.watch, list[int]()

    async def watch_and_break(pipe: Pipeline, *names: str) -> Any:
        done: Any = await watch(pipe, *names)
        if not broken:
            with connect(redis_url) as store:
                broken.append(store.client_kill_filter(_type="normal", skipme=True))
        return done

    monkeypatch.setattr(Pipeline, "watch", watch_and_break)
    twice = [create(client, lines(1), extra_headers={"idempotency-key": "k"}) for _ in range(2)]
    assert broken[0] > 0
    assert twice[0].id == twice[1].id


def test_two_drivers_of_one_batch_do_not_both_drive(client: openai.OpenAI, settings: BatchSettings) -> None:
    made = create(client, lines(20))
    answerer = EchoAnswerer()

    async def run() -> tuple[Batch | None, Batch | None]:
        async with driver(settings, answerer) as one, driver(settings, answerer) as two:
            return await asyncio.gather(one.drive(made.id), two.drive(made.id))

    results = asyncio.run(run())
    assert results.count(None) == 1
    assert max(answerer.submitted.values()) == 1


def test_unfinished_batches_are_found_by_the_sweep(client: openai.OpenAI, settings: BatchSettings) -> None:
    waiting, taken, ended = create(client, lines(1)), create(client, lines(1)), create(client, lines(1))
    drive(settings, ended.id)

    async def run() -> None:
        async with open_stores(settings) as stores:
            assert await BatchLease.take(stores.batches, taken.id, "me", 60) is not None
            assert await stores.batches.due() == [], "each was handed to RQ just now"
            for made in (waiting, taken, ended):
                await stores.batches.redis.zadd("hr:batch:active", {made.id: 1})
            assert [batch.id for batch in await stores.batches.due()] == [waiting.id]
            assert await stores.batches.due() == [], "taken over for a while"

    asyncio.run(run())


@pytest.mark.parametrize("during", [False, True])
def test_a_batch_that_the_store_has_lost_is_not_driven(
    client: openai.OpenAI, settings: BatchSettings, redis_url: str, during: bool
) -> None:
    made = create(client, lines(10))

    class Losing(EchoAnswerer):
        async def answer(self, request: LineRequest) -> tuple[str, dict[str, Any]]:
            lose()
            return await super().answer(request)

    def lose() -> None:
        with connect(redis_url) as store:
            store.delete(f"hr:batch:{made.id}")

    async def slice_of() -> Batch | None:
        async with driver(settings, Losing()) as driving:
            return await driving.drive(made.id)

    if not during:
        lose()
    assert asyncio.run(slice_of()) is None


def test_an_end_that_the_store_loses_is_made_again(
    client: openai.OpenAI, settings: BatchSettings, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica is promoted that has not heard of the end: all that the files are made of must still be there."""
    made = create(client, lines(10))
    publish, names, kept = BatchLease.publish, (f"hr:batch:{made.id}", segments_key(made.id)), dict[str, Any]()

    async def publish_after_a_look(lease: BatchLease, *args: Any) -> Batch:
        with connect(redis_url) as store:
            kept.update({name: store.dump(name) for name in names})
        return await publish(lease, *args)

    monkeypatch.setattr(BatchLease, "publish", publish_after_a_look)
    drive(settings, made.id)
    first = client.batches.retrieve(made.id)
    with connect(redis_url) as store:
        for name, value in kept.items():
            store.restore(name, 0, value, replace=True)
    set_field(settings, made.id, "lease_until", 0)
    assert client.batches.retrieve(made.id).status == "finalizing"
    drive(settings, made.id)
    again = client.batches.retrieve(made.id)
    assert (again.status, counts(again)) == ("completed", (10, 10, 0))
    assert read(client, again.output_file_id) == read(client, first.output_file_id)


@pytest.mark.parametrize("lost", [("commit",), ("finalize",), ("commit", "finalize")])
def test_results_that_the_store_loses_are_made_again(
    client: openai.OpenAI, settings: BatchSettings, redis_url: str, monkeypatch: pytest.MonkeyPatch, lost: tuple[str]
) -> None:
    """Changes of the batch are answered, and gone with the store's tail: the batch must not end without its lines."""
    made = create(client, lines(10))
    names, kept = (f"hr:batch:{made.id}", segments_key(made.id)), dict[str, bytes | None]()

    def losing(name: str) -> Callable[..., Awaitable[Batch]]:
        change = getattr(BatchLease, name)

        async def change_and_lose(lease: BatchLease, *args: Any) -> Batch:
            with connect(redis_url) as store:
                if name == lost[0]:
                    kept.update({key: store.dump(key) for key in names})
                batch: Batch = await change(lease, *args)
                if name == lost[-1]:
                    monkeypatch.undo()
                    store.delete(*names)
                    for key, value in kept.items():
                        if value is not None:
                            store.restore(key, 0, value)
            return batch

        return change_and_lose

    for name in lost:
        monkeypatch.setattr(BatchLease, name, losing(name))
    drive(settings, made.id)
    batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch)) == ("completed", (10, 10, 0))
    assert len(read(client, batch.output_file_id)) == 10


GONE = redis.exceptions.ConnectionError("gone")


@pytest.mark.parametrize("error", [GONE, redis.exceptions.OutOfMemoryError("full"), StoreUnavailable("?")])
def test_a_slice_that_an_outage_cuts_short_is_over(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Raised, it would be kept by RQ as a failed job, and its whole traceback be logged, each time."""

    async def drive_slice(batch_id: str) -> Batch | None:
        raise error

    thread = DriverThread("d", None, drive_slice, 30)
    thread.drive("batch_1")
    assert (thread.driving, thread.slices) == (False, 1)
    (record,) = caplog.records
    assert "batch_1 is left to the sweep" in record.getMessage()
    assert record.exc_info is None


@pytest.mark.parametrize("error", [GONE, InvalidJobOperation("lost"), KeyError("a mistake")])
def test_what_rq_cannot_write_down_is_a_line_and_a_mistake_is_a_traceback(
    redis_url: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(redis_url) as connection:
        worker = _SliceWorker([QUEUE], connection=connection, serializer=JSONSerializer)
        job = slice_queue(connection).enqueue(DRIVE, "batch_1")
        worker.handle_exception(job, type(error), error, error.__traceback__)
        worker.log.error("quitting", exc_info=error)
    said = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    pages = ["\n" in record.getMessage() or record.exc_info is not None for record in said]
    assert pages == [isinstance(error, KeyError)] * 2
    assert all(str(error) in record.getMessage() or record.exc_info for record in said)


def test_a_driver_stops_though_its_redis_is_away() -> None:
    folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))
    server = Server(a_server_binary(), folder)
    server.start()

    async def nothing(batch_id: str) -> Batch | None:
        return None

    thread = DriverThread("d", connect(server.url), nothing, 30)
    thread.start()
    with connect(server.url) as store:
        while not store.scard("rq:workers"):
            time.sleep(0.02)
    server.kill()
    thread.join(3)  # it has noticed, and waits
    assert thread.is_alive()
    thread.stop()
    thread.join(60)
    assert not thread.is_alive()
    shutil.rmtree(folder)


def test_folders_of_ended_batches_are_removed(client: openai.OpenAI, settings: BatchSettings) -> None:
    ended, running = create(client, lines(1)), create(client, lines(1))
    drive(settings, ended.id)
    batches = Path(settings.data_dir) / "batches"
    (batches / "batch_being_created").mkdir()

    async def clean() -> None:
        async with open_stores(settings) as stores:
            await stores.batches.remove_leftovers()

    asyncio.run(clean())
    assert {path.name for path in batches.iterdir()} == {ended.id, running.id, "batch_being_created"}
    a_while_ago = time.time() - ENDED_KEPT_S - 1
    for path in batches.iterdir():
        os.utime(path, (a_while_ago, a_while_ago))
    asyncio.run(clean())
    assert {path.name for path in batches.iterdir()} == {running.id, "batch_being_created"}
