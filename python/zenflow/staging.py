"""Staging slots: bounded host memory through which gradients go down and weights come up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Slot", "SlotPool"]


@dataclass(eq=False)
class Slot:
    """A piece of staging memory under the number that the engine knows it by."""

    engine_id: int
    memory: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.memory.numel()


class SlotPool:
    """Slots of one direction, allocated when first needed, up to ``budget`` bytes in all.

    A request that no slot can ever meet (none is large enough) is met beyond the budget: progress comes first.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], register: Callable[[Tensor], int], budget: int, nbytes: int
    ) -> None:
        self._allocate = allocate
        self._register = register
        self._budget = budget
        self._nbytes = nbytes
        self._slots: list[Slot] = []
        self._free: list[Slot] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(slot.nbytes for slot in self._slots)

    def expect(self, nbytes: int) -> None:
        """Makes every slot allocated from now on at least this large."""
        self._nbytes = max(self._nbytes, nbytes)

    def acquire(self, nbytes: int, *, beyond_budget: bool = False) -> Slot | None:
        """A free slot of at least ``nbytes``, or None until one is released."""
        for i, slot in enumerate(self._free):
            if slot.nbytes >= nbytes:
                return self._free.pop(i)
        size = max(nbytes, self._nbytes)
        fits = self.nbytes + size <= self._budget
        if not fits and not beyond_budget and any(slot.nbytes >= nbytes for slot in self._slots):
            return None
        memory = self._allocate(size)
        slot = Slot(self._register(memory), memory)
        self._slots.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Gives a slot back."""
        self._free.append(slot)
