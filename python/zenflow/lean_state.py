"""The state of a tensor with moments in bfloat16 or 8 bits, and a bfloat16 weight that is split.

A float32 master is cut in two: with ``y = bits + 0x8000``, the upper 16 bits of ``y`` are the bfloat16 weight itself
(rounded to nearest, ties away from zero), the lower 16 are ``master_low``. So what a weight lacks takes 2 bytes and not
4. A float32 weight is its own master, a float16 one has a float32 master.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._core import AdamTensors
from .dense_adamw import DenseState
from .schedule import STATE_BLOCK

__all__ = ["LeanState"]

_STORAGE = {"bfloat16": torch.bfloat16, "int8": torch.uint8}

# What a bfloat16 weight that is its own master lacks.
_NOTHING = -0x8000


@dataclass(eq=False)
class LeanState(DenseState):
    """``exp_avg`` and ``exp_avg_sq`` are as the kernel keeps them; ``scales`` (fp32) are those of 8-bit blocks."""

    master_low: Tensor | None
    scales: Tensor | None

    @classmethod
    def lean(cls, weight: Tensor, state_dtype: str) -> LeanState:
        """Zero moments, in the weight's memory order."""
        weight = weight.detach()
        blocks = -(-weight.numel() // STATE_BLOCK)
        split = weight.dtype == torch.bfloat16
        return cls(
            weight=weight,
            master_weight=weight.float() if weight.dtype == torch.float16 else None,
            exp_avg=torch.zeros_like(weight, dtype=_STORAGE[state_dtype]),
            exp_avg_sq=torch.zeros_like(weight, dtype=_STORAGE[state_dtype]),
            master_low=torch.full_like(weight, _NOTHING, dtype=torch.int16) if split else None,
            scales=torch.zeros(2 * blocks) if state_dtype == "int8" else None,
        )

    @property
    def kernel_master(self) -> Tensor | None:
        """What the kernel takes beside the weight."""
        return self.master_weight if self.master_low is None else self.master_low

    def rebind(self, weight: Tensor) -> None:
        """Goes on with other memory for the weight; where its order is another, the states follow."""
        if weight.stride() != self.weight.stride():
            # Blocks of codes lie along the memory, so they are made anew.
            wide = self.wide()
            if self.master_weight is not None:
                self.master_weight = _like(weight, self.master_weight)
            if self.master_low is not None:
                self.master_low = _like(weight, self.master_low)
            self.exp_avg, self.exp_avg_sq = (
                torch.empty_like(weight, dtype=moment.dtype) for moment in (self.exp_avg, self.exp_avg_sq)
            )
            self.weight = weight.detach()
            self._set_moments(wide["exp_avg"], wide["exp_avg_sq"])
        self.weight = weight.detach()

    def adopt(self, weight: Tensor) -> None:
        """Takes a weight that someone else wrote for the master."""
        if self.master_low is not None:
            self.master_low.fill_(_NOTHING)
        else:
            super().adopt(weight)

    def wide(self) -> dict[str, Tensor]:
        """The state in fp32, as a checkpoint has it: copies."""
        exp_avg, exp_avg_sq = (torch.empty_like(self.weight, dtype=torch.float32) for _ in range(2))
        self._kernel().read_moments(0, exp_avg, exp_avg_sq)
        entry = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if self.master_low is not None:
            entry["master_weight"] = _join(self.weight, self.master_low)
        elif self.master_weight is not None:
            entry["master_weight"] = self.master_weight
        return entry

    def fill(self, entry: dict[str, Tensor]) -> None:
        """Takes a checkpoint's tensors: moments rounded to nearest, so exactly if they came from such a state."""
        self._set_moments(
            *(_like(self.weight, entry[key], torch.float32) for key in ("exp_avg", "exp_avg_sq"))
        )
        master = entry.get("master_weight")
        if master is None:
            return
        if self.master_weight is not None:
            self.master_weight.copy_(master.reshape(self.master_weight.shape))
        elif self.master_low is not None:
            high, low = _split(_like(self.weight, master, torch.float32))
            # Where the weight is another, it is the newer.
            same = high == self.weight.view(torch.int16)
            self.master_low.copy_(torch.where(same, low, torch.full_like(low, _NOTHING)))

    def _set_moments(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self._kernel().write_moments(
            0, *(_like(self.weight, moment, torch.float32) for moment in (exp_avg, exp_avg_sq))
        )

    def _kernel(self) -> AdamTensors:
        return AdamTensors(
            [self.weight], [self.kernel_master], [self.exp_avg], [self.exp_avg_sq], [self.scales]
        )


def _like(weight: Tensor, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``source`` in the weight's shape and memory order."""
    target = torch.empty_like(weight, dtype=dtype or source.dtype)
    return target.copy_(source.detach().reshape(target.shape))


def _join(high: Tensor, low: Tensor) -> Tensor:
    bits = (high.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)
    return (bits - 0x8000).view(torch.float32)


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower halves (int16) of fp32; a NaN is made the quiet one, whose halves don't carry."""
    bits = torch.where(master.isnan(), torch.full_like(master, torch.nan), master).view(torch.int32) + 0x8000
    return (bits >> 16).to(torch.int16), _as_int16(bits)


def _as_int16(bits: Tensor) -> Tensor:
    low = bits & 0xFFFF
    return (low - ((low & 0x8000) << 1)).to(torch.int16)
