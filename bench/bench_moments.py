"""Moments only: what happens to a stripe at every step at which it doesn't close."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from harness import contest
from zenflow import _core
from zenflow.cli.bench.adam_arrays import EXP_AVG, EXP_AVG_SQ, GRAD
from zenflow.cli.bench.memory import Memory, tile
from zenflow.cli.bench.oracle import HYPER, check_close, moments64, sample

#: A bf16 gradient and two moments read, the moments written.
BYTES = 18
MOMENTS_ONLY = bytes([1])
#: Bytes of a slot before its gradients: the doorbell.
HEADER = 64


class Moments:
    """One parameter in an engine, its gradient in a slot; each call is a ticket that is submitted, rung and awaited."""

    def __init__(self, memory: Memory, numel: int) -> None:
        self.engine = _core.Engine(_core.all_cores())
        parameter = self.engine.add_parameter(numel)
        _, exp_avg, exp_avg_sq = self.engine.arrays(parameter)
        self.exp_avg, self.exp_avg_sq = (torch.from_numpy(np.asarray(x)) for x in (exp_avg, exp_avg_sq))
        self.bucket = self.engine.add_bucket([(parameter, 0, numel)])
        slot = memory.empty(HEADER + 2 * numel, torch.uint8)
        self.slot = self.engine.add_slot(slot)
        self.grad = slot[HEADER:].view(torch.bfloat16)

    def __call__(self) -> None:
        submitted = self.engine.submit(
            self.bucket, self.slot, None, MOMENTS_ONLY, "bfloat16", "bfloat16", HYPER
        )
        assert submitted
        self.engine.ring(self.slot)
        (done,) = self.engine.wait(60.0)
        assert done == (self.bucket, self.slot, None, False)


@pytest.fixture
def engine_moments(memory: Memory, numel: int) -> Iterator[Moments]:
    moments = Moments(memory, numel)
    yield moments
    moments.engine.close()


def check(name: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    at = sample(exp_avg.numel())
    block = at % GRAD.numel()
    grad = GRAD[block].bfloat16().double()
    expected = moments64(EXP_AVG[block].double(), EXP_AVG_SQ[block].double(), grad)
    check_close(f"{name}: exp_avg", exp_avg[at], expected[0], moved=1e-3)
    check_close(f"{name}: exp_avg_sq", exp_avg_sq[at], expected[1], moved=1e-5)


def test_moments(
    benchmark: BenchmarkFixture,
    pool: _core.Pool,
    memory: Memory,
    numel: int,
    engine_moments: Moments,
) -> None:
    """Through the engine: ticket, doorbell, worker, completion; against torch's calls on arrays of its own."""
    _, beta1, beta2, _, _ = HYPER
    ours = engine_moments
    exp_avg, exp_avg_sq, grad32 = (memory.empty(numel, torch.float32) for _ in range(3))
    grad = memory.filled(numel, torch.bfloat16, GRAD)

    def torch_moments() -> None:
        grad32.copy_(grad)
        exp_avg.lerp_(grad32, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad32, grad32, value=1 - beta2)

    for moments in (ours.exp_avg, exp_avg):
        tile(moments, EXP_AVG)
    for moments in (ours.exp_avg_sq, exp_avg_sq):
        tile(moments, EXP_AVG_SQ)
    tile(ours.grad, GRAD)
    ours()
    check("zenflow", ours.exp_avg, ours.exp_avg_sq)
    torch_moments()
    check("torch", exp_avg, exp_avg_sq)
    contest(
        benchmark,
        "moments",
        numel=numel,
        bytes_per_element=BYTES,
        ours=ours,
        ours_name="zenflow engine ticket",
        peers={"torch cast, lerp_, mul_, addcmul_": torch_moments},
        roofline=lambda: _core.roofline(pool, grad, [exp_avg, exp_avg_sq]),
    )
