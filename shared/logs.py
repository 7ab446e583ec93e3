"""Logging of every role: one line per event, as text or as JSON, with the request id where there is one."""

from __future__ import annotations

import logging
import sys
import time

import orjson

from .errors import ConfigError


class _Text(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {role} %(message)s%(request)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request_id", None)
        record.request = f" request={request}" if request else ""
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
        if request := getattr(record, "request_id", None):
            line["request_id"] = request
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
    handler.setFormatter(_Json(role) if as_json else _Text(role))
    logging.basicConfig(level=number, handlers=[handler], force=True)
