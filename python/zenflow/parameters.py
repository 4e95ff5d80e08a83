"""The records of what is offloaded: a parameter, its stripes' segments, and the buckets they travel in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .matrix import ParameterMatrix
from .ownership import DeviceColumns

__all__ = ["Bucket", "OffloadedParameter", "Segment", "stamp_of"]


def stamp_of(param: Tensor) -> tuple[int, int]:
    """What changes when a parameter is written in place or gets other memory."""
    return param._version, param.data_ptr()


@dataclass(eq=False)
class Segment:
    """Rows ``start:stop`` of a parameter: one stripe of it, or a part of one where a stripe is larger than a bucket."""

    parameter: OffloadedParameter
    phase: int
    start: int
    stop: int
    #: First element within its bucket's slots.
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements."""
        return (self.stop - self.start) * self.parameter.matrix.cols


@dataclass(eq=False)
class OffloadedParameter:
    """A parameter whose master weight and moments the engine owns.

    ``k`` counts the updates submitted; the engine counts those done. ``stamp`` is the parameter's version counter and
    address after our own last write, so that a foreign write is seen.
    """

    param: Tensor
    name: str
    #: Position among all offloaded parameters: staggers the selection.
    index: int
    group: int
    matrix: ParameterMatrix
    engine_id: int
    master_weight: Tensor
    #: Both moments where they are kept in float32, else None.
    moments: tuple[Tensor, Tensor] | None
    #: Stripes start at multiples of so many rows: where blocks of 8-bit moments do.
    grain: int = 1
    segments: list[tuple[Bucket, int]] = field(default_factory=list)
    k: int = 0
    columns: DeviceColumns | None = None
    importance: Tensor | None = None
    #: Columns that take over at the next step; chosen, but not exchanged yet.
    chosen: Tensor | None = None
    #: False until the master weight was taken from the weight or from a state dict.
    mastered: bool = False
    stamp: tuple[int, int] = (-1, 0)
    #: Numbers of the gates that may land it; empty where it lands in ``step()``.
    gates: tuple[int, ...] = ()

    @property
    def overwritten(self) -> bool:
        """True if someone else wrote into the parameter since our last write."""
        return self.stamp != stamp_of(self.param)

    def stamp_now(self) -> None:
        """Takes the weight as it stands for our own writing."""
        self.stamp = stamp_of(self.param)

    @property
    def pieces(self) -> list[Segment]:
        """Its segments, in the order of their phases and rows."""
        return [bucket.segments[i] for bucket, i in self.segments]


@dataclass(eq=False)
class Bucket:
    """A run of segments of neighbouring parameters with one phase: what one slot carries and one ticket is for."""

    engine_id: int
    phase: int
    group: int
    dtype: torch.dtype
    gates: tuple[int, ...]
    segments: list[Segment]
    #: Elements of a slot that carries it, gaps between segments included.
    numel: int
