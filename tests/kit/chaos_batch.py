"""Batches of a chaotic run: one after another, each of a few lines, whose results must be exact."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import openai
from kit.batches import create, line, read

if TYPE_CHECKING:
    from kit.chaos_clients import Clients

LINES = 12


def drive_batches(clients: Clients) -> None:
    """Batches until the run is over; the last one is waited for."""
    number = 0
    while not clients.over:
        number += 1
        try:
            _one(clients, number)
        except openai.NotFoundError as e:
            clients.tally["batches lost"] += 1
            if not clients.lossy:
                clients.problems.append(f"batch {number}: {e}")
        except Exception as e:  # noqa: BLE001 - whatever it is, it is a finding
            clients.problems.append(f"batch {number}: {type(e).__name__}: {e}")


def _one(clients: Clients, number: int) -> None:
    work = clients.work
    contents = [work.chat_message.replace("{key}", f"{number}.{n}") for n in range(LINES)]
    bodies = [{"model": "m", "messages": [{"role": "user", "content": text}], **work.chat} for text in contents]
    data = b"".join(line(f"c{n}", body=body) for n, body in enumerate(bodies))
    batch = _ask(clients, lambda client: create(client, data, extra_headers={"Idempotency-Key": f"b{number}"}))
    until = time.monotonic() + 150
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() > until:
            clients.problems.append(f"batch {number} is {batch.status}: {batch.request_counts}")
            return
        time.sleep(0.5)
        batch = _ask(clients, lambda client, name=batch.id: client.batches.retrieve(name))
    output = _ask(clients, lambda client: read(client, batch.output_file_id))
    texts = [record["response"]["body"]["choices"][0]["message"]["content"] for record in output.values()]
    if batch.status != "completed" or texts != [work.chat_text] * LINES:
        clients.problems.append(f"batch {number} {batch.status}: {texts}")
    clients.tally["batches"] += 1


def _ask(clients: Clients, ask: Any) -> Any:
    """An answer of either replica, when one gives it."""
    for n in range(240):
        with openai.OpenAI(base_url=f"{clients.urls[n % 2]}/v1", api_key="none", max_retries=0, timeout=30) as client:
            try:
                return ask(client)
            except (openai.APIConnectionError, openai.InternalServerError):
                time.sleep(0.25)
    raise AssertionError("never answered")
