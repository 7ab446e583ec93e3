"""Starts one worker: checks Redis, loads the model, registers it, works."""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress

from ..shared import logs
from ..shared.clients import TRANSIENT, Client, connect, starting
from ..shared.control import Inbox
from ..shared.failpoints import failpoint
from ..shared.health import Health
from ..shared.job_queue import JobQueue
from ..shared.model_card import ModelCard
from ..shared.registry import Membership, ProcessInfo, ServedModels, take_slot
from ..shared.scripts import Scripts
from ..shared.signals import StopSignal
from ..shared.store import Store, open_store
from ..shared.token_stream import TokenStream
from .adapters import PoolAdapters
from .card import load_card
from .control import Controller
from .interface import Engine
from .loop import Worker
from .pace import calm_threads
from .settings import WorkerSettings

log = logging.getLogger(__name__)

LOADING_TTL_MS = 600_000  # a model may take so long to load before the process counts as gone


def run(settings: WorkerSettings) -> int:
    """Run until SIGTERM; the exit status is 0 after a drain.

    Raises:
        ConfigError: a setting, the model or Redis is not as it must be; nothing was registered.
    """
    logs.setup("worker", settings.log_level, settings.log_json)
    stop = StopSignal()
    store = open_store(settings)
    card, tokenizer = load_card(settings)
    client = connect(settings.redis_url, "worker")
    member = Membership(ProcessInfo("worker", model=card.name))
    with Health(member, lambda: connect(settings.redis_url, "worker-health")) as health:
        health.serve(settings.health_host, settings.health_port)
        with starting():
            member.beat(client, LOADING_TTL_MS)
            failpoint("worker.listed")
            try:
                engine = _load_engine(settings, card, tokenizer)
                worker = _join(settings, store, client, member, engine, tokenizer, stop)
            except BaseException:
                with suppress(*TRANSIENT):  # what went wrong before is what is told
                    member.leave(client)
                raise
        health.watch(worker.progress)
        log.info("serving %s over %s as %s (%s)", engine.card.name, store.server, worker.consumer, worker.owner)
        worker.run()
        engine.close()
    return 0


def _join(
    settings: WorkerSettings,
    store: Store,
    client: Client,
    member: Membership,
    engine: Engine,
    tokenizer: bytes,
    stop: StopSignal,
) -> Worker:
    """Do as the pool does, register the model, and take a place among its workers."""
    models = ServedModels(client, member, tokenizer)
    member.update(pool=engine.card.pool)
    adapters = PoolAdapters(engine, models)
    control = Controller(engine, Inbox(client, engine.card.pool, member.info.id), member.info.id, models, adapters)
    control.join()
    adapters.load(settings.adapters())
    models.serve(engine.card)
    failpoint("worker.registered")

    owner, slot = uuid.uuid4().hex, take_slot(client, member)
    scripts, flushes = (Scripts(client, on_outage=lambda error: worker.note_outage(error)) for _ in range(2))
    queue = JobQueue(client, scripts, store.shards)
    queue.reap_consumers(engine.card.pool)
    failpoint("worker.slot")
    worker = Worker(
        engine,
        queue,
        TokenStream(client, flushes, owner, settings.lease_s),
        client,
        member,
        control,
        adapters,
        owner=owner,
        consumer=f"{member.info.host}:{slot}",
        shards=store.shards,
        lease_s=settings.lease_s,
        drain_s=settings.drain_s,
        stream_interval=settings.stream_interval,
        stop=stop,
    )
    return worker


def _load_engine(settings: WorkerSettings, card: ModelCard, tokenizer: bytes) -> Engine:
    # Imported here: a scripted worker runs where torch is not installed.
    if settings.scripted:
        from .scripted import ScriptedEngine

        return ScriptedEngine(settings, card, tokenizer)
    calm_threads()
    if card.task != "generate":
        from .engine.encoder import EncoderEngine

        return EncoderEngine(settings)
    from .engine.engine import TransformersEngine

    return TransformersEngine(settings)
