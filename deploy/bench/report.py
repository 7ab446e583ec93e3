"""The report: a table for eyes, JSON for programs, and the machine that both hold for."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .results import Distribution, LevelResult
from .settings import BenchSettings

SCHEMA = 1
MIN_WIDTH = 110  # columns that the table needs


def build(
    settings: BenchSettings, machine: dict[str, Any], model: str, seed: int, results: Sequence[LevelResult]
) -> dict[str, Any]:
    """The whole report as plain values; the key is left out of it. `machine` is `environment()` before the load."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": settings.label,
        "model": model,
        "settings": settings.model_dump(mode="json", exclude={"api_key", "label", "output"}) | {"seed": seed},
        "environment": machine,
        "results": [asdict(result) for result in results],
    }


def environment() -> dict[str, Any]:
    """The generator's machine, which is the server's too where they share it, and how busy it is."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "headrace": metadata.version("headrace"),
        "httptools": metadata.version("httptools"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def print_table(title: str, results: Sequence[LevelResult]) -> None:
    """One row a level; times in milliseconds, p50/p90/p99. Never narrower than its columns: a log has it whole."""
    console = Console(width=max(Console().width, MIN_WIDTH))
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("load", no_wrap=True)
    for heading in ("done", "tok/s", "req/s", "TTFT ms", "ITL ms", "E2E ms", "client CPU"):
        out.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        out.add_row(
            f"{r.level:g} in flight" if r.loop == "closed" else f"{r.level:g} a second",
            f"{r.completed}/{r.requests}",
            f"{r.output_tokens_per_s:.1f}",
            f"{r.requests_per_s:.2f}",
            *(_percentiles(d) for d in (r.ttft_ms, r.itl_ms, r.e2e_ms)),
            f"{r.client_cpu_share:.1%}",
        )
    console.print(out)
    console.print(_caption(results), style="dim", highlight=False, markup=False)


def _percentiles(d: Distribution | None) -> str:
    return "–" if d is None else "/".join(f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" for ms in (d.p50, d.p90, d.p99))


def _caption(results: Sequence[LevelResult]) -> str:
    sources = sorted({r.token_source for r in results} - {"none"})
    lines = [
        f"tok/s: output tokens, counted by {', '.join(sources) or 'nobody'}; times: p50/p90/p99; "
        "client CPU: what this generator took of one core"
    ]
    for r in results:
        lines += [f"{r.loop} {r.level:g}: {count} × {message}" for message, count in r.errors.items()]
    return "\n".join(lines)
