"""A parameter that moves whole at every step: its state, and what others do to its weight between two steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense_adamw import DenseState
from .lean_state import LeanState
from .matrix import is_dense
from .parameters import stamp_of

__all__ = ["DenseParameter"]

# Smaller tensors keep their moments in float32: there is nothing to be saved.
_LEAN_NUMEL = 4096


class DenseParameter:
    """A parameter and its state."""

    __slots__ = ("param", "scratch", "stamp", "state")

    def __init__(self, param: Tensor, state_dtype: str = "float32") -> None:
        self.param = param
        self.scratch = _gapless(param)
        weight = param if self.scratch is None else self.scratch
        lean = state_dtype != "float32" and param.numel() >= _LEAN_NUMEL
        self.state = LeanState.lean(weight, state_dtype) if lean else DenseState.new(weight)
        self.stamp_now()

    def stamp_now(self) -> None:
        """Takes the weight as it stands for our own writing."""
        self.stamp = stamp_of(self.param)

    @property
    def changed(self) -> bool:
        """True if the parameter is no longer of the kind that was registered; other memory is fine."""
        known, param = self.state.weight, self.param
        return known.dtype != param.dtype or known.shape != param.shape or known.device != param.device

    def adopt(self) -> bool:
        """Takes the weight for the master where someone else wrote it; True if the state has other memory now."""
        known, now = self.stamp, stamp_of(self.param)
        param = self.param.detach()
        relocated = known[1] != now[1]
        if relocated:
            self.scratch = _gapless(param)
            self.state.rebind(param if self.scratch is None else self.scratch)
        elif self.scratch is not None:
            self.scratch.copy_(param)
        if known != now:
            self.state.adopt(param)
        return relocated

    def written(self) -> None:
        """Brings the kernel's writes to the parameter and to autograd's notice."""
        if self.scratch is not None:
            self.copy_back()
        else:
            # The kernel wrote behind autograd's back: a backward that still needs the old values has to fail.
            torch.autograd.graph.increment_version(self.param)
            self.stamp_now()

    def copy_back(self) -> None:
        """Brings the kernel's writes to a parameter that has gaps."""
        if self.scratch is not None:
            self.param.detach().copy_(self.scratch)
            self.stamp_now()


def _gapless(param: Tensor) -> Tensor | None:
    # A weight with gaps in its memory is updated in a gapless copy.
    return None if is_dense(param) else param.detach().contiguous()
