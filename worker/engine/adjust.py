"""Changes to logits that depend on a request's own tokens: penalties, biases, bans.

Each kind gathers the (row, token) pairs it concerns on the host and applies them in one indexed operation, so that the
cost goes with the tokens concerned and not with rows times vocabulary. What a sequence has said is counted as it says
it, once.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from ...shared.messages import SamplingParams
from .attention_triton import triton_is_installed
from .sequence import Row, Sequence
from .transfers import upload

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def may_need_adjusting(s: SamplingParams) -> bool:
    """Whether `adjust` ever changes the logits of a request."""
    return bool(_penalised(s) or s.logit_bias or s.bad_words or s.min_new_tokens)


def adjust(logits: torch.Tensor, rows: Rows[tuple[int, Row]]) -> None:
    """Change `logits` [S, V] float32 in place: penalties, then biases, then bans. `rows` are those of the S that may
    need it, each with its place.

    Repetition looks at prompt and output (as in transformers), frequency and presence at the output alone (as OpenAI
    defines them).
    """
    _penalise(logits, [(place, row) for place, row in rows if _penalised(row.params)])
    _bias(logits, [(place, row) for place, row in rows if row.params.logit_bias])
    _ban(logits, rows)


class TokenCounts:
    """The distinct tokens of a sequence, and how often each stands in its output."""

    def __init__(self, prompt_ids: Rows[int]) -> None:
        self._ids: Ints = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts: Floats = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self._seen = 0  # output tokens

    def of(self, row: Row) -> tuple[Ints, Floats]:
        """Ids and counts as of the row. They are good until the next call."""
        self._add(row.sequence.token_ids[row.sequence.num_prompt_tokens + self._seen :])
        if row.draft:
            return self._with(row.draft)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def _add(self, token_ids: Rows[int]) -> None:
        for token in token_ids:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(max(place, 64), dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(max(place, 64), dtype=np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
        self._seen += len(token_ids)

    def _with(self, draft: Rows[int]) -> tuple[Ints, Floats]:
        count = len(self._places)
        new = np.array(sorted(set(draft).difference(self._places)), dtype=np.int64)
        ids = np.concatenate([self._ids[:count], new])
        counts = np.concatenate([self._counts[:count], np.zeros(len(new), dtype=np.float32)])
        for token in draft:
            place = self._places.get(token)
            counts[place if place is not None else count + int(np.searchsorted(new, token))] += 1
        return ids, counts


def _penalised(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def _counts_of(sequence: Sequence) -> TokenCounts:
    if sequence.token_counts is None:
        sequence.token_counts = TokenCounts(sequence.prompt_ids)
    return sequence.token_counts


def _penalise(logits: torch.Tensor, rows: Rows[tuple[int, Row]]) -> None:
    if not rows:
        return
    places, params = [place for place, _ in rows], [row.params for _, row in rows]
    told = [_counts_of(row.sequence).of(row) for _, row in rows]
    ids, counts = [ids for ids, _ in told], np.concatenate([counts for _, counts in told])
    asked = np.array([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in params], np.float32)
    penalise = _by_kernel if runs_kernels(logits.device) else _by_torch
    penalise(logits, places, ids, counts, asked)


def _by_kernel(logits: torch.Tensor, places: Rows[int], ids: Rows[Ints], counts: Floats, asked: Floats) -> None:
    from ...kernels.penalties import apply_penalties

    lengths = [len(one) for one in ids]
    arrays = np.array(places), np.cumsum([0, *lengths], dtype=np.int32), np.concatenate(ids), counts, asked.T.copy()
    apply_penalties(logits, *(upload(array, logits.device) for array in arrays), longest=max(lengths))


def _by_torch(logits: torch.Tensor, places: Rows[int], ids: Rows[Ints], counts: Floats, asked: Floats) -> None:
    pairs = _Pairs(places, ids, logits.device)
    repetition, frequency, presence = (pairs.spread(column) for column in asked.T)
    said, old = pairs.values(counts), logits[pairs.index]
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    logits[pairs.index] = repeated - frequency * said - presence * (said > 0)


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels serve a device."""
    return device.type == "cuda" and triton_is_installed()


def _bias(logits: torch.Tensor, rows: Rows[tuple[int, Row]]) -> None:
    if not rows:
        return
    biases = [dict(row.params.logit_bias) for _, row in rows]
    ids = [np.fromiter(bias, dtype=np.int64, count=len(bias)) for bias in biases]
    pairs = _Pairs([place for place, _ in rows], ids, logits.device)
    logits[pairs.index] += pairs.values(np.array([v for bias in biases for v in bias.values()], dtype=np.float32))


def _ban(logits: torch.Tensor, rows: Rows[tuple[int, Row]]) -> None:
    banned = [(place, tokens) for place, row in rows if (tokens := _banned(row))]
    if banned:
        ids = [np.array(sorted(tokens), dtype=np.int64) for _, tokens in banned]
        logits[_Pairs([place for place, _ in banned], ids, logits.device).index] = -torch.inf


def _banned(row: Row) -> set[int]:
    """Tokens that may not come next: stops before min_new_tokens, and the last token of each bad word begun."""
    s = row.params
    banned = set(row.sequence.stop_ids) if row.num_output_tokens < s.min_new_tokens else set()
    if s.bad_words:
        longest = max(map(len, s.bad_words)) - 1
        output = row.output_tail(longest)
        for word in s.bad_words:
            *beginning, last = word
            if len(output) >= len(beginning) and output[len(output) - len(beginning) :] == beginning:
                banned.add(last)
    return banned


class _Pairs:
    """(row, token) pairs of several rows, as an index of the logits; no pair stands twice."""

    def __init__(self, places: Rows[int], ids: Rows[Ints], device: torch.device) -> None:
        self._lengths = [len(one) for one in ids]
        self._device = device
        self.index = self._tensor(np.repeat(np.array(places), self._lengths)), self._tensor(np.concatenate(ids))

    def values(self, values: Floats) -> torch.Tensor:
        return self._tensor(values)

    def spread(self, values: Floats) -> torch.Tensor:
        """A value of each row at all its pairs."""
        return self._tensor(np.repeat(values, self._lengths))

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
