"""Vectors as answers: `/v1/embeddings`, `/encode`, `/classify`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...shared.codec import decode_vector, encode_vector
from ...shared.errors import EngineError
from ..plan import Plan
from ..protocol.embeddings import ClassifyBody, EmbeddingsBody, EncodeBody, EncodeMeta
from .results import Choice


def embeddings_body(plan: Plan, choices: Sequence[Choice]) -> EmbeddingsBody:
    """OpenAI's list, in the order of the inputs."""
    tokens = sum(choice.usage.prompt_tokens for choice in choices)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _embedding(plan, choice)}
            for i, choice in enumerate(choices)
        ],
        "model": plan.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def encode_body(
    plan: Plan, choices: Sequence[Choice]
) -> EncodeBody | ClassifyBody | list[EncodeBody] | list[ClassifyBody]:
    """A single text's answer stands alone, several in a list."""
    if plan.endpoint == "/encode":
        encoded = [_encoded(plan, i, choice) for i, choice in enumerate(choices)]
        return encoded[0] if len(encoded) == 1 else encoded
    classified = [_classified(plan, i, choice) for i, choice in enumerate(choices)]
    return classified[0] if len(classified) == 1 else classified


def _encoded(plan: Plan, index: int, choice: Choice) -> EncodeBody:
    return {"embedding": _embedding(plan, choice), "meta_info": _meta(plan, index, choice)}


def _classified(plan: Plan, index: int, choice: Choice) -> ClassifyBody:
    logits = _vector(choice).astype(np.float64)
    body: ClassifyBody = {"logits": logits.tolist(), "meta_info": _meta(plan, index, choice)}
    if len(logits) > 1:
        labels = [plan.labels[i] if i < len(plan.labels) else f"LABEL_{i}" for i in range(len(logits))]
        scores = 1 / (1 + np.exp(-logits)) if plan.multi_label else _softmax(logits)
        body["scores"], body["labels"], body["label"] = scores.tolist(), labels, labels[int(logits.argmax())]
    return body


def _meta(plan: Plan, index: int, choice: Choice) -> EncodeMeta:
    return {"id": plan.rids[index], "prompt_tokens": choice.usage.prompt_tokens}


def _embedding(plan: Plan, choice: Choice) -> list[float] | str:
    vector = _vector(choice)
    if plan.dimensions and plan.dimensions < len(vector):
        # Models trained for it keep their meaning in the first dimensions; what was of length 1 stays so.
        unit = abs(float(np.linalg.norm(vector)) - 1) < 1e-3
        vector = vector[: plan.dimensions]
        length = float(np.linalg.norm(vector))
        vector = vector / length if unit and length > 0 else vector
    return encode_vector(vector) if plan.base64 else vector.tolist()


def _vector(choice: Choice) -> npt.NDArray[np.float32]:
    if choice.finish is None or choice.finish.data is None:
        raise EngineError("a text was embedded or classified and no vector came: its worker is of another release")
    return decode_vector(choice.finish.data)


def _softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    out: npt.NDArray[np.float64] = weights / weights.sum()
    return out
