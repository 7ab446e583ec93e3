"""Where a Redis is, as one URL says it: one server, a primary that sentinels know, or a cluster; with TLS and a user.

redis://[user:password@]host[:port][/db]                         rediss://… with TLS
unix://[user:password@]/path/of/socket[?db=0]
redis+sentinel://[user:password@]host[:port],host…/service[/db]  rediss+sentinel://… ; ports are 26379 by default
redis+cluster://[user:password@]host[:port],host…                rediss+cluster://… ; any nodes of it

?ssl_ca_certs=FILE                      who may have signed the server's certificate; by default the system's own
&ssl_certfile=FILE&ssl_keyfile=FILE     our certificate, where the server asks for one
&ssl_check_hostname=false               the certificate may name another host
&sentinel_username=…&sentinel_password=…
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

Kind = Literal["server", "sentinel", "cluster"]
Node = tuple[str, int]  # host, port

SCHEMES: dict[str, tuple[Kind, bool]] = {  # what is there, and whether TLS is spoken
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("server", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
PORTS: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """A Redis. `nodes` are the server, some of its sentinels, or some of its cluster; none for a Unix socket."""

    kind: Kind
    nodes: tuple[Node, ...] = ()
    path: str = ""  # of the Unix socket
    service: str = ""  # what the sentinels call the primary
    login: Mapping[str, Any] = field(default_factory=dict)  # `username`, `password`, `db`
    sentinel_login: Mapping[str, Any] = field(default_factory=dict)
    tls: Mapping[str, Any] | None = None  # `ssl_*` options of redis-py; None: plain


def parse(url: str) -> Address:
    """The address that a URL says.

    Raises:
        ValueError: in a sentence that does not repeat the URL, which may hold a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"should begin with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    kind, tls = SCHEMES[parts.scheme]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    userinfo, _, hosts = parts.netloc.rpartition("@")
    login = _login(userinfo)
    if parts.scheme == "unix":
        if hosts or not parts.path:
            raise ValueError("should name a socket by its whole path: unix:///path/of/socket")
        db = options.pop("db", "")
        address = Address(kind, path=unquote(parts.path), login=login | _database(db))
    else:
        service, db = _place(kind, parts)
        nodes = tuple(_node(host, PORTS[kind]) for host in hosts.split(",")) if hosts or kind != "server" else ()
        nodes = nodes or (("localhost", PORTS[kind]),)
        if kind == "server" and len(nodes) > 1:
            raise ValueError("names several hosts: those of a cluster (redis+cluster://) or its sentinels?")
        sentinel_login = {
            name.removeprefix("sentinel_"): options.pop(name) for name in SENTINEL_OPTIONS if name in options
        }
        if sentinel_login and kind != "sentinel":
            raise ValueError("sentinel_username and sentinel_password are for redis+sentinel://")
        address = Address(kind, nodes, "", service, login | _database(db), sentinel_login, _tls(tls, options))
    if options:
        raise ValueError(f"has a parameter that is not known here: {next(iter(options))}")
    return address


def redacted(url: str) -> str:
    """A URL as logs and errors may show it."""
    url = re.sub(r"://([^:/@]*):[^/]*@", r"://\1:***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", url)


def _login(userinfo: str) -> dict[str, Any]:
    user, _, password = userinfo.partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _database(db: str) -> dict[str, Any]:
    if db and not db.isdecimal():
        raise ValueError(f"a database is a number, not {db!r}")
    return {"db": int(db)} if db else {}


def _place(kind: Kind, parts: SplitResult) -> tuple[str, str]:
    """The service and the database that the path names."""
    path = unquote(parts.path).strip("/")
    if kind == "server":
        return "", path
    if kind == "sentinel":
        service, _, db = path.partition("/")
        if not service:
            raise ValueError("should name the service that the sentinels watch: redis+sentinel://host:26379/SERVICE")
        return service, db
    if path not in ("", "0"):
        raise ValueError(f"a cluster has one database, and no /{path}")
    return "", ""


def _node(text: str, port: int) -> Node:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d+))?", text)
    if not found or not 0 < int(found[2] or port) < 65536:
        raise ValueError(f"{text!r} is no host:port")
    return unquote(found[1].strip("[]")), int(found[2] or port)


def _tls(spoken: bool, options: dict[str, str]) -> dict[str, Any] | None:
    """What of the options is TLS's, taken out of them."""
    given: dict[str, Any] = {name: options.pop(name) for name in TLS_FILES if name in options}
    for name, file in given.items():
        if not Path(file).is_file():
            raise ValueError(f"{name}: there is no file {file}")
    if (check := options.pop("ssl_check_hostname", "")) not in ("", "true", "false"):
        raise ValueError(f"ssl_check_hostname should be true or false, not {check!r}")
    if not spoken:
        if given or check:
            raise ValueError(
                "has settings of TLS, which is spoken with rediss:// (rediss+sentinel://, rediss+cluster://)"
            )
        return None
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ValueError("ssl_keyfile is the key of ssl_certfile, which is missing")
    return given | ({"ssl_check_hostname": check == "true"} if check else {})
