"""`headrace api`: one replica of the HTTP front end."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..shared import logs
from ..shared.clients import AsyncClient, connect_async
from ..shared.errors import ConfigError
from ..shared.failpoints import failpoint
from ..shared.registry import Membership, ProcessInfo
from ..shared.store import Store, check_control, open_store
from .app import create_app
from .batches.stores import open_stores
from .errors import STORE_ERRORS
from .metrics import Metrics
from .middleware import request_id
from .services import open_services
from .settings import ApiSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
WANTED_FILES = 65_536


class Server(uvicorn.Server):
    """uvicorn, told to stop by the first signal and to stop at once by the second."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in handled}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def run(settings: ApiSettings) -> int:
    """Serve until SIGTERM: then no new connections, and open requests may finish within the drain limit.

    Raises:
        ConfigError: a setting is wrong, the port is taken, the data folder cannot be used.
        StoreUnavailable: Redis does not answer.
    """
    _set_up_logs(settings)
    _allow_many_connections()
    store = open_store(settings)
    check_control(settings)
    with _listen(settings) as listener, asyncio.Runner(loop_factory=_config(settings).get_loop_factory()) as runner:
        runner.run(_serve(settings, store, listener))
    return 0


async def _serve(settings: ApiSettings, store: Store, listener: socket.socket) -> None:
    info = ProcessInfo("api", extra={"name": settings.name} if settings.name else {})
    channel = f"api-{info.host}-{info.pid}-{uuid.uuid4().hex[:8]}"
    async with open_services(settings, store, channel) as services, open_stores(settings) as stores:
        server = Server(_config(settings, create_app(settings, services, stores)))
        async with _listed(settings, info, services.metrics):
            log.info("listening on http://%s:%d", *listener.getsockname()[:2])
            await server.serve(sockets=[listener])
            log.info("no more requests; leaving")


def _config(settings: ApiSettings, app: FastAPI | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app or FastAPI(),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        server_header=False,
    )


def _set_up_logs(settings: ApiSettings) -> None:
    """Lines of a request carry its id; uvicorn says what went wrong, and no more."""
    logs.setup("api", settings.log_level, settings.log_json)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_name_request)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


def _allow_many_connections() -> None:
    """Every stream is an open file; the soft limit is often 1,024, and the hard one is there to be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED_FILES:
        return
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(settings: ApiSettings) -> socket.socket:
    """The listening socket: one that was handed over, or a new one."""
    if settings.fd >= 0:
        try:
            return socket.socket(fileno=settings.fd)
        except OSError as e:
            raise ConfigError(f"--fd (HEADRACE_FD): {settings.fd} is no open socket: {e.strerror}") from e
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as e:
        raise ConfigError(
            f"--host, --port: cannot listen on {settings.host}:{settings.port}: {e.strerror or e}; "
            "choose another with --port, or 0 for a free one"
        ) from e


@asynccontextmanager
async def _listed(settings: ApiSettings, info: ProcessInfo, metrics: Metrics) -> AsyncIterator[None]:
    """Be listed among the deployment's processes for the time of the block."""
    client, membership = connect_async(settings.redis_url, "api-member", connections=2), Membership(info)
    membership.update("ready")
    beats = asyncio.create_task(_beat(membership, client, metrics))
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        try:
            await membership.leave_async(client)
        except STORE_ERRORS as e:
            log.info("this replica is listed until its heartbeat runs out: %s", e)
        await client.aclose()


async def _beat(membership: Membership, client: AsyncClient, metrics: Metrics) -> None:
    while True:
        membership.update(stats=metrics.stats())
        try:
            failpoint("api.beat")
            await membership.beat_async(client)
        except STORE_ERRORS as e:
            log.warning("this replica's heartbeat was not written: %s", e)
        await asyncio.sleep(Membership.BEAT_EVERY_S)
