"""Overload: what is refused and when to come again, who is served when not all can be, and how the queue is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from headrace.shared import keys, overview
from headrace.shared.async_job_queue import LONGEST_WAIT_S, UNMEASURED_S, AsyncJobQueue, retry_after_s
from headrace.shared.chunks import Finish, TokenChunk
from headrace.shared.clients import Client, connect, connect_async
from headrace.shared.errors import InvalidRequest, Overloaded
from headrace.shared.ids import family_from
from headrace.shared.job_queue import JobQueue
from headrace.shared.messages import SamplingParams
from headrace.shared.scripts import Scripts
from headrace.shared.token_stream import Append, TokenStream, Written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.deployment import Deployment
from kit.queues import SHARDS, a_job, submit


class Rig:
    """A queue and one worker's hands."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Client = connect(url)
        scripts = Scripts(self.client, limit_s=5.0)
        self.queue = JobQueue(self.client, scripts, SHARDS)
        self.tokens = TokenStream(self.client, scripts, "w", 60.0)
        self._made = 0

    def submit(self, **job: object) -> str:
        """One more, in shard 0: order and bounds are a shard's."""
        self._made += 1
        return submit(self.url, rid=family_from(str(self._made), 1), **job)[0]  # type: ignore[arg-type]

    def serve(self, tokens: int = 1) -> tuple[str, int]:
        """Hand the next one over and end it after so many tokens; its tenant, and the tokens it took in all."""
        (claim,) = self.queue.pull("m", owner="w", consumer="host:0", slots=1, lease_s=60)
        job = claim.job
        count = min(tokens, job.sampling.max_new_tokens or 0)
        end = TokenChunk(job.rid, 0, tuple(range(count)), finish=Finish("stop"))
        self.tokens.append([Append(claim.epoch, end)])
        return job.tenant, len(job.input_ids) + count

    def overview(self) -> overview.Overview:
        return overview.read(self.client, SHARDS, ["m"])


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.client.close()


requests = st.tuples(st.integers(1, 300), st.integers(1, 700), st.integers(1, 700))  # prompt, max_tokens, what it takes


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tenants=st.lists(st.lists(requests, min_size=8, max_size=8), min_size=2, max_size=4))
def test_tenants_that_wait_get_equal_tokens_whatever_their_requests(
    rig: Rig, tenants: list[list[tuple[int, int, int]]]
) -> None:
    """While both wait, what two tenants have had differs by no more than one request of each."""
    rig.client.flushall()
    taken, largest = {}, 0
    for name, asked in enumerate(tenants):
        for prompt, longest, actual in asked:
            sampling = SamplingParams(max_new_tokens=longest, sampling_seed=1)
            rid = rig.submit(tenant=f"t{name}", input_ids=tuple(range(prompt)), sampling=sampling)
            taken[rid] = actual
            largest = max(largest, prompt + longest)
    waiting = {f"t{name}": len(asked) for name, asked in enumerate(tenants)}
    served = dict.fromkeys(waiting, 0)
    order = {f"t{name}": iter(actual for _, _, actual in asked) for name, asked in enumerate(tenants)}
    while all(waiting.values()):
        (first,) = rig.client.zrange(keys.tenants(0, "m", "std"), 0, 0)
        tenant, tokens = rig.serve(next(order[first.decode()]))
        assert tenant == first.decode()
        served[tenant] += tokens
        waiting[tenant] -= 1
        assert max(served.values()) - min(served.values()) <= 2 * largest


def test_a_takeover_is_not_charged_to_the_tenant(rig: Rig) -> None:
    for _ in range(2):
        rig.submit()
    for _ in range(3):
        (claim,) = rig.queue.pull("m", owner="w", consumer="host:0", slots=1, lease_s=60)
        assert rig.client.zscore(keys.tenants(0, "m", "std"), claim.job.tenant) == 28  # 20 of prompt, 8 expected
        rig.queue.release("w", [(claim.job.rid, claim.epoch)])


def test_when_to_come_again_follows_from_the_rate_at_which_workers_take() -> None:
    assert retry_after_s(1, 1000, 10.0) == 10  # a tenth of them is gone by then
    assert retry_after_s(1, 1000, 50.0) == 2
    assert retry_after_s(8, 8, 0.5) == 16  # room for all choices
    assert retry_after_s(1, 10, 1000.0) == 1
    assert retry_after_s(1, 10_000, 0.001) == LONGEST_WAIT_S
    assert retry_after_s(1, 10_000, 0.0) == UNMEASURED_S


def test_a_full_lane_says_when_to_come_again(rig: Rig) -> None:
    for _ in range(64):
        rig.submit()
    with pytest.raises(Overloaded) as unmeasured:
        rig.submit()
    assert unmeasured.value.retry_after_s == UNMEASURED_S
    for _ in range(30):
        rig.serve()
        rig.submit()
    rate = rig.overview().lanes["m", "std"].taken_per_s
    assert 0 < rate <= 1.0  # thirty in the last thirty seconds
    with pytest.raises(Overloaded) as measured:
        rig.submit()
    assert measured.value.retry_after_s in {retry_after_s(1, 64, rate), retry_after_s(1, 64, rate) + 1}


