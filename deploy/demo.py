"""`headrace demo` (`make demo`): the whole path once, on real weights: an answer streamed, a batch run; it stays up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ..shared.errors import ConfigError
from ..shared.settings import StrTuple
from .client import ApiClient
from .models import resolve, split_name
from .process import role_command
from .settings import ServeSettings, child_environment

QUESTION = "What is a message queue? Answer in two sentences."
WORDS = ("river", "bridge", "harbour", "lighthouse", "mill", "canal", "weather", "forest", "winter", "bread")
BATCH_LIMIT_S = 600.0
STOP_LIMIT_S = 40.0
POLL_S = 0.5
ENDED = ("completed", "failed", "expired", "cancelled")

NEXT = """
Try next, from another terminal:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me about rivers."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model="{model}", stream=True, messages=[{{"role": "user", "content": "Tell me about rivers."}}]
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

  headrace chat --url {url}
"""


class DemoSettings(ServeSettings):
    """`serve`'s settings, with what a demonstration wants."""

    model: StrTuple = Field(("smollm2-135m",), description="what to serve: see headrace serve")
    data_dir: str = Field("headrace-data", description="folder of the embedded server's data, of files and results")


def run(settings: DemoSettings) -> int:
    """Run the demonstration; with DEMO_EXIT=1 in the environment it ends after the batch.

    Raises:
        ConfigError: the server did not start, or did not do as it should.
    """
    console = Console(highlight=False)
    for _, place in map(split_name, settings.model):
        resolve(place)  # here, so that its progress is seen
    with _server(settings, console) as (server, url), ApiClient(url, next(iter(settings.api_key), "")) as client:
        model = client.first_model()
        console.print(f"\n[bold]> {QUESTION}[/bold]")
        _stream(client, model, console)
        console.print(f"\n[bold]> {len(WORDS)} lines as a batch[/bold], through /v1/files and /v1/batches")
        console.print(_table(_batch(client, model)))
        console.print(NEXT.format(url=url, model=model), markup=False, soft_wrap=True)
        if not os.environ.get("DEMO_EXIT"):
            console.print("It stays up until Ctrl-C.", style="dim")
            server.wait()
    return 0


@contextmanager
def _server(settings: DemoSettings, console: Console) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headrace serve` as a child for as long as the block lasts; yields it and its URL."""
    data = Path(settings.data_dir).expanduser().resolve()
    data.mkdir(parents=True, exist_ok=True)
    log = data / "serve.log"
    own = {"model": settings.model, "data_dir": data}
    with open(log, "w") as errors, console.status(f"starting the server (its log: {log})"):
        server = subprocess.Popen(
            role_command("serve"),
            env=child_environment(settings, ServeSettings, own),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,  # Ctrl-C is for the demonstration, which then stops the server
        )
        assert server.stdout is not None
        said = server.stdout.readline().split()
    try:
        if said[:1] != ["ready"]:
            raise ConfigError(f"the server did not start: {_last_line(log)} (its log: {log})")
        console.print(f"ready at {said[1]}, its log in {log}", style="dim", soft_wrap=True)
        yield server, said[1]
    except KeyboardInterrupt:
        console.print("\nstopping", style="dim")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _stream(client: ApiClient, model: str, console: Console) -> None:
    started = time.monotonic()
    pieces = 0
    for text in client.stream_chat(model, [{"role": "user", "content": QUESTION}], max_tokens=80, temperature=0):
        console.print(text, end="", markup=False, soft_wrap=True)
        pieces += 1
    console.print(f"\n{pieces} pieces in {time.monotonic() - started:.1f} s", style="dim")


def _batch(client: ApiClient, model: str) -> list[dict[str, Any]]:
    """Upload, create, poll, download: the steps of a batch. Returns its result lines."""
    content = "\n".join(json.dumps(_line(word, model)) for word in WORDS).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("demo.jsonl", content)})
    request = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=request)
    until = time.monotonic() + BATCH_LIMIT_S
    while batch["status"] not in ENDED and time.monotonic() < until:
        time.sleep(POLL_S)
        batch = client.get(f"/v1/batches/{batch['id']}")
    if batch["status"] != "completed" or not batch.get("output_file_id"):
        raise ConfigError(f"the batch should have been completed: {json.dumps(batch)}")
    output = client.get_text(f"/v1/files/{batch['output_file_id']}/content")
    return [json.loads(line) for line in output.splitlines()]


def _line(word: str, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say one short sentence about: {word}"}]
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    return {"custom_id": word, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table("custom_id", "answer", box=None)
    for result in results:
        table.add_row(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"])
    return table


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
