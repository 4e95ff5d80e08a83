"""AdamW over whole tensors in host memory: the kernel's face for a changing list of tensors.

Used where every element moves at every step: by :class:`zenflow.CPUAdamW`, and by ZenFlowAdamW's device side on the
host accelerator (selected columns, small parameters).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._core import AdamTensors, Pool
from .config import Hyper

__all__ = ["DenseAdamW", "DenseGroup", "DenseState", "DenseUpdate", "adopt_weight"]

# Elements that are compared at once when a weight is taken for the master.
_ADOPTED_NUMEL = 1 << 20

# Hyper-parameters, gradient scale (negative to maximize), and whether the weight decay is decoupled.
DenseGroup = tuple[Hyper, float, bool]


@dataclass(eq=False)
class DenseState:
    """One tensor: ``weight`` is written; ``master_weight`` (fp32) is None where an fp32 weight is its own master."""

    weight: Tensor
    master_weight: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def new(cls, weight: Tensor) -> DenseState:
        """Zero moments, in the weight's memory order; a master where the weight is 16-bit."""
        return cls(
            weight=weight.detach(),
            master_weight=None if weight.dtype == torch.float32 else weight.detach().float(),
            exp_avg=torch.zeros_like(weight, dtype=torch.float32),
            exp_avg_sq=torch.zeros_like(weight, dtype=torch.float32),
        )

    def rebind(self, weight: Tensor) -> None:
        """Goes on with other memory for the weight; where its order is another, the states follow."""
        weight = weight.detach()
        if weight.stride() != self.weight.stride():
            self.exp_avg, self.exp_avg_sq = _like(weight, self.exp_avg), _like(weight, self.exp_avg_sq)
            if self.master_weight is not None:
                self.master_weight = _like(weight, self.master_weight)
        self.weight = weight

    @property
    def kernel_master(self) -> Tensor | None:
        """What the kernel takes beside the weight."""
        return self.master_weight

    def adopt(self, weight: Tensor) -> None:
        """Takes a weight that someone else wrote for the master."""
        if self.master_weight is not None:
            adopt_weight(self.master_weight, weight)

    def wide(self) -> dict[str, Tensor]:
        """The state in fp32, as a checkpoint has it: the live tensors."""
        entry = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master_weight is not None:
            entry["master_weight"] = self.master_weight
        return entry

    def fill(self, entry: dict[str, Tensor]) -> None:
        """Takes the tensors of a checkpoint's entry, where it has them."""
        for key, target in self.wide().items():
            if key in entry:
                target.copy_(entry[key].reshape(target.shape))

    @property
    def master(self) -> Tensor:
        """The fp32 master, be it the weight itself."""
        return self.weight if self.master_weight is None else self.master_weight


def adopt_weight(master: Tensor, weight: Tensor) -> None:
    """Takes ``weight`` for ``master`` where it isn't the rounded master; elsewhere the master keeps its low bits."""
    if not master.numel():
        return
    # A few rows at a time: the temporaries of a whole parameter would count.
    rows = max(1, _ADOPTED_NUMEL * max(1, master.shape[0] if master.ndim else 1) // master.numel())
    for part, new in zip(
        torch.atleast_1d(master).split(rows), torch.atleast_1d(weight).split(rows), strict=True
    ):
        differs = part.to(new.dtype) != new
        part.copy_(torch.where(differs, new.to(part.dtype), part))


def _like(weight: Tensor, state: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=state.dtype).copy_(state)


@dataclass(frozen=True)
class DenseUpdate:
    """One tensor's share of a step: its gradient (flat order as the weight's), update count and group."""

    state: DenseState
    grad: Tensor
    k: int
    group: int


class DenseAdamW:
    """Runs updates of any subset of its tensors in one parallel region.

    The list of addresses is checked once and built anew only when a tensor was added or replaced.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._positions: dict[int, int] = {}
        self._states: list[DenseState] = []
        self._tensors: AdamTensors | None = None

    def forget(self) -> None:
        """Drops the list of addresses: a tensor was added, removed or replaced."""
        self._tensors = None

    def _register(self, updates: Sequence[DenseUpdate]) -> AdamTensors:
        known = self._positions
        if self._tensors is None or any(id(update.state) not in known for update in updates):
            if self._tensors is None:
                self._states = []
            self._states += [u.state for u in updates if self._tensors is None or id(u.state) not in known]
            self._positions = {id(state): i for i, state in enumerate(self._states)}
            self._tensors = AdamTensors(
                [state.weight for state in self._states],
                [state.master_weight for state in self._states],
                [state.exp_avg for state in self._states],
                [state.exp_avg_sq for state in self._states],
            )
        return self._tensors

    def step(self, updates: Sequence[DenseUpdate], groups: Sequence[DenseGroup]) -> None:
        """Updates every tensor of ``updates`` once; ``groups[update.group]`` has its hyper-parameters."""
        if not updates:
            return
        tensors = self._register(updates)
        tensors.step(
            self._pool,
            [self._positions[id(update.state)] for update in updates],
            [update.grad for update in updates],
            [update.k for update in updates],
            list(groups),
            [update.group for update in updates],
        )
