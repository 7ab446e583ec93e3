"""Copies between host and device that nobody waits for, until the numbers are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    return pinned(values, device).to(device, non_blocking=True)


def upload_ints(values: object, device: torch.device) -> torch.Tensor:
    """`upload` of whole numbers, as int64."""
    return upload(np.asarray(values, dtype=np.int64), device)


def pinned(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """On the host, where a copy to `device` need not be waited for: torch keeps pinned memory until it is done."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class Download:
    """A copy to the host of what the device has by then computed of `tensor`, which may be overwritten afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def wait(self) -> torch.Tensor:
        """The copy, once the device is done with it and with all that it was given before."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