def test_a_full_tenant_shares_the_lanes_rate(rig: Rig) -> None:
    depth = keys.depth(0, "m")
    now_ms = 1000 * rig.client.time()[0]
    rig.client.hset(depth, mapping={"taken:std": "4", "taken_at:std": now_ms + 500})
    for tenant in ("a", "b"):
        for _ in range(32):
            rig.submit(tenant=tenant)
    with pytest.raises(Overloaded) as full:
        rig.submit(tenant="a")
    lane = full.value.retry_after_s
    assert lane == retry_after_s(1, 64, 4.0)


def test_choices_that_can_never_wait_together_are_the_clients_mistake(redis_url: str) -> None:
    with pytest.raises(InvalidRequest, match="may wait at once"):
        submit(redis_url, n=65)


def test_the_overview_counts_what_waits_runs_and_was_lost(rig: Rig) -> None:
    empty = rig.overview()
    assert (empty.unfinished, empty.dead_letters, empty.shards_leased) == (0, 0, 0)
    assert empty.lanes["m", "std"].oldest_s is None
    for tenant in ("a", "b", "b"):
        rig.submit(tenant=tenant)
    (claim,) = rig.queue.pull("m", owner="w", consumer="host:0", slots=1, lease_s=60)
    rig.client.hincrby(keys.request(0, family_from("2", 1) + ".0"), "at", -5000)
    rig.client.hset(keys.request(0, claim.job.rid), "lu", 1)
    rig.client.zadd(keys.active(0), {claim.job.rid: 1})
    seen = rig.overview()
    lane = seen.lanes["m", "std"]
    assert (lane.waiting, lane.running, seen.unfinished) == (2, 1, 3)
    assert lane.oldest_s is not None
    assert 5 <= lane.oldest_s < 60
    assert seen.overdue_s > 1e6
    rig.queue.sweep(0, reclaim=True, text_budget=1 << 20)
    rig.queue.pull("m", owner="w", consumer="host:0", slots=3, lease_s=60)
    seen = rig.overview()
    assert seen.lanes["m", "std"].running == 3
    assert (seen.counters["submitted"], seen.counters["retries"], seen.counters["takeovers"]) == (3, 1, 1)


def test_a_deadline_ends_what_waits_and_what_runs(rig: Rig) -> None:
    waiting, running = rig.submit(deadline_s=50), rig.submit(deadline_s=50, lane="rt")
    (claim,) = rig.queue.pull("m", owner="w", consumer="host:0", slots=1, lease_s=60)
    assert claim.job.rid == running
    rig.tokens.append([Append(claim.epoch, TokenChunk(running, 0, (7,)))])
    for rid in (waiting, running):
        rig.client.hset(keys.request(0, rid), "dl", 1)
        rig.client.zadd(keys.active(0), {rid: 1})
    rig.queue.sweep(0, reclaim=True, text_budget=1 << 20)
    more = Append(claim.epoch, TokenChunk(running, 1, (8,)))
    assert rig.tokens.append([more])[running] is Written.CANCELLED
    for rid, tokens in ((waiting, 0), (running, 2)):
        *_, end = rig.tokens.read({rid: 0})[rid]
        assert end.finish is not None
        assert (end.finish.type, end.finish.status, end.start) == ("error", 504, tokens)
    assert rig.overview().counters["expired"] == 2


def test_memory_closes_the_door_at_four_fifths(rig: Rig) -> None:
    used = int(rig.client.info("memory")["used_memory"])

    async def submit_with(memory: int) -> None:
        client = connect_async(rig.url)
        try:
            queue = AsyncJobQueue(client, SHARDS, memory=memory)
            await queue.submit(a_job(), deadline_s=60, reader_lease_s=None, keep_s=30)
        finally:
            await client.aclose()

    asyncio.run(submit_with(2 * used))
    with pytest.raises(Overloaded) as refused:
        asyncio.run(submit_with(used))
    assert refused.value.code == "memory_full"
    assert 1 <= refused.value.retry_after_s <= LONGEST_WAIT_S


def test_a_client_is_told_when_to_come_again_and_other_tenants_are_served(redis_url: str, tmp_path: Path) -> None:
    """One worker that runs one request at a time, and a queue with room for a few of each tenant."""
    with Deployment(redis_url, tmp_path, [{"tokens": 8, "tokens_per_s": 40}]) as deployment:
        deployment.start("worker", "--max-running", "1")
        deployment.start("detok")
        keys_of = ("--api-key", "greedy:a", "--api-key", "modest:b")
        deployment.start("api", *keys_of, "--max-waiting", "64", "--max-waiting-tenant", "16")
        deployment.ready()

        async def ask(http: httpx.AsyncClient, key: str) -> httpx.Response:
            body = {"model": "m", "prompt": "x", "max_tokens": 8}
            return await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

        async def go() -> tuple[list[httpx.Response], list[httpx.Response]]:
            async with httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as http:
                greedy = [asyncio.create_task(ask(http, "a")) for _ in range(96)]
                while not any(t.done() and t.result().status_code == 429 for t in greedy):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.05)
                modest = [await ask(http, "b") for _ in range(3)]
                return await asyncio.gather(*greedy), modest

        greedy, modest = asyncio.run(go())
        refused = [answer for answer in greedy if answer.status_code == 429]
        assert {answer.status_code for answer in greedy} == {200, 429}
        assert [answer.status_code for answer in modest] == [200] * 3
        assert all(1 <= int(answer.headers["Retry-After"]) <= LONGEST_WAIT_S for answer in refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
