"""Logging of every role: one line per event, as text or as JSON, with the request it concerns where there is one.

A line that concerns a request names it by our own id, with which its answer's `id` ends (`extra=about(rid)`), so that a
request is followed through all roles by one word. The api's lines also carry the X-Request-Id of the HTTP request.
"""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar

import orjson

from .errors import ConfigError

# Of the HTTP request under way, and of what it became; every line that is logged meanwhile carries them.
http_id: ContextVar[str] = ContextVar("http_id", default="")
family: ContextVar[str] = ContextVar("family", default="")

NAMED = 8  # requests that one line names


def about(*rids: str, http: str = "") -> dict[str, str]:
    """`extra` of a line that concerns these requests; `http` is the X-Request-Id of the one."""
    more = f",+{len(rids) - NAMED}" if len(rids) > NAMED else ""
    return {"request_id": ",".join(rids[:NAMED]) + more, "http_id": http}


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "request_id", "") or family.get()
    record.http_id = getattr(record, "http_id", "") or http_id.get()
    return True


class _Text(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {role} %(message)s%(request)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        names = (("request", "request_id"), ("http", "http_id"))
        said = [f" {name}={value}" for name, field in names if (value := getattr(record, field, ""))]
        record.request = "".join(said)
        return super().format(record)


class _Json(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "http_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


def setup(role: str, level: str, as_json: bool = False) -> None:
    """Send this process's log to standard error.

    Raises:
        ConfigError: no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level (HEADRACE_LOG_LEVEL): should be debug, info, warning or error, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_name_request)
    handler.setFormatter(_Json(role) if as_json else _Text(role))
    logging.basicConfig(level=number, handlers=[handler], force=True)
