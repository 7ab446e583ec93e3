"""Proving at load that a model over our pool computes what transformers computes.

Three tries, each cheap: a forward with transformers' own eager attention (the reference), one that only looks (which
layers attend, over which shapes, and whom their masks let see), and a few steps over a small pool whose logits must be
those of the reference. What they cannot show at so few tokens, a window of thousands, the masks do: a mask is a
function of two positions, and is asked about far ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...shared.messages import GenerateJob, SamplingParams
from .attention import PagedAttention, attend_causal
from .backends import make_backend
from .foreign_sums import ForeignSums
from .kv_cache import LayerShape
from .plan import Slice
from .runner import ModelRunner
from .sequence import Sequence as Generation

PROBE = "headrace_probe"
_ATTRIBUTE = "headrace_probe"
_BLOCK_SIZE = 16

# How far logits may be from the reference, as a share of its length (L2): the order of sums in float32; in half
# precision each layer's rounding too, which a wrong mask or a missing position is far above.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# Steps as (sequence, start, end): a chunk beside a whole prompt, a chunk over cached tokens beside a decode, decodes.
_STEPS = (
    ((0, 0, 13), (1, 0, 5)),
    ((0, 13, 26), (1, 5, 6)),
    *(((0, 26 + n, 27 + n), (1, 6 + n, 7 + n)) for n in range(3)),  # a program is recorded at the first, and runs on
)
_LENGTHS = (29, 9)


class Mismatch(Exception):
    """The model does not compute over our pool what it should. The text completes "<architecture> …"."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Two short random prompts and transformers' own logits of each of their tokens [T, vocabulary] float32."""

    prompts: tuple[list[int], ...]
    logits: tuple[torch.Tensor, ...]


@torch.inference_mode()
def reference(model: Any, vocab_size: int, device: torch.device) -> Reference:
    """Raises Mismatch where the logits are not finite."""
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS)
    logits = tuple(model(torch.tensor([ids], device=device), use_cache=False).logits[0].float() for ids in prompts)
    if not all(bool(rows.isfinite().all()) for rows in logits):
        raise Mismatch("gives logits that are not finite; try --dtype float32")
    return Reference(prompts, logits)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a model computed over a pool.

    Attributes:
        invariant: whether a row of any batch is what it is alone: the logits were the same bit for bit when each prompt
            was computed alone and in one piece, and nothing had a part in them that sums by the size of its batch.
        rows: the logits [vocabulary] float32 of each step.
    """

    invariant: bool
    rows: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Look:
    """What a forward showed of a model's layers."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    bidirectional: set[int] = field(default_factory=set)
    masks: dict[int, tuple[torch.Tensor | None, int | None]] = field(default_factory=dict)  # and the sliding window


@torch.inference_mode()
def look(model: Any, device: torch.device) -> Look:
    """Run a few tokens through a model whose attention implementation is `PROBE`."""
    seen = Look()
    modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    for module in modules:
        setattr(module, _ATTRIBUTE, seen)
    try:
        ids = torch.arange(1, 5, device=device)[None]
        model(input_ids=ids, position_ids=ids - 1, use_cache=False)
    finally:
        for module in modules:
            delattr(module, _ATTRIBUTE)
    return seen


def layers_of(seen: Look, num_layers: int, context_length: int) -> tuple[LayerShape, ...]:
    """The shapes of all layers.

    Raises:
        Mismatch: a layer does not attend, or not once, or sees other tokens than ours would below `context_length`.
    """
    missing = sorted(set(range(num_layers)) - seen.shapes.keys())
    if missing:
        raise Mismatch(f"has layers that do not attend through our function: {missing}")
    if seen.bidirectional:
        raise Mismatch("attends to later tokens, so it cannot generate")
    beyond = sorted(seen.shapes.keys() - set(range(num_layers)))
    repeated = beyond + sorted(layer for layer, calls in seen.calls.items() if calls > 1)
    if repeated:
        raise Mismatch(f"attends more than once in layers {repeated}")
    differ = [layer for layer, (mask, window) in seen.masks.items() if not _is_ours(mask, window, context_length)]
    if differ:
        raise Mismatch(
            f"lets layers {sorted(differ)} see other tokens than those before, or than a sliding window of them, "
            f"within a context of {context_length} tokens"
        )
    return tuple(seen.shapes[layer] for layer in range(num_layers))


