"""`headrace api`: one replica of the HTTP front end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn

from ..shared.clients import AsyncClient, connect_async
from ..shared.errors import ConfigError, StoreUnavailable
from ..shared.registry import Membership, ProcessInfo
from ..shared.store import Store, open_store
from .app import create_app
from .batches.stores import open_stores
from .errors import STORE_ERRORS
from .services import Services, load_template, open_services
from .settings import ApiSettings

log = logging.getLogger(__name__)

BACKLOG = 2048


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
        ConfigError: a setting is wrong, or the port is taken.
        StoreUnavailable: Redis does not answer.
    """
    load_template(settings.chat_template)
    store = open_store(settings)
    with _listen(settings) as listener:
        config = uvicorn.Config(
            create_app(settings, lambda: _member_services(settings, store), lambda: open_stores(settings)),
            log_config=None,
            access_log=False,
            lifespan="on",
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            server_header=False,
        )
        server = Server(config)
        host, port = listener.getsockname()[:2]
        log.info("listening on http://%s:%d", host, port)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    return 0 if server.started else 1


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
async def _member_services(settings: ApiSettings, store: Store) -> AsyncIterator[Services]:
    """The services of a replica that is listed among the deployment's processes."""
    info = ProcessInfo("api", extra={"name": settings.name} if settings.name else {})
    name = f"api-{info.host}-{info.pid}-{uuid.uuid4().hex[:8]}"
    client = connect_async(settings.redis_url, "headrace-api-member", connections=2)
    membership = Membership(info)
    async with open_services(settings, store, name) as services:
        membership.update("ready")
        beats = asyncio.create_task(_beat(membership, client))
        try:
            yield services
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
            await _leave(membership, client)
    await client.aclose()


async def _beat(membership: Membership, client: AsyncClient) -> None:
    while True:
        try:
            await membership.beat_async(client)
        except STORE_ERRORS as e:
            log.warning("this replica's heartbeat was not written: %s", e)
        await asyncio.sleep(Membership.BEAT_EVERY_S)


async def _leave(membership: Membership, client: AsyncClient) -> None:
    try:
        await membership.leave_async(client)
    except (StoreUnavailable, *STORE_ERRORS) as e:
        log.info("this replica is listed until its heartbeat runs out: %s", e)
