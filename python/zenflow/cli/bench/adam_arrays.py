"""The arrays of an AdamW update, where every contender starts from the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow import _core
from zenflow.cli.bench.contest import OURS
from zenflow.cli.bench.memory import Memory, noise, tile
from zenflow.cli.bench.oracle import HYPER, K, adamw64, check_bits, check_close, sample

__all__ = ["EXP_AVG", "EXP_AVG_SQ", "GRAD", "GROUP", "WEIGHT", "AdamArrays", "split"]

WEIGHT, EXP_AVG, EXP_AVG_SQ, GRAD = (
    noise(seed, scale) for seed, scale in enumerate((0.02, 1e-3, 1e-3, 1e-2))
)
EXP_AVG_SQ.square_().add_(1e-8)

#: What the kernel takes a group to be: hyper-parameters, gradient scale, decoupled decay.
GROUP = (HYPER, 1.0, True)


class AdamArrays:
    """fp32 ``weight``, ``exp_avg`` and ``exp_avg_sq``; ``grad`` in its dtype; ``out``, the weight in 16 bits, or None.

    ``grad32`` is what peers need that take a gradient only in fp32; it is ``grad`` itself where that is fp32.
    """

    def __init__(self, memory: Memory, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.weight, self.exp_avg, self.exp_avg_sq, self.grad32 = (
            memory.empty(numel, torch.float32) for _ in range(4)
        )
        narrow = dtype != torch.float32
        self.grad = memory.empty(numel, dtype) if narrow else self.grad32
        self.out = memory.empty(numel, dtype) if narrow else None
        self.reset()

    def reset(self) -> None:
        """Back to the start."""
        for array, block in (
            (self.weight, WEIGHT),
            (self.exp_avg, EXP_AVG),
            (self.exp_avg_sq, EXP_AVG_SQ),
            (self.grad, GRAD),
        ):
            tile(array, block)
        if self.out is not None:
            self.out.zero_()
            self.grad32.zero_()

    def check(self, name: str) -> None:
        """All are what update ``K`` makes of the start.

        Others may be off by ten times as much as ours in the weight's move: bias corrections in float32, such as
        DeepSpeed's and torchao's, lose five digits of 1 - beta2**step.
        """
        at = sample(self.numel)
        block = at % WEIGHT.numel()
        grad = GRAD[block].to(self.grad.dtype)
        w, m, v = (part[block].double() for part in (WEIGHT, EXP_AVG, EXP_AVG_SQ))
        weight, exp_avg, exp_avg_sq = adamw64(w, m, v, grad.double(), K)
        check_bits(f"{name}: grad", self.grad[at], grad)
        check_close(f"{name}: exp_avg", self.exp_avg[at], exp_avg, moved=1e-3)
        check_close(f"{name}: exp_avg_sq", self.exp_avg_sq[at], exp_avg_sq, moved=1e-5)
        check_close(
            f"{name}: weight", self.weight[at], weight, moved=HYPER[0] * (1 if name.startswith(OURS) else 10)
        )
        if self.out is not None:
            check_bits(f"{name}: out", self.out[at], self.weight[at].to(self.out.dtype))

    def roofline(self, pool: _core.Pool) -> None:
        """A pass over the same arrays."""
        _core.roofline(pool, self.grad, [self.weight, self.exp_avg, self.exp_avg_sq], self.out)

    def tensors(self) -> _core.AdamTensors:
        """The arrays as the kernel takes them."""
        moments = [self.exp_avg], [self.exp_avg_sq]
        if self.out is None:
            return _core.AdamTensors([self.weight], [None], *moments)
        return _core.AdamTensors([self.out], [self.weight], *moments)


def split(array: Tensor, count: int) -> list[Tensor]:
    """``count`` views of one length."""
    return list(array.view(count, -1).unbind())
