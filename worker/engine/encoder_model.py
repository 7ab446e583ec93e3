"""An embedding model or a classifier: token ids of several texts in, a vector of each out, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ...shared.errors import ModelRefused
from ...shared.messages import Task
from ..settings import WorkerSettings
from .model_folder import MODEL_ERRORS, one_line, quiet
from .pooling import Pooler, read_pooler


class EncoderModel:
    """transformers' own model with its own attention: a batch is padded at its end, and the padding is masked.

    Attributes:
        width: numbers of each result: the embedding's dimensions, or the classes.
    """

    def __init__(self, model: Any, pooler: Pooler | None, device: torch.device) -> None:
        self._model = model
        self._pooler = pooler
        self._device = device
        self._pad = int(getattr(model.config.get_text_config(), "pad_token_id", None) or 0)
        # A classifier over a decoder looks for the last token that is not padding, which a text may well end with, and
        # refuses batches where the model has no padding. Its head is run here, on the last tokens.
        self._head = getattr(model, "score", None) if pooler is None else None
        self.width = int(self.run([[self._pad]]).shape[1])

    @torch.inference_mode()
    def run(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Results [B, width] float32 on the CPU."""
        lengths = torch.tensor([len(ids) for ids in texts], device=self._device)
        longest = max(map(len, texts))
        ids = torch.tensor([[*ids, *[self._pad] * (longest - len(ids))] for ids in texts], device=self._device)
        padded = any(len(text) < longest for text in texts)
        mask = (torch.arange(longest, device=self._device)[None, :] < lengths[:, None]).long() if padded else None
        return self._forward(ids, mask, lengths).float().cpu()

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor) -> torch.Tensor:
        if self._pooler is not None:
            return self._pooler(self._model(input_ids=ids, attention_mask=mask).last_hidden_state, lengths)
        if self._head is None:
            logits: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).logits
            return logits
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        scores: torch.Tensor = self._head(hidden[torch.arange(len(ids), device=self._device), lengths - 1])
        return scores


def load_encoder(
    folder: Path, settings: WorkerSettings, task: Task, *, dtype: torch.dtype, device: torch.device
) -> EncoderModel:
    """Load weights and try the model on one token.

    Raises:
        ModelRefused: the folder is broken, weights are missing, or the architecture is no encoder of texts.
    """
    auto = transformers.AutoModel if task == "embed" else transformers.AutoModelForSequenceClassification
    from_pretrained: Any = auto.from_pretrained  # its types know no loading info
    try:
        with quiet():
            model, info = from_pretrained(
                folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except MODEL_ERRORS as e:
        raise ModelRefused(f"--model {folder}: cannot be loaded to {task}: {one_line(e)}") from e
    kind, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"--model {folder}: {kind} is an encoder-decoder, which does not {task} texts here")
    # Checkpoints of embedding models leave out the pooler of BERT's pre-training, which only `cls` heads read.
    missing = sorted(key for key in info["missing_keys"] if task == "classify" or not key.startswith("pooler."))
    if missing:
        raise ModelRefused(f"--model {folder}: {len(missing)} weights are missing, such as {', '.join(missing[:3])}")
    model = model.to(device).eval().requires_grad_(False)
    try:
        pooler = None
        if task == "embed":
            pooler = read_pooler(folder, settings, default="last" if _causal(model) else "mean", device=device)
        return EncoderModel(model, pooler, device)
    except MODEL_ERRORS as e:
        raise ModelRefused(f"--model {folder}: {kind} failed to {task} a first text: {one_line(e)}") from e


@torch.inference_mode()
def _causal(model: Any) -> bool:
    """Whether a token's hidden state is the same with and without another one behind it."""
    ids = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    alone, followed = (model(input_ids=part).last_hidden_state[0, 1] for part in (ids[:, :2], ids))
    return bool(torch.allclose(alone, followed, rtol=1e-2, atol=1e-2 * float(alone.abs().max())))
