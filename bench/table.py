"""Results as CSV, each line written as soon as it is measured: what is cut short keeps what it has."""

from __future__ import annotations

import csv
import datetime
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class Table:
    """Lines with the columns `date`, `device` and `columns`, on standard output and in a file.

    Args:
        output: the file; None for standard output alone.
    """

    def __init__(self, device: torch.device, columns: Iterable[str], output: Path | None) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
        self._about = {"date": datetime.date.today().isoformat(), "device": name}
        self._files = [sys.stdout, *([output.open("w", newline="")] if output else [])]
        self._writers = [csv.DictWriter(file, [*self._about, *columns]) for file in self._files]
        for writer in self._writers:
            writer.writeheader()

    def add(self, line: dict[str, Any]) -> None:
        for writer, file in zip(self._writers, self._files, strict=True):
            writer.writerow(self._about | line)
            file.flush()
