"""Moments only, through an engine: what happens to a stripe at every step at which it doesn't close."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from zenflow import _core
from zenflow.cli.bench.adam_arrays import EXP_AVG, EXP_AVG_SQ, GRAD
from zenflow.cli.bench.contest import OURS, Contest
from zenflow.cli.bench.memory import Memory, tile
from zenflow.cli.bench.oracle import HYPER, check_close, moments64, sample
from zenflow.cli.bench.setting import Setting

__all__ = ["Moments", "Ticket", "TorchMoments", "moments"]

MOMENTS_ONLY = bytes([1])
#: Bytes of a slot before its gradients: the doorbell.
HEADER = 64


class Ticket:
    """One parameter in an engine, its gradient in a slot; each call is a ticket that is submitted, rung and awaited."""

    def __init__(self, setting: Setting, **options: str) -> None:
        numel = setting.numel
        self.engine = _core.Engine(setting.cores)
        self.parameter = self.engine.add_parameter(numel, **options)
        self.bucket = self.engine.add_bucket([(self.parameter, 0, numel)])
        slot = setting.memory.empty(HEADER + 2 * numel, torch.uint8)
        self.slot = self.engine.add_slot(slot)
        self.grad = slot[HEADER:].view(torch.bfloat16)
        tile(self.grad, GRAD)

    def __call__(self) -> None:
        """Submit, ring, wait."""
        submitted = self.engine.submit(
            self.bucket, self.slot, None, MOMENTS_ONLY, "bfloat16", "bfloat16", HYPER
        )
        if not submitted:
            raise RuntimeError("the engine's ring is full")
        self.engine.ring(self.slot)
        done = self.engine.wait(60.0)
        if done != [(self.bucket, self.slot, None, False)]:
            raise RuntimeError(f"the engine completed {done} within 60 seconds")

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the engine's own arrays."""
        _, exp_avg, exp_avg_sq = self.engine.arrays(self.parameter)
        return torch.from_numpy(np.asarray(exp_avg)), torch.from_numpy(np.asarray(exp_avg_sq))


class Moments:
    """``exp_avg`` and ``exp_avg_sq`` in one dtype, wherever they lie."""

    def __init__(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self.exp_avg, self.exp_avg_sq = exp_avg, exp_avg_sq

    def reset(self) -> None:
        """Back to the start."""
        tile(self.exp_avg, EXP_AVG)
        tile(self.exp_avg_sq, EXP_AVG_SQ)

    def check(self, name: str) -> None:
        """All are what a gradient makes of the start."""
        at = sample(self.exp_avg.numel())
        block = at % GRAD.numel()
        grad = GRAD[block].bfloat16().double()
        expected = moments64(EXP_AVG[block].double(), EXP_AVG_SQ[block].double(), grad)
        check_close(f"{name}: exp_avg", self.exp_avg[at], expected[0], moved=1e-3)
        check_close(f"{name}: exp_avg_sq", self.exp_avg_sq[at], expected[1], moved=1e-5)


class TorchMoments(Moments):
    """The same by torch's calls, on arrays of its own; the roofline goes over these, too."""

    def __init__(self, memory: Memory, numel: int) -> None:
        super().__init__(memory.empty(numel, torch.float32), memory.empty(numel, torch.float32))
        self.grad32 = memory.empty(numel, torch.float32)
        self.grad = memory.filled(numel, torch.bfloat16, GRAD)

    def __call__(self) -> None:
        """The moments after one more gradient."""
        _, beta1, beta2, _, _ = HYPER
        self.grad32.copy_(self.grad)
        self.exp_avg.lerp_(self.grad32, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(self.grad32, self.grad32, value=1 - beta2)

    def roofline(self, pool: _core.Pool) -> None:
        """A pass over the same arrays."""
        _core.roofline(pool, self.grad, [self.exp_avg, self.exp_avg_sq])


def moments(setting: Setting) -> Contest:
    """Ticket, doorbell, worker, completion; against torch's calls."""
    ticket = Ticket(setting)
    ours, theirs = Moments(*ticket.moments()), TorchMoments(setting.memory, setting.numel)

    def reset() -> None:
        ours.reset()
        theirs.reset()

    def check(name: str, _: Any) -> None:
        (ours if name == OURS else theirs).check(name)

    contest = Contest(
        setting.numel, reset, check, lambda: theirs.roofline(setting.pool), close=ticket.engine.close
    )
    contest.enter(OURS, ticket, "an engine's ticket")
    if "torch" in setting.peers:
        contest.enter_peer("torch", lambda: theirs, "copy_ to float32, lerp_, mul_, addcmul_")
    return contest
