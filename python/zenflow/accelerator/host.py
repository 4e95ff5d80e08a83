"""No accelerator: parameters, gradients and states all live in host memory, and every copy has run when it returns.

Training on a CPU works this way and is useful: the worker's cores update the deferred columns while torch's compute
the next forward and backward.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from zenflow.errors import HostMemoryError

from .base import Accelerator, Event, Ring, Stream

__all__ = ["HostAccelerator"]

_ALIGNMENT = 64


class HostAccelerator(Accelerator):
    """The CPU as its own accelerator: one stream, on which everything runs at once."""

    name = "host"
    device = torch.device("cpu")

    def current_stream(self) -> Stream:
        return None

    def new_stream(self) -> Stream:
        return None

    def record(self, stream: Stream) -> Event:
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def ring(self, stream: Stream, ring: Ring, scale: float, void: bool) -> None:
        ring(scale, void)

    def allocate_staging(self, nbytes: int) -> Tensor:
        try:
            memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(f"could not allocate {nbytes} bytes for a staging slot: {error}") from error
        offset = -memory.data_ptr() % _ALIGNMENT
        return memory[offset : offset + nbytes]

    def memory(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def clock(self) -> float:
        return time.perf_counter()
