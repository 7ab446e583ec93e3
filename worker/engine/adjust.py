"""Changes to logits that depend on a request's own tokens: penalties, biases, bans.

Each kind gathers (row, token, value) triples on the host and applies them in one indexed operation, so that the cost
goes with the tokens concerned and not with rows times vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from ...shared.messages import SamplingParams
from .sequence import Row


def needs_adjusting(sequence: Row) -> bool:
    """Whether `adjust` would change this sequence's logits now."""
    s = sequence.params
    return bool(_penalised(s) or s.logit_bias or s.bad_words or sequence.num_output_tokens < s.min_new_tokens)


def adjust(logits: torch.Tensor, sequences: Rows[Row]) -> None:
    """Change `logits` [S, V] float32 in place: repetition, frequency and presence penalties, then bias, then bans.

    Repetition looks at prompt and output (as in transformers), frequency and presence at the output alone (as OpenAI
    defines them).
    """
    _repetition(logits, sequences)
    _frequency_and_presence(logits, sequences)
    _bias(logits, sequences)
    _ban(logits, sequences)


def _penalised(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def _repetition(logits: torch.Tensor, sequences: Rows[Row]) -> None:
    triples = _Triples()
    for row, sequence in enumerate(sequences):
        if sequence.params.repetition_penalty != 1.0:
            triples.add(row, np.unique(sequence.token_ids), sequence.params.repetition_penalty)
    if index := triples.index(logits):
        old, penalty = logits[index], triples.values(logits)
        logits[index] = torch.where(old > 0, old / penalty, old * penalty)


def _frequency_and_presence(logits: torch.Tensor, sequences: Rows[Row]) -> None:
    triples = _Triples()
    for row, sequence in enumerate(sequences):
        s = sequence.params
        if sequence.num_output_tokens and (s.frequency_penalty != 0.0 or s.presence_penalty != 0.0):
            ids, counts = np.unique(sequence.output_ids, return_counts=True)
            triples.add(row, ids, s.frequency_penalty * counts + s.presence_penalty)
    if index := triples.index(logits):
        logits[index] -= triples.values(logits)


def _bias(logits: torch.Tensor, sequences: Rows[Row]) -> None:
    triples = _Triples()
    for row, sequence in enumerate(sequences):
        if bias := dict(sequence.params.logit_bias):
            triples.add(row, np.fromiter(bias, dtype=np.int64), np.fromiter(bias.values(), dtype=np.float64))
    if index := triples.index(logits):
        logits[index] += triples.values(logits)


def _ban(logits: torch.Tensor, sequences: Rows[Row]) -> None:
    triples = _Triples()
    for row, sequence in enumerate(sequences):
        if banned := _banned(sequence):
            triples.add(row, np.array(sorted(banned)), -np.inf)
    if index := triples.index(logits):
        logits[index] = -torch.inf


def _banned(sequence: Row) -> set[int]:
    """Tokens that may not come next: stops before min_new_tokens, and the last token of each bad word begun."""
    s, output = sequence.params, sequence.output_ids
    banned = set(sequence.sequence.stop_ids) if len(output) < s.min_new_tokens else set()
    for word in s.bad_words:
        *beginning, last = word
        if len(output) >= len(beginning) and output[len(output) - len(beginning) :] == beginning:
            banned.add(last)
    return banned


class _Triples:
    """(row, token, value) lists of several rows; each pair of row and token at most once."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def add(self, row: int, ids: np.ndarray, values: np.ndarray | float) -> None:
        self._rows.append(np.full(len(ids), row))
        self._ids.append(ids)
        self._values.append(np.broadcast_to(values, len(ids)))

    def index(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._rows:
            return None
        rows, ids = np.concatenate(self._rows), np.concatenate(self._ids)
        return torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids.astype(np.int64)).to(logits.device)

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self._values).astype(np.float32)).to(logits.device)
