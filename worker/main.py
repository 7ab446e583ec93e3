"""Starts one worker: checks Redis, loads the model, registers it, works."""

from __future__ import annotations

import logging
import uuid

from ..shared import logs
from ..shared.clients import connect
from ..shared.control import Inbox
from ..shared.failpoints import failpoint
from ..shared.job_queue import JobQueue
from ..shared.model_card import ModelCard
from ..shared.registry import Membership, ProcessInfo, ServedModels, take_slot
from ..shared.scripts import Scripts
from ..shared.signals import StopSignal
from ..shared.store import open_store
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
    member.beat(client, LOADING_TTL_MS)
    failpoint("worker.listed")
    try:
        engine = _load_engine(settings, card, tokenizer)
    except BaseException:
        member.leave(client)
        raise
    models = ServedModels(client, member, tokenizer)
    member.update(pool=engine.card.pool)
    adapters = PoolAdapters(engine, models)
    control = Controller(engine, Inbox(client, engine.card.pool, member.info.id), member.info.id, models, adapters)
    try:
        control.join()
        adapters.load(settings.adapters())
    except BaseException:
        member.leave(client)
        raise
    models.serve(engine.card)
    failpoint("worker.registered")

    owner, slot = uuid.uuid4().hex, take_slot(client, member)
    consumer = f"{member.info.host}:{slot}"
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
        consumer=consumer,
        shards=store.shards,
        lease_s=settings.lease_s,
        drain_s=settings.drain_s,
        stream_interval=settings.stream_interval,
        stop=stop,
    )
    log.info("serving %s over %s as %s", engine.card.name, store.server, consumer)
    worker.run()
    engine.close()
    return 0


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
