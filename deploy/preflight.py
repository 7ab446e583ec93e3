"""What `serve` makes sure of before it starts anything, so that nothing is half-started."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from ..shared.errors import ConfigError
from .data_folder import DataFolder
from .embedded import EmbeddedServer, find_server
from .models import resolve
from .settings import ServedModel, ServeSettings

SHARE_OF_MEMORY = 4  # the embedded server may use one part in four of the machine's memory
SMALLEST_MEMORY = 256 << 20  # bytes


def bind(host: str, port: int) -> socket.socket:
    """The port, bound and not yet listening: ours from now on, and refused to clients until an api listens on it.

    The apis inherit it, so several share one port, and requests wait in its queue while one is started again.

    Raises:
        ConfigError: the address is in use, forbidden or no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as e:
        raise ConfigError(f"--host (HEADRACE_HOST): {host!r} is no address of this machine ({e.strerror})") from e
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            reason = "is in use by another program; stop that one, give another --port, or 0 for a free one"
        else:
            reason = f"cannot be listened on ({os.strerror(e.errno or 0)})"
        raise ConfigError(f"--port (HEADRACE_PORT): {host}:{port} {reason}") from e
    return listener


def url_of(host: str, port: int) -> str:
    """The URL at which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def locate(models: tuple[ServedModel, ...], settings: ServeSettings) -> tuple[ServedModel, ...]:
    """The models with their folders, fetched where they are known by name.

    Raises:
        ConfigError: a folder or the scripted file is missing.
    """
    if settings.scripted and not Path(settings.scripted).is_file():
        raise ConfigError(f"--scripted (HEADRACE_SCRIPTED): there is no file {settings.scripted}")
    needs = "tokenizer.json" if settings.scripted else "config.json"
    return tuple(ServedModel(model.name, str(resolve(model.place, needs=needs))) for model in models)


def embedded_server(settings: ServeSettings, folder: DataFolder) -> EmbeddedServer:
    """The embedded server as the settings want it; not yet started.

    Raises:
        ConfigError: there is no binary, or it would listen to other machines without a password.
    """
    find_server()
    open_to_others = settings.redis_port and settings.redis_host not in ("127.0.0.1", "::1", "localhost")
    if open_to_others and not settings.redis_password:
        raise ConfigError(
            f"--redis-host (HEADRACE_REDIS_HOST): {settings.redis_host} opens the queue to other machines; "
            "set HEADRACE_REDIS_PASSWORD, too"
        )
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return EmbeddedServer(
        folder,
        maxmemory=settings.redis_memory or max(SMALLEST_MEMORY, machine // SHARE_OF_MEMORY),
        port=settings.redis_port,
        host=settings.redis_host,
        password=settings.redis_password,
    )


def gpus(device: str) -> list[str]:
    """What each worker's CUDA_VISIBLE_DEVICES may be; empty where workers run on CPU cores or one GPU was named."""
    if device not in ("auto", "cuda"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(i) for i, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
