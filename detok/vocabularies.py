"""The vocabularies of the registered models, read from the store once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache

from ..shared import keys
from ..shared.clients import Client
from ..shared.errors import ProtocolError
from ..shared.model_card import ModelCard
from ..shared.registry import get_blob
from .vocab import Vocabulary

log = logging.getLogger(__name__)

KEPT = 32


class Vocabularies:
    """Vocabularies by the tokenizer's hash.

    Args:
        held: around each load: a tokenizer of 200,000 tokens takes a second or more, in which nothing else runs.
    """

    def __init__(self, client: Client, held: Callable[[], AbstractContextManager[None]]) -> None:
        self._client = client
        self._held = held
        self._seen: set[bytes] = set()  # cards, each looked at once
        self.get = lru_cache(maxsize=KEPT)(self._load)

    def prepare(self) -> None:
        """Load what registered models use, before the first request waits for it."""
        for name, raw in self._client.hgetall(keys.MODELS).items():
            if raw in self._seen:
                continue
            self._seen.add(raw)
            try:
                card = ModelCard.decode(raw)
                if card.task == "generate":
                    self.get(card.tokenizer)
            except ProtocolError as e:
                log.warning("requests of %s cannot be decoded here: %s", name.decode(), e)

    def _load(self, sha256: str) -> Vocabulary:
        blob = get_blob(self._client, sha256)
        with self._held():
            return Vocabulary.from_blob(blob)
