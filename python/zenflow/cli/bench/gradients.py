"""Accumulation: a bfloat16 gradient into a float32 sum, with and without the sum's norm and finiteness."""

from __future__ import annotations

from typing import Any

import torch

from zenflow import _core
from zenflow.cli.bench.adam_arrays import EXP_AVG, GRAD
from zenflow.cli.bench.contest import OURS, Contest
from zenflow.cli.bench.memory import Memory, tile
from zenflow.cli.bench.oracle import check_bits, check_stats, sample
from zenflow.cli.bench.setting import Setting

__all__ = ["OURS_WITHIN", "TORCH_WITHIN", "Sum", "accumulate", "accumulate_stats"]

#: Of a squared norm, against float64; torch adds up long runs in float32 and ends over 1% low at 64 Mi elements.
OURS_WITHIN, TORCH_WITHIN = 1e-6, 3e-2


class Sum:
    """A float32 ``total`` and a bfloat16 ``grad`` to add to it; ``grad32`` for peers that cast first."""

    def __init__(self, memory: Memory, numel: int) -> None:
        self.total, self.grad32 = (memory.empty(numel, torch.float32) for _ in range(2))
        self.grad = memory.filled(numel, torch.bfloat16, GRAD)
        self.numel = numel

    def reset(self) -> None:
        """Back to the start."""
        tile(self.total, EXP_AVG)

    def check(self, name: str, *, first: bool = False) -> None:
        """One addition in float32, or the gradient itself."""
        at = sample(self.numel)
        grad, start = (block[at % GRAD.numel()] for block in (GRAD.bfloat16().float(), EXP_AVG))
        check_bits(f"{name}: total", self.total[at], grad if first else start + grad)

    def add(self) -> None:
        """Torch's one call."""
        self.total.add_(self.grad)

    def cast_and_add(self) -> None:
        """Torch's faster two, where memory for a float32 copy is at hand."""
        self.grad32.copy_(self.grad)
        self.total.add_(self.grad32)

    def stats(self) -> tuple[float, bool]:
        """Return the squared norm of the total and whether it isn't finite, by torch."""
        norm = torch.linalg.vector_norm(self.total)
        return float(norm) ** 2, not bool(torch.isfinite(self.total).all())

    def roofline(self, pool: _core.Pool) -> None:
        """A pass over the same arrays."""
        _core.roofline(pool, self.grad, [self.total])


def accumulate(setting: Setting) -> Contest:
    """The sum alone (ours learns norm and finiteness besides)."""
    arrays = Sum(setting.memory, setting.numel)
    contest = Contest(
        setting.numel,
        arrays.reset,
        lambda name, _: arrays.check(name),
        lambda: arrays.roofline(setting.pool),
    )
    contest.enter(OURS, lambda: _core.accumulate(setting.pool, arrays.total, arrays.grad))
    if "torch" in setting.peers:
        contest.enter_peer("torch", lambda: arrays.add, "add_")
        contest.enter_peer("torch cast", lambda: arrays.cast_and_add, "copy_ to float32, add_")
    return contest


def accumulate_stats(setting: Setting) -> Contest:
    """The sum, its squared norm, and whether all of it is finite."""
    arrays = Sum(setting.memory, setting.numel)

    def check(name: str, found: Any) -> None:
        arrays.check(name)
        check_stats(name, found, arrays.total, OURS_WITHIN if name == OURS else TORCH_WITHIN)

    def add() -> tuple[float, bool]:
        arrays.add()
        return arrays.stats()

    def cast_and_add() -> tuple[float, bool]:
        arrays.cast_and_add()
        return arrays.stats()

    contest = Contest(setting.numel, arrays.reset, check, lambda: arrays.roofline(setting.pool))
    contest.enter(OURS, lambda: _core.accumulate(setting.pool, arrays.total, arrays.grad))
    if "torch" in setting.peers:
        stats = "vector_norm, isfinite, all"
        contest.enter_peer("torch", lambda: add, f"add_, {stats}")
        contest.enter_peer("torch cast", lambda: cast_and_add, f"copy_ to float32, add_, {stats}")
    return contest