def prove(
    model: nn.Module,
    attention: PagedAttention,
    layers: Sequence[LayerShape],
    wanted: Reference,
    tolerance: float | None = None,
    *,
    like: Proof | None = None,
    backend: str = "auto",
    invariant: bool = False,
) -> Proof:
    """Compute the reference's prompts over a small pool: chunks, decodes, and both in one batch.

    Args:
        tolerance: how far the logits may be apart, as a share of their length; None: as the dtype rounds.
        like: of the same weights, rounded as they are: only the order of sums may be another.
        backend, invariant: as in `make_backend`.

    Raises:
        Mismatch: with how far the logits are from the reference.
    """
    parameter = next(model.parameters())
    blocks = [-(-length // _BLOCK_SIZE) for length in _LENGTHS]
    over = make_backend(
        backend,
        layers,
        num_blocks=1 + sum(blocks),
        block_size=_BLOCK_SIZE,
        dtype=parameter.dtype,
        device=parameter.device,
        invariant=invariant,
    )
    tables = [list(range(1, 1 + blocks[0])), list(range(1 + blocks[0], 1 + sum(blocks)))]
    runner, sums = ModelRunner(model, attention, over), ForeignSums()
    rows, expected, last = list[torch.Tensor](), list[torch.Tensor](), dict[int, torch.Tensor]()
    for step in _STEPS:
        with sums:
            computed = runner.run([_slice(n, wanted.prompts[n], tables[n], start, end) for n, start, end in step])
        for piece, row in zip(computed.sampled, computed.logits, strict=True):
            expected.append(wanted.logits[piece.sequence.arrival][piece.end - 1])
            rows.append(row)
            last[piece.sequence.arrival] = row
    alone = [runner.run([_slice(n, ids, tables[n], 0, len(ids))]).logits[-1] for n, ids in enumerate(wanted.prompts)]
    attention.backend = None
    tolerance = _TOLERANCE[parameter.dtype] if tolerance is None else tolerance
    _check(rows, expected, tolerance, "over our pool than with transformers' eager attention")
    if like is not None:
        _check(rows, like.rows, _TOLERANCE[parameter.dtype], "than with its layers' own forward")
    same = all(torch.equal(row, last[number]) for number, row in enumerate(alone))
    return Proof(same and not sums.found, tuple(rows))


def _check(rows: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float, how: str) -> None:
    """Raises Mismatch where a row is further from what is expected than `tolerance` times its length."""
    apart = [float((row - other).norm() / other.norm()) for row, other in zip(rows, expected, strict=True)]
    if not all(distance <= tolerance for distance in apart):  # NaN is none
        raise Mismatch(
            f"gives other logits {how}: {max(apart):.2g} of their length apart, where rounding explains {tolerance:g}"
        )


def _slice(number: int, prompt: list[int], table: list[int], start: int, end: int) -> Slice:
    job = GenerateJob("trial", "", "", "", tuple(prompt), SamplingParams())
    sequence = Generation(
        job=job,
        token_ids=prompt[:end],
        num_prompt_tokens=len(prompt),
        max_tokens=len(prompt),
        stop_ids=frozenset(),
        seed=0,
        arrival=number,
        block_table=table,
    )
    return Slice(sequence, start, end - start)


def _is_ours(mask: torch.Tensor | None, window: int | None, context_length: int) -> bool:
    """Whether a mask lets see what ours would: tokens before, the last `window` of them where there is one.

    A layer without a mask says nothing here; the numbers will.
    """
    allows: Callable[..., Any] | None = getattr(mask, _ATTRIBUTE, None)
    if allows is None:
        return True
    near = range(min(12, context_length))
    far = [(1 << k) + d for k in range(3, context_length.bit_length() + 1) for d in (-1, 0, 1)]
    edges = [] if window is None else [window - 1, window, window + 1, 2 * window]
    places = torch.tensor(sorted({p for p in (*near, *far, *edges, context_length - 1) if 0 <= p < context_length}))
    q = places[:, None]
    kv = torch.cat([places.expand(len(places), -1), (q - places).clamp(min=0)], dim=1)
    ours = kv <= q
    if window is not None:
        ours = ours & (kv > q - window)
    try:
        theirs = allows(torch.tensor(0), torch.tensor(0), q, kv)
    except (IndexError, RuntimeError):  # it looks at more than two positions
        return False
    return bool((torch.as_tensor(theirs).cpu() == ours).all())


def _probe_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **_: Any
) -> torch.Tensor:
    """A mask that only carries the function it should be made from."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, _ATTRIBUTE, mask_function)
    return mask


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Note what a layer asks for; [1, H, T, D] → [1, T, H, Dv]."""
    seen: Look = getattr(module, _ATTRIBUTE)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    seen.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
    seen.calls[layer] += 1
    seen.masks[layer] = (attention_mask, sliding_window)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        seen.bidirectional.add(layer)
    return attend_causal(query[0], key[0], value[0], 1.0)[None], None


ALL_ATTENTION_FUNCTIONS.register(PROBE, _probe_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _probe_mask)
