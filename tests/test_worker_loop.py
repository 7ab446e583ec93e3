"""The worker's loop against a real store, with an engine of a few lines: what it holds when Redis goes away."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import redis.exceptions
from conftest import Server
from headrace.shared import keys, scripts
from headrace.shared.chunks import Finish, TokenChunk
from headrace.shared.clients import Client, connect
from headrace.shared.control import Command, Inbox, Outcome
from headrace.shared.errors import ConfigError, InvalidRequest, NotFound, StoreUnavailable
from headrace.shared.failpoints import Failpoints
from headrace.shared.ids import shard_in
from headrace.shared.job_queue import JobQueue
from headrace.shared.messages import GenerateJob
from headrace.shared.model_card import ModelCard
from headrace.shared.registry import Membership, ProcessInfo, ServedModels
from headrace.shared.scripts import Scripts
from headrace.shared.signals import StopSignal
from headrace.shared.token_stream import Append, TokenStream
from headrace.worker import intake, loop
from headrace.worker.adapters import PoolAdapters
from headrace.worker.control import Controller
from headrace.worker.interface import Beside, StepOutput
from headrace.worker.loop import Worker
from kit.queues import SHARDS, submit

TURNS = 40  # of the loop without work, after which a test gives up


class Told(StopSignal):
    """A stop that a test sends."""

    def __init__(self) -> None:
        self.count = 0


class OneToken:
    """Ends each job with one token; `on_step` happens in between."""

    card = ModelCard("m", "m", "sha", 512, 100)

    def __init__(self, stop: Told, on_step: Callable[[], None] = lambda: None) -> None:
        self.jobs: dict[str, Sequence[int]] = {}
        self._stop, self._on_step, self._turns = stop, on_step, 0

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        self.jobs[job.rid] = produced

    def abort(self, rid: str) -> None:
        self.jobs.pop(rid, None)

    def step(self) -> list[StepOutput]:
        outputs = [StepOutput(rid, (7,), finish=Finish("length")) for rid in self.jobs]
        self.jobs.clear()
        self._on_step()
        self._stop.count += 1
        return outputs

    def has_work(self) -> bool:
        self._turns += 1
        if self._turns > TURNS:
            self._stop.count += 2
        return bool(self.jobs)

    def free_slots(self) -> int:
        return 8

    def running(self) -> Sequence[str]:
        return list(self.jobs)

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        raise InvalidRequest("it has no weights")

    def read_lora(self, name: str, folder: str) -> Callable[[], str]:
        raise InvalidRequest("it takes no adapter", param="lora_path")

    def drop_lora(self, name: str) -> None:
        raise NotFound("it takes no adapter", param="lora_name")

    def loras(self) -> Mapping[str, str]:
        return {}

    def stats(self) -> Mapping[str, float]:
        return {}

    def start_profile(self, steps: int) -> str:
        raise InvalidRequest("nothing to trace")

    def stop_profile(self) -> str:
        raise InvalidRequest("nothing to trace")

    def retract(self) -> None:
        pass

    def flush_cache(self) -> int:
        return 0

    def check_integrity(self) -> None:
        assert not self.jobs

    def close(self) -> None:
        self.jobs.clear()


class ForgetfulTokens(TokenStream):
    """Redis goes away for a moment just when a worker reads what another has published."""

    reads = 0

    def read_ids(self, rid: str, count: int) -> list[int]:
        self.reads += 1
        if self.reads == 1:
            raise redis.exceptions.ConnectionError("gone for a moment")
        return super().read_ids(rid, count)


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with connect(redis_url) as client:
        yield client


def worker_of(client: Client, engine: OneToken, stop: Told, tokens: type[TokenStream] = TokenStream) -> Worker:
    queue, flushes = (Scripts(client, on_outage=lambda error: worker.note_outage(error)) for _ in range(2))
    member = Membership(ProcessInfo("worker"))
    models = ServedModels(client, member, b"")
    adapters = PoolAdapters(engine, models)
    worker = Worker(
        engine,
        JobQueue(client, queue, SHARDS),
        tokens(client, flushes, "w2", 3.0),
        client,
        member,
        Controller(engine, Inbox(client, "m", member.info.id), member.info.id, models, adapters),
        adapters,
        owner="w2",
        consumer="host:0",
        shards=SHARDS,
        lease_s=3.0,
        drain_s=0.0,
        stream_interval=1,
        stop=stop,
    )
    return worker


def test_a_job_whose_tokens_could_not_be_read_is_handed_over_again(client: Client, redis_url: str) -> None:
    (rid,) = submit(redis_url)
    queue = JobQueue(client, Scripts(client), SHARDS)
    (claim,) = queue.pull("m", owner="w1", consumer="host:1", slots=1, lease_s=3.0)
    TokenStream(client, Scripts(client), "w1").append([Append(claim.epoch, TokenChunk(rid, 0, (5,)))])
    queue.release("w1", [(rid, claim.epoch)])
    stop = Told()
    worker_of(client, OneToken(stop), stop, ForgetfulTokens).run()
    assert client.hmget(keys.request(shard_in(rid), rid), "st", "n", "att") == [b"gd", b"2", b"0"]


def test_a_worker_told_to_stop_does_not_wait_for_redis(client: Client, redis_url: str, redis_server: Server) -> None:
    submit(redis_url)
    stop = Told()
    try:
        with pytest.raises(StoreUnavailable, match="told to stop"):
            worker_of(client, OneToken(stop, redis_server.kill), stop).run()
    finally:
        redis_server.start()


class OneEnds(OneToken):
    """Ends one of its jobs with its first step, all others with its third."""

    def step(self) -> list[StepOutput]:
        self._turns += 1
        if self._turns == 3:
            return super().step()
        outputs = [StepOutput(rid, (7,)) for rid in self.jobs]
        if self._turns == 1:
            outputs[0] = replace(outputs[0], finish=Finish("length"))
            del self.jobs[outputs[0].rid]
        return outputs

    def has_work(self) -> bool:
        return bool(self.jobs)


def test_an_end_that_was_lost_on_its_way_is_written_before_lost_jobs_are_given_back(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rids = submit(redis_url, n=2)
    monkeypatch.setattr(scripts, "script_point", Failpoints("append.send=fail@1").hit_scripts)
    monkeypatch.setattr(loop, "failpoint", Failpoints("worker.listen=fail@2").hit)
    stop = Told()
    worker_of(client, OneEnds(stop), stop).run()
    records = [client.hmget(keys.request(shard_in(rid), rid), "st", "n", "ep") for rid in rids]
    assert records == [[b"gd", b"1", b"1"], [b"gd", b"3", b"1"]], "one of them ran again"


class Steady(OneToken):
    """A token of each job a step, until `steps` are made."""

    def __init__(self, stop: Told, steps: int, on_step: Callable[[int], None]) -> None:
        super().__init__(stop)
        self.taken: list[tuple[int, str]] = []  # (steps made before, rid)
        self._steps, self._made, self._each = steps, 0, on_step

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        super().add(job, produced)
        self.taken.append((self._made, job.rid))

    def step(self) -> list[StepOutput]:
        self._made += 1
        self._each(self._made)
        if self._made < self._steps:
            return [StepOutput(rid, (7,)) for rid in self.jobs]
        return super().step()

    def has_work(self) -> bool:
        return bool(self.jobs)


def test_a_busy_worker_asks_nothing_and_hears_of_a_job(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "LOOK_EVERY_S", 3600.0)
    stop, asked, late = Told(), list[int](), list[str]()

    def on_step(made: int) -> None:
        if made in (10, 150):  # in between it is busy, and nobody comes
            asked.append(client.info("commandstats")["cmdstat_exists"]["calls"])
        if made == 150:
            late.extend(submit(redis_url))

    (first,) = submit(redis_url)
    engine = Steady(stop, 300, on_step)
    worker_of(client, engine, stop).run()
    assert asked[0] == asked[1], "a worker that nobody waits for looked into the queue"
    (_, taken_first), (at, taken_late) = engine.taken
    assert [taken_first, taken_late] == [first, *late]
    assert at < 300
    assert client.hget(keys.request(shard_in(late[0]), late[0]), "st") == b"gd"


class Updated(OneToken):
    """Serves the weights of any folder but one."""

    card = replace(OneToken.card, tokenizer=hashlib.sha256(b"").hexdigest())

    def read_weights(self, folder: str, beside: Beside) -> Callable[[str], None]:
        if folder == "/elsewhere":
            raise InvalidRequest("the worker sees no folder")

        def use(version: str) -> None:
            self.card = replace(self.card, weight_version=version)

        return use


def late_commit(client: Client, folder: str) -> tuple[Controller, Updated]:
    """A worker that came after the others had read what they are told to use now."""
    engine, member = Updated(Told()), Membership(ProcessInfo("worker"))
    models = ServedModels(client, member, b"")
    control = Controller(engine, Inbox(client, "m", "late"), "late", models, PoolAdapters(engine, models))
    control.join()
    args = {"token": "t", "limit_s": 30, "folder": folder, "read": "read_weights", "mode": "in_place", "version": "2"}
    client.xadd(keys.control("m"), {"c": Command("1", "commit", args).encode()})
    return control, engine


def obey_to_the_end(control: Controller) -> None:
    until = time.monotonic() + 30
    while control.standing_still and time.monotonic() < until:
        control.obey()


def test_a_worker_that_comes_while_others_read_weights_reads_them_too(client: Client) -> None:
    control, engine = late_commit(client, "/new")
    control.obey()
    assert control.standing_still
    obey_to_the_end(control)
    ((_, reply),) = client.xrange(keys.control_replies("1"))
    assert Outcome.decode(reply[b"o"]) == Outcome("late", detail={"weight_version": "2", "running": 0})
    assert engine.card.weight_version == "2"


def test_a_worker_without_the_weights_that_the_others_serve_ends(client: Client) -> None:
    control, engine = late_commit(client, "/elsewhere")
    control.obey()
    with pytest.raises(ConfigError, match=r"were told to serve /elsewhere as version '2'.*sees no folder"):
        obey_to_the_end(control)
    assert engine.card.weight_version == "default"


class Outage:
    """A client whose next `left` writes are cut off."""

    def __init__(self, client: Client, left: int) -> None:
        self._client = client
        self.left = left

    def __getattr__(self, name: str) -> Any:
        if name in ("pipeline", "eval", "hset") and self.left:
            self.left -= 1
            raise redis.exceptions.ConnectionError("cut off")
        return getattr(self._client, name)


@pytest.mark.parametrize("left", range(1, 6))
@pytest.mark.parametrize("kind", ["pause", "commit"])
def test_an_outage_while_a_worker_obeys_delays_its_answer_and_loses_nothing(
    client: Client, kind: Literal["pause", "commit"], left: int
) -> None:
    cut = Outage(client, 0)
    engine, member = Updated(Told()), Membership(ProcessInfo("worker"))
    models = ServedModels(cut, member, b"")
    control = Controller(engine, Inbox(cut, "m", "w"), "w", models, PoolAdapters(engine, models))
    control.join()
    weights = {"token": "t", "limit_s": 30, "folder": "/new", "read": "read_weights", "version": "2"}
    client.xadd(keys.control("m"), {"c": Command("1", kind, {"mode": "in_place", **weights}).encode()})
    cut.left = left
    for _ in range(200):
        with contextlib.suppress(redis.exceptions.ConnectionError):
            control.obey()
        control.look()
        time.sleep(0.002)
        if client.exists(keys.control_replies("1")):
            break
    assert cut.left == 0
    ((_, reply),) = client.xrange(keys.control_replies("1"))
    assert Outcome.decode(reply[b"o"]).ok
    noted = client.hgetall(keys.pool_state("m"))
    assert noted == ({b"paused": b"in_place"} if kind == "pause" else {b"weights": b"/new", b"weight_version": b"2"})
    assert control.standing_still == (kind == "pause")
    assert member.info.extra["paused" if kind == "pause" else "weight_version"] == (True if kind == "pause" else "2")
