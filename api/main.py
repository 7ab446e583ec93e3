"""`headrace api`: one replica of the HTTP front end."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import uuid

import uvicorn
from fastapi import FastAPI

from ..shared import logs
from ..shared.errors import ConfigError
from ..shared.registry import ProcessInfo
from ..shared.store import Store, check_control, open_store
from .app import create_app
from .batches.stores import open_stores
from .member import listed
from .server import Protocol, Server
from .services import open_services
from .settings import ApiSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
WANTED_FILES = 65_536
KEEP_ALIVE_S = 75  # longer than load balancers keep theirs (60 s is usual): who closes first may meet a request


def run(settings: ApiSettings) -> int:
    """Serve until SIGTERM: then no new connections, and open requests may finish within the drain limit.

    Raises:
        ConfigError: a setting is wrong, the port is taken, the data folder cannot be used.
        StoreUnavailable: Redis does not answer.
    """
    logs.setup("api", settings.log_level, settings.log_json)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what went wrong, and no more
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
        app = create_app(settings, services, stores, draining=lambda: server.should_exit)
        async with listed(settings, info, services.metrics) as membership:

            def on_drain() -> None:
                membership.update("draining")
                services.readers.drain()

            server = Server(_config(settings, app), on_drain=on_drain, delay_s=settings.drain_delay_s)
            log.info("listening on http://%s:%d", *listener.getsockname()[:2])
            await server.serve(sockets=[listener])
            log.info("no more requests; leaving")


def _config(settings: ApiSettings, app: FastAPI | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app or FastAPI(),
        log_config=None,
        access_log=False,
        http=Protocol,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        server_header=False,
    )


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
