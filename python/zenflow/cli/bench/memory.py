"""Memory for benchmarks: huge pages, and no two arrays at the same place in the caches."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Memory", "huge_share", "noise", "tile"]

#: Bytes by which each array starts later on its page than the one before. Arrays of a power-of-two size otherwise lie a
#: power of two apart: their streams then fight for the same cache sets and memory banks, and torch's fused AdamW takes
#: three times as long, ours 1.3 times. 64 KiB, 1 KiB and a line: another set of every cache, another bank.
STAGGER = 64 * 1024 + 1024 + 64


class Memory:
    """Gives out arrays, each in a mapping of its own that lives as long as the tensor does."""

    def __init__(self) -> None:
        self._given = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An array of zeros, aligned to a cache line."""
        # Past 16 arrays the places come again; that is more than any benchmark streams at once.
        offset = self._given % 16 * STAGGER
        self._given += 1
        # Private: of shared memory, which is mmap's default, Linux makes huge pages only where it is told to.
        size = offset + max(numel, 1) * dtype.itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype, offset=offset)[:numel]

    def filled(self, numel: int, dtype: torch.dtype, block: Tensor) -> Tensor:
        """An array filled by :func:`tile`."""
        array = self.empty(numel, dtype)
        tile(array, block)
        return array


def huge_share() -> float | None:
    """Return the share of this process's memory that lies in huge pages; None where the system doesn't say."""
    rollup = Path("/proc/self/smaps_rollup")
    try:
        text = rollup.read_text(encoding="ascii")
    except OSError:
        return None
    found = {name: int(kib) for name, kib in re.findall(r"(Anonymous|AnonHugePages): +(\d+) kB", text)}
    return found["AnonHugePages"] / found["Anonymous"] if found.get("Anonymous") else None


#: Odd, so that the pattern falls differently on every chunk.
BLOCK = 1_000_003


def noise(seed: int, scale: float) -> Tensor:
    """A block of normally distributed numbers, fp32, of the standard deviation ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCK, generator=generator).mul_(scale)


def tile(array: Tensor, block: Tensor) -> None:
    """Writes ``block`` over and over, rounded to the array's dtype. Drawing each number anew would take minutes."""
    for start in range(0, array.numel(), block.numel()):
        part = array[start : start + block.numel()]
        part.copy_(block[: part.numel()])
