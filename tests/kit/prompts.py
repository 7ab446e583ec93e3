"""Real prompts, all different: tests/data/prompts.jsonl, a JSON object a line with its kind and its text."""

import json
from pathlib import Path

_LINES = (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
_RECORDS = [json.loads(line) for line in _LINES]

TEXTS: list[str] = [record["text"] for record in _RECORDS]  # of all kinds: for models that complete them
PROMPTS: list[str] = [record["text"] for record in _RECORDS if record["kind"] == "question"]  # for those that chat
