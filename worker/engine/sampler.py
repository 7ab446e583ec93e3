"""Chooses the next token of every sequence of a step at once.

    logits ─► penalties, bias, bans, grammar ─► / temperature ─► top-k, top-p, min-p ─► + Gumbel noise ─► argmax
      └─► log-probabilities, of the model's own distribution: before anything above

Rows never look at each other: what a row draws does not depend on which others are in the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from ...shared.messages import TokenLogprob
from .adjust import adjust, needs_adjusting
from .grammar import Masks
from .logprobs import logprobs_of
from .noise import gumbel, hash_tokens, row_keys
from .sequence import Row

# How many of the most likely tokens are tried for top-k, top-p and min-p before more are: sorting a whole vocabulary
# costs more than the model's own step on a CPU.
_CANDIDATES = (64, 1024)
_BROKEN, _EXCLUDED = -1, -2  # in the place of a token


@dataclass(frozen=True, slots=True)
class Sample:
    """`token_id` is None where there is none to take: the logits were not finite, for the model has failed for this
    sequence, or else all tokens were `excluded`, by its grammar, its bans, or both."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    excluded: bool = False


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Rows[Row], masks: Masks | None = None) -> list[Sample]:
    """Sample one token per row. `logits` [S, V] float32 is used up. `masks` are those of the rows with a grammar."""
    best, tokens = logits.max(-1)  # NaN wins a max, so one look tells the greedy token and whether all is finite
    asked = [row for row, sequence in enumerate(sequences) if sequence.job.return_logprob]
    logprobs = logits[asked].log_softmax(-1) if asked else None
    if masks is not None or not all(row.params.greedy and not needs_adjusting(row) for row in sequences):
        tokens = _choose(logits, sequences, masks)
    chosen = torch.where(best.isfinite(), tokens, _BROKEN).tolist()
    told: dict[int, TokenLogprob] = {}
    if logprobs is not None:
        jobs = [sequences[row].job for row in asked]
        told = dict(zip(asked, logprobs_of(logprobs, [max(chosen[row], 0) for row in asked], jobs), strict=True))
    return [
        Sample(token, told.get(row)) if token >= 0 else Sample(None, excluded=token == _EXCLUDED)
        for row, token in enumerate(chosen)
    ]


def _choose(logits: torch.Tensor, sequences: Rows[Row], masks: Masks | None) -> torch.Tensor:
    """Tokens [S] where some row is not plainly greedy."""
    adjust(logits, sequences)
    if masks is not None:
        masks.apply(logits, sequences)
    best, tokens = logits.max(-1)
    rows = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if rows:
        drawn = [sequences[row] for row in rows]
        temperatures = torch.tensor([[s.params.temperature] for s in drawn], device=logits.device)
        scaled = logits.div_(temperatures) if len(rows) == len(sequences) else logits[rows] / temperatures
        tokens[rows] = _draw(scaled, drawn)
    return torch.where(best == -torch.inf, _EXCLUDED, tokens)


def _draw(scaled: torch.Tensor, sequences: Rows[Row]) -> torch.Tensor:
    """Draw from softmax(scaled) [R, V] as each row's top-k, top-p and min-p allow; returns [R] int64."""
    device, vocabulary = scaled.device, scaled.shape[1]
    keys = row_keys([s.sequence.seed for s in sequences], [s.num_output_tokens for s in sequences], device)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=device)
    limited = torch.tensor([_limited(s) for s in sequences], device=device)
    open_rows, rows = (~limited).nonzero()[:, 0], limited.nonzero()[:, 0]
    if open_rows.numel():
        tokens[open_rows] = _draw_open(scaled[open_rows], keys[open_rows])
    limits = _Limits.of(sequences, vocabulary, device)
    for count in (*_CANDIDATES, vocabulary):
        if not rows.numel():
            break
        picked, settled = _draw_limited(scaled[rows], keys[rows], limits.at(rows), min(count, vocabulary))
        tokens[rows[settled]] = picked[settled]
        rows = rows[~settled]
    return tokens


def _draw_open(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary. On a CPU row by row, so that the noise stays in the cache while it is made."""
    hashes = hash_tokens(torch.arange(scaled.shape[1], device=scaled.device)[None])
    if scaled.device.type != "cpu":
        return (scaled + gumbel(keys, hashes)).argmax(-1)
    return torch.stack([(row + gumbel(key[None], hashes)[0]).argmax() for row, key in zip(scaled, keys, strict=True)])


def _limited(sequence: Row) -> bool:
    s = sequence.params
    return s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0


@dataclass(frozen=True, slots=True)
class _Limits:
    """Columns [R, 1]: `top_k` int64 (the vocabulary where there is none), `top_p` and `min_p` float32."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, sequences: Rows[Row], vocabulary: int, device: torch.device) -> _Limits:
        params = [s.params for s in sequences]
        top_k = [[s.top_k if 0 < s.top_k < vocabulary else vocabulary] for s in params]
        columns = ([[s.top_p] for s in params], [[s.min_p] for s in params])
        return cls(torch.tensor(top_k, device=device), *(torch.tensor(column, device=device) for column in columns))

    def at(self, rows: torch.Tensor) -> _Limits:
        return _Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def _draw_limited(
    scaled: torch.Tensor, keys: torch.Tensor, limits: _Limits, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `count` most likely tokens.

    Returns:
        Tokens [R], and [R] bool: whether those tokens are all that the row's limits keep. Where not, `count` was too
        small and the draw is void.
    """
    vocabulary = scaled.shape[1]
    values, ids = scaled.topk(count)
    kept = torch.arange(count, device=scaled.device)[None] < limits.top_k
    # top-p is a share of what top-k left over.
    among = values.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
    total = torch.where(limits.top_k < vocabulary, among, scaled.logsumexp(-1, keepdim=True))
    probabilities = (values - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept &= (before < limits.top_p) & (probabilities >= limits.min_p * probabilities[:, :1])
    kept[:, 0] = True  # rounding must not empty a row
    noisy = (values + gumbel(keys, hash_tokens(ids))).masked_fill_(~kept, -torch.inf)
    tokens = ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    enough = (limits.top_k <= count)[:, 0]
    return tokens, enough | ((limits.top_k == vocabulary)[:, 0] & ~kept[:, -1])
