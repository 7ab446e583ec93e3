"""Chooses the next token of every sequence of a step at once.

    logits ─► penalties, bias, bans, grammar ─► / temperature ─► top-k, top-p, min-p ─► + Gumbel noise ─► argmax
      └─► log-probabilities, of the model's own distribution: before anything above

Rows never look at each other: what a row draws does not depend on which others are in the step. From the temperature
on it is one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from ...shared.chunks import TokenLogprob
from .adjust import adjust, may_need_adjusting
from .grammar import Masks
from .logprobs import logprobs_of, prepare
from .noise import row_keys
from .sequence import Row, Sequence
from .transfers import upload

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """`token_id` is None where there is none to take: the logits were not finite, for the model has failed for this
    sequence, or else all tokens were `excluded`, by its grammar, its bans, or both."""

    token_id: int | None
    logprob: TokenLogprob | None = None
    excluded: bool = False

    @classmethod
    def of(cls, token: int) -> Sample:
        """Of a plain draw, which is -1 where the logits were not finite."""
        return cls(token if token >= 0 else None)


class Sampler:
    """Samples a step; what does not change from one step to the next is kept.

    Args:
        device: of the logits. Its kernels are compiled now, where they never were, and not under the first request.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._columns: _Columns | None = None
        one = torch.ones(1, device=device)
        Masks({}, np.full((1, 2), -1, dtype=np.int32)).apply(one[None], [])
        prepare(device)
        self._draw(one[None], _Columns([], one, one.int(), one, one, [0], False, one.int(), [], []), [0])

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Rows[Row], masks: Masks | None = None) -> list[Sample]:
        """Sample one token per row.

        Args:
            logits: [S, V] float32; used up.
            masks: of the rows with a grammar.
        """
        logits, columns = logits.contiguous(), self._columns_of([row.sequence for row in rows])
        asked = columns.asked
        kept = logits  # drawing only reads them
        if asked and (columns.adjusted or masks is not None or len(asked) < len(rows)):
            kept = logits[asked]
        if columns.adjusted:
            adjust(logits, [(place, rows[place]) for place in columns.adjusted])
        if masks is not None:
            masks.apply(logits, rows)
        tokens = self._draw(logits, columns, [row.num_output_tokens for row in rows]).tolist()
        told: dict[int, TokenLogprob] = {}
        if asked:
            chosen = [max(tokens[place], 0) for place in asked]
            told = dict(zip(asked, logprobs_of(kept, chosen, [rows[place].job for place in asked]), strict=True))
        return [
            Sample(token, told.get(place)) if token >= 0 else Sample(None, excluded=_excluded(logits[place]))
            for place, token in enumerate(tokens)
        ]

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """Draw a token per row of `logits` [S, V] float32, without a look at them: all that plain sampling is.

        Returns:
            [S] int64 on the device, -1 where the logits are not finite. Nothing has waited for it.
        """
        positions = [sequence.num_output_tokens for sequence in sequences]
        return self._draw(logits.contiguous(), self._columns_of(sequences), positions)

    def _columns_of(self, sequences: list[Sequence]) -> _Columns:
        if self._columns is None or self._columns.sequences != sequences:
            self._columns = _Columns.of(sequences, self._device)
        return self._columns

    def _draw(self, logits: torch.Tensor, columns: _Columns, positions: Rows[int]) -> torch.Tensor:
        """[S] int64; -1 where a row has no token to take."""
        keys = columns.keys if columns.greedy else row_keys(columns.seeds, positions, self._device)
        limits = columns.top_ks, columns.top_ps, columns.min_ps
        return _kernel(self._device.type)(logits, columns.temperatures, *limits, keys)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The parameters of a step's rows, as tensors [S], and which rows want more than a draw."""

    sequences: list[Sequence]
    temperatures: torch.Tensor  # 0: greedy
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: list[int]
    greedy: bool  # all of them, so that no noise is made and any keys will do
    keys: torch.Tensor
    asked: list[int]  # rows that want logprobs
    adjusted: list[int]  # rows that may need penalties, biases or bans

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> _Columns:
        params, seeds = [sequence.params for sequence in sequences], [sequence.seed for sequence in sequences]
        return cls(
            sequences,
            upload(np.array([0.0 if s.greedy else s.temperature for s in params], dtype=np.float32), device),
            upload(np.array([min(max(s.top_k, 0), _MOST) for s in params], dtype=np.int32), device),
            upload(np.array([s.top_p for s in params], dtype=np.float32), device),
            upload(np.array([s.min_p for s in params], dtype=np.float32), device),
            seeds,
            all(s.greedy or s.temperature == 0.0 for s in params),
            row_keys(seeds, [0] * len(seeds), device),
            [place for place, sequence in enumerate(sequences) if sequence.job.return_logprob],
            [place for place, s in enumerate(params) if may_need_adjusting(s)],
        )


@functools.cache
def _kernel(device_type: str) -> Callable[..., torch.Tensor]:
    if device_type == "cpu":
        from ...kernels.cpu.sample import sample

        return sample
    from ...kernels.sample import sample as triton_sample

    return triton_sample


def _excluded(logits: torch.Tensor) -> bool:
    """Whether a row [V] has nothing left, and nothing that is not a number."""
    return bool((logits == -torch.inf).all())
