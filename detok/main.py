"""Starts one detokenizer: checks Redis, loads the tokenizers of the registered models, works."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ..shared import logs
from ..shared.clients import Client, connect, starting
from ..shared.failpoints import failpoint
from ..shared.health import Health
from ..shared.job_queue import JobQueue
from ..shared.registry import Membership, ProcessInfo
from ..shared.scripts import Scripts
from ..shared.signals import StopSignal
from ..shared.store import Store, open_store
from ..shared.text_stream import TextStream
from ..shared.token_stream import TokenStream
from .loop import Detokenizer
from .settings import DetokSettings
from .shards import LOADING_S, Shards
from .streams import Streams
from .vocabularies import Vocabularies

log = logging.getLogger(__name__)


def run(settings: DetokSettings) -> int:
    """Run until SIGTERM; the exit status is 0.

    Raises:
        ConfigError: a setting or Redis is not as it must be; nothing was registered.
    """
    logs.setup("detok", settings.log_level, settings.log_json)
    stop = StopSignal()
    store = open_store(settings)
    client = connect(settings.redis_url, "detok")
    member = Membership(ProcessInfo("detok"))
    with Health(member, lambda: connect(settings.redis_url, "detok-health")) as health:
        health.serve(settings.health_host, settings.health_port)
        with starting():
            member.beat(client)
            failpoint("detok.listed")
            detokenizer, vocabularies = _join(settings, store, client, member, stop)
            health.watch(detokenizer.progress)
            vocabularies.prepare()
        log.info("decoding for %s, %d shards in all", store.server, store.shards)
        detokenizer.run()
    return 0


def _join(
    settings: DetokSettings, store: Store, client: Client, member: Membership, stop: StopSignal
) -> tuple[Detokenizer, Vocabularies]:
    @contextmanager
    def loading() -> Iterator[None]:
        """The loop may stand still while a tokenizer loads, and keeps its shards."""
        with detokenizer.progress.allow(LOADING_S), shards.held():
            yield

    owner = uuid.uuid4().hex
    scripts, flushes = (Scripts(client, on_outage=lambda error: detokenizer.note_outage(error)) for _ in range(2))
    shards = Shards(client, scripts, owner, member.info.id, store.shards, settings.shard_lease_s)
    vocabularies = Vocabularies(client, loading)
    streams = Streams(TokenStream(client, scripts), TextStream(client, flushes, owner), vocabularies.get)
    detokenizer = Detokenizer(
        shards,
        streams,
        vocabularies,
        JobQueue(client, scripts, store.shards),
        client,
        member,
        lease_s=settings.lease_s,
        text_budget=settings.text_budget // store.shards or store.text_budget,
        slice_requests=settings.slice_requests,
        stop=stop,
    )
    return detokenizer, vocabularies
