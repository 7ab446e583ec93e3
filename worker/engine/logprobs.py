"""Log-probabilities under the model's own distribution: of output as it is chosen, of a prompt as it is read."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from ...shared.messages import GenerateJob, TokenLogprob
from .plan import Slice

LEAST = -9999.0  # in the place of minus infinity, which JSON does not have
SCORED_LOGITS = 2**25  # of prompt tokens, computed at once: 128 MB of float32


def logprobs_of(logprobs: torch.Tensor, token_ids: Rows[int], jobs: Rows[GenerateJob]) -> list[TokenLogprob]:
    """What each row's job wants to know.

    Args:
        logprobs: [R, V] float32, normalised.
        token_ids: the token at each row's place.
        jobs: whose row it is.
    """
    logprobs = logprobs.clamp_min(LEAST)
    own = _gathered(logprobs, [[token] for token in token_ids])
    tops = [job.top_logprobs_num for job in jobs]
    values, ids = (t.tolist() for t in logprobs.topk(min(max(tops), logprobs.shape[1])))
    asked = [job.token_ids_logprob for job in jobs]
    named = _gathered(logprobs, asked)
    return [
        TokenLogprob(
            own[row][0],
            tuple(zip(ids[row][:top], values[row][:top], strict=True)),
            tuple(zip(asked[row], named[row], strict=True)),
        )
        for row, top in enumerate(tops)
    ]


@torch.inference_mode()
def score(piece: Slice, logits: torch.Tensor) -> None:
    """Note the log-probabilities of prompt tokens. `logits` [P, V] are those of the slice's `scored` places."""
    sequence = piece.sequence
    assert sequence.scored is not None, "nobody asked for them"
    token_ids = [sequence.token_ids[place + 1] for place in piece.scored]
    jobs = [sequence.job] * len(token_ids)
    sequence.scored += logprobs_of(logits.float().log_softmax(-1), token_ids, jobs)


def grouped(slices: Rows[Slice], vocab_size: int) -> list[list[Slice]]:
    """Slices in groups, each with a bounded number of scored places; one group where nothing is scored."""
    groups: list[list[Slice]] = [[]]
    places = 0
    for piece in slices:
        places += len(piece.scored)
        if places > most_scored(vocab_size) and groups[-1]:
            groups.append([])
            places = len(piece.scored)
        groups[-1].append(piece)
    return groups


def most_scored(vocab_size: int) -> int:
    """How many places are scored at once."""
    return max(SCORED_LOGITS // vocab_size, 1)


def _gathered(logprobs: torch.Tensor, ids: Rows[Rows[int]]) -> list[list[float]]:
    """Of each row the values of its ids."""
    width = max(map(len, ids))
    if width == 0:
        return [[] for _ in ids]
    index = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], device=logprobs.device)
    return [values[: len(row)] for values, row in zip(logprobs.gather(1, index).tolist(), ids, strict=True)]
