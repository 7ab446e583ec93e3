"""The picture on a terminal."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...shared.overview import Overview
from ...shared.registry import ProcessInfo
from .sample import Sample, load_of, rates, total

COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "stuck": "bold red"}


def picture(before: Sample, now: Sample) -> RenderableType:
    return Group(_summary(before, now), _processes(now), _lanes(now.queue), _losses(before, now))


def _table(*columns: str, left: int = 1) -> Table:
    """The first `left` columns hold names, the others numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _summary(before: Sample, now: Sample) -> Text:
    rate, queue = rates(before, now), now.queue
    streams = total(now.processes, "api", "open_streams")
    return Text.assemble(
        (f"{rate['tokens_per_s']:,.0f}", "bold"), " tokens/s   ",
        (f"{rate['done_per_s']:,.1f}", "bold"), " choices/s   ",
        (f"{streams:,.0f}", "bold"), " open streams   ",
        (f"{queue.unfinished:,}", "bold"), " unfinished   ",
        (f"{queue.text_bytes / 1e6:,.1f}", "bold"), " MB of text kept\n",
    )  # fmt: skip


def _processes(now: Sample) -> Table:
    table = _table("role", "process", "state", "model", "up", "load", left=4)
    for process in now.processes:
        name = f"{process.host}:{process.pid}"
        state = Text(process.state, COLOURS.get(process.state, ""))
        table.add_row(
            process.role, name, state, process.model or "", _age(time.time() - process.started_at), _load(process)
        )
    return table


def _load(process: ProcessInfo) -> str:
    return "  ".join(f"{name} {value:,.6g}" for name, value in load_of(process).items())


def _lanes(queue: Overview) -> Table:
    table = _table("\npool", "\nlane", "\nwaiting", "\noldest", "\nrunning", "\ntaken/s", left=2)
    for (pool, lane), state in queue.lanes.items():
        oldest = "" if state.oldest_s is None else _age(state.oldest_s)
        taken = f"{state.taken_per_s:,.2f}"
        table.add_row(pool, lane, f"{state.waiting:,}", oldest, f"{state.running:,}", taken)
    return table


def _losses(before: Sample, now: Sample) -> Table:
    table = _table("", "\nretries", "\ntakeovers", "\nfenced", "\nexpired", "\nrefused", "\ndead", "\nshards free")
    queue, rate = now.queue, rates(before, now)
    names = ("retries", "takeovers", "fenced", "expired", "refused", "dead")
    free = f"{queue.shards_free}" + (f" for {_age(queue.shard_free_s)}" if queue.shards_free else "")
    table.add_row("in all", *(f"{queue.counters[name]:,}" for name in names), free)
    table.add_row("a second", *(f"{rate[f'{name}_per_s']:,.2f}" for name in names), "")
    return table


def _age(seconds: float) -> str:
    """As one would say it: 8.2 s, 3 min, 5 h, 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
