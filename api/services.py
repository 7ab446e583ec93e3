"""What the api's routes work with, built from the settings. The batch driver builds the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..shared.async_job_queue import AsyncJobQueue
from ..shared.clients import AsyncClient, connect_async
from ..shared.control import ControlChannel
from ..shared.errors import ConfigError, InvalidRequest
from ..shared.registry import ModelRegistry, ProcessInfo, processes_async
from ..shared.store import Store
from ..shared.text_feed import TextFeed
from .backend import Backend
from .checks import Limits
from .control import PoolControl
from .generate import Inference
from .metrics import Metrics
from .observe import Observer
from .prepare import Preparer
from .readers import Readers
from .templates import ChatTemplate, ChatTemplates, ContentFormat
from .tokenize import Tokenizers
from .translate import Translator

if TYPE_CHECKING:
    from .settings import InferenceSettings


@dataclass(frozen=True, slots=True)
class Services:
    """All that a route may need."""

    backend: Backend
    inference: Inference
    readers: Readers
    tokenizers: Tokenizers
    metrics: Metrics
    control: PoolControl


class RegisteredProcesses:
    """`backend.Processes` over the registry."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def alive(self) -> list[ProcessInfo]:
        return await processes_async(self._client)


def build(settings: InferenceSettings, backend: Backend, override: str | None = None) -> Services:
    """The services over a backend. `override` is the source of a chat template to use for every model."""
    metrics = Metrics()
    forced: ContentFormat | None = None
    if settings.chat_template_content_format != "auto":
        forced = settings.chat_template_content_format
    templates = ChatTemplates(override, forced)
    tokenizers = Tokenizers(backend.models, settings.tokenizer_threads, settings.max_tokenizers)
    readers = Readers(backend.queue, backend.feed, settings.reader_lease_s)
    limits = Limits(
        settings.max_n,
        settings.max_stop,
        settings.max_stop_chars,
        settings.max_logprobs,
        max_texts=settings.max_texts,
    )
    translator = Translator(backend.models, templates, tokenizers, limits)
    inference = Inference(
        backend,
        Preparer(translator, tokenizers, backend.queue.shards),
        readers,
        Observer(metrics),
        keep_s=settings.keep_s,
        reader_lease_s=settings.reader_lease_s,
    )
    control = PoolControl(backend, wait_s=settings.control_wait_s, load_wait_s=settings.load_wait_s)
    return Services(backend, inference, readers, tokenizers, metrics, control)


@asynccontextmanager
async def open_services(settings: InferenceSettings, store: Store, name: str) -> AsyncIterator[Services]:
    """The services over the queue's Redis, which `open_store` has checked.

    Args:
        name: of this process, unique: text is pushed to it.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    override = load_template(settings.chat_template)
    client = connect_async(settings.redis_url, f"headrace-{name}")
    queue = AsyncJobQueue(
        client,
        store.shards,
        memory=store.memory,
        max_waiting=settings.max_waiting,
        max_waiting_tenant=settings.max_waiting_tenant,
    )
    try:
        async with TextFeed(client, store.shards, name) as feed:
            processes = RegisteredProcesses(client)
            control = ControlChannel(client, processes.alive)
            backend = Backend(queue, feed, ModelRegistry(client), processes, control)
            services = build(settings, backend, override)
            feed.on_pause = services.metrics.slow_readers.labels("paused").inc
            keeper = asyncio.create_task(services.readers.keep())
            try:
                yield services
            finally:
                await services.readers.settle()
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                services.tokenizers.close()
    finally:
        await client.aclose()


def load_template(path: str) -> str | None:
    """The source of `--chat-template`, compiled once to see that it can be.

    Raises:
        ConfigError: it cannot be read or is no template.
    """
    if not path:
        return None
    try:
        source = Path(path).expanduser().read_text()
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--chat-template (HEADRACE_CHAT_TEMPLATE): cannot read {path!r}: {e}") from e
    except InvalidRequest as e:
        raise ConfigError(f"--chat-template (HEADRACE_CHAT_TEMPLATE): {path!r}: {e.message}") from e
    return source
