"""Looks again and again, and shows it."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...shared.address import redacted
from ...shared.clients import TRANSIENT, Client, connect
from ...shared.errors import ConfigError, StoreUnavailable
from ..embedded import socket_path
from .sample import as_json, look
from .settings import TopSettings
from .view import picture


def run(settings: TopSettings) -> int:
    """Show a deployment until Ctrl-C, or once.

    Raises:
        ConfigError: no Redis is known, or it holds no deployment.
        StoreUnavailable: Redis does not answer.
    """
    url = settings.redis_url or _embedded(settings)
    try:
        with connect(url, "headrace-top") as client:
            return _once(client, settings) if settings.once or settings.as_json else _live(client, settings)
    except TRANSIENT as e:
        raise StoreUnavailable(f"Redis does not answer at {redacted(url)}: {e}") from e


def _embedded(settings: TopSettings) -> str:
    secret = f":{quote(settings.redis_password, safe='')}@" if settings.redis_password else ""
    return f"unix://{secret}{quote(str(socket_path(Path(settings.data_dir).expanduser().resolve())))}"


def _once(client: Client, settings: TopSettings) -> int:
    before = look(client)
    time.sleep(settings.interval_s)
    now = look(client)
    if settings.as_json:
        print(orjson.dumps(as_json(before, now), option=orjson.OPT_INDENT_2).decode())
    else:
        Console().print(picture(before, now))
    return 0


def _live(client: Client, settings: TopSettings) -> int:
    console = Console()
    if not console.is_terminal:
        raise ConfigError("standard output is no terminal: headrace top --once prints one picture")
    before = now = look(client)
    with Live(picture(before, now), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(settings.interval_s)
            try:
                before, now = now, look(client)
                shown = picture(before, now)
            except (*TRANSIENT, StoreUnavailable) as e:
                shown = Group(Text(f"Redis does not answer: {e}", "bold red"), picture(before, now))
            live.update(shown, refresh=True)
