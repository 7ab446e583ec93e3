"""`headrace top`: roles, lanes, streams, rates and takeovers, live."""

from __future__ import annotations

from .command import run
from .settings import TopSettings

__all__ = ["TopSettings", "run"]
