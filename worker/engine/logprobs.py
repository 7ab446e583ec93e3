"""Log-probabilities under the model's own distribution: of output as it is chosen, of a prompt as it is read."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from ...kernels.cpu.logprobs import summarize
from ...shared.chunks import TokenLogprob
from ...shared.messages import GenerateJob
from .plan import Slice

LEAST = -9999.0  # in the place of minus infinity, which JSON does not have
SCORED_LOGITS = 2**25  # of prompt tokens, computed at once: 128 MB of float32


def logprobs_of(logits: torch.Tensor, token_ids: Rows[int], jobs: Rows[GenerateJob]) -> list[TokenLogprob]:
    """What each row's job wants to know.

    Args:
        logits: [R, V] float32, as the model gives them.
        token_ids: the token at each row's place.
        jobs: whose row it is.
    """
    tops, asked = [job.top_logprobs_num for job in jobs], [job.token_ids_logprob for job in jobs]
    logits, norms, top, ids = _summarized(logits, min(max(tops), logits.shape[1]))

    def told(chosen: torch.Tensor) -> list[list[float]]:
        return (chosen - norms[:, :1] - norms[:, 1:]).clamp_min(LEAST).tolist()

    named = told(_gathered(logits, [[token, *others] for token, others in zip(token_ids, asked, strict=True)]))
    values, places = told(top), ids.tolist()
    return [
        TokenLogprob(
            named[row][0],
            tuple(zip(places[row][:count], values[row], strict=False)),
            tuple(zip(asked[row], named[row][1:], strict=False)),
        )
        for row, count in enumerate(tops)
    ]


def prepare(device: torch.device) -> None:
    """Compile what `logprobs_of` runs on a device, where it never was."""
    _summarized(torch.ones(1, 1, device=device), 1)


@torch.inference_mode()
def score(piece: Slice, logits: torch.Tensor) -> None:
    """Note the log-probabilities of prompt tokens. `logits` [P, V] are those of the slice's `scored` places."""
    sequence = piece.sequence
    assert sequence.scored is not None, "nobody asked for them"
    token_ids = [sequence.token_ids[place + 1] for place in piece.scored]
    jobs = [sequence.job] * len(token_ids)
    sequence.scored += logprobs_of(logits.float(), token_ids, jobs)


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


def _summarized(logits: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Rows [R, V], two norms [R, 2] to subtract from them, and their largest values with their places [R, most]."""
    if logits.device.type == "cpu":
        return logits, *summarize(logits, most)
    logprobs = logits.log_softmax(-1)
    return logprobs, logprobs.new_zeros(len(logprobs), 2), *logprobs.topk(most)


def _gathered(rows: torch.Tensor, ids: Rows[Rows[int]]) -> torch.Tensor:
    """[R, n]: of each row the values of its ids, and others behind where it has less than the most."""
    width = max(map(len, ids))
    index = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], device=rows.device)
    return rows.gather(1, index)
