"""What a work moves through memory, and the bare pass over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow import _core
from zenflow.cli.bench.contest import Call
from zenflow.cli.bench.memory import Memory

__all__ = ["BARE", "Passes", "Streams"]


@dataclass(frozen=True)
class Streams:
    """The dtypes of the arrays that a work can't but read, read and write, and write."""

    read: torch.dtype
    updates: tuple[torch.dtype, ...] = ()
    write: torch.dtype | None = None

    @property
    def bytes_per_element(self) -> int:
        """Bytes moved."""
        written = self.write.itemsize if self.write else 0
        return self.read.itemsize + 2 * sum(dtype.itemsize for dtype in self.updates) + written

    @property
    def footprint(self) -> int:
        """Bytes an element that the arrays take."""
        arrays = (self.read, *self.updates, *((self.write,) if self.write else ()))
        return sum(dtype.itemsize for dtype in arrays)


#: Passes that are no work's: reading alone, and copying.
BARE = {"read": Streams(torch.float32), "copy": Streams(torch.float32, (), torch.float32)}


class Passes:
    """Passes over streams of ``numel`` elements, which share their arrays."""

    def __init__(self, memory: Memory, numel: int) -> None:
        self._memory = memory
        self._numel = numel
        self._arrays: dict[torch.dtype, list[Tensor]] = {}

    def call(self, pool: _core.Pool, streams: Streams) -> Call:
        """Return the call that makes a pass on ``pool``."""
        taken: dict[torch.dtype, int] = {}
        read, *updates = (self._array(dtype, taken) for dtype in (streams.read, *streams.updates))
        write = self._array(streams.write, taken) if streams.write else None
        return lambda: _core.roofline(pool, read, updates, write)

    def _array(self, dtype: torch.dtype, taken: dict[torch.dtype, int]) -> Tensor:
        """Return an array that this pass hasn't taken, and the next one may."""
        arrays = self._arrays.setdefault(dtype, [])
        index = taken.get(dtype, 0)
        taken[dtype] = index + 1
        if index == len(arrays):
            # Filled, or all of it would be one page of zeros.
            arrays.append(self._memory.empty(self._numel, dtype).fill_(1))
        return arrays[index]
