"""What the pipeline needs of an accelerator, and no more.

Work goes onto streams; within one it runs in order, across two only where an event says so. A copy returns at once;
its source must stay as it is until an event recorded after it has passed, and its target holds the data only then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Accelerator", "Event", "Ring", "Stream"]

# What a stream and an event are is the accelerator's own affair.
Stream: TypeAlias = Any
Event: TypeAlias = Any

# Rings a slot's doorbell: (scale of the step's gradients, whether the step is void).
Ring: TypeAlias = Callable[[float, bool], None]


class Accelerator(ABC):
    """A device that computes, two directions of copying beside it, and host memory that it can reach."""

    #: Name for reports: "host", "cuda", "simulated", ...
    name: str
    #: Where the parameters live.
    device: torch.device

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the model's own work goes to."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream for copies in one direction."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that passes when everything put on ``stream`` so far has run."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Makes what is put on ``stream`` from now on wait for ``event``. The host doesn't wait."""

    @abstractmethod
    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Puts ``target.copy_(source)`` on ``stream``."""

    @abstractmethod
    def ring(self, stream: Stream, ring: Ring, scale: float, void: bool) -> None:
        """Puts the ringing of a slot's doorbell on ``stream``, behind the copies into the slot."""

    @abstractmethod
    def allocate_staging(self, nbytes: int) -> Tensor:
        """``nbytes`` bytes (uint8) of host memory that copies run fast from and to, 64-byte aligned."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """``(free, total)`` bytes of the device."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds of a clock that never runs back."""
