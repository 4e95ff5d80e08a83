"""Passes over gradients: accumulation, the norm with the non-finite check, casts."""

from __future__ import annotations

import math

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness import compete, contest
from zenflow import _core
from zenflow.cli.bench import peers
from zenflow.cli.bench.adam_arrays import EXP_AVG
from zenflow.cli.bench.gradients import OURS_WITHIN, TORCH_WITHIN, Sum
from zenflow.cli.bench.memory import Memory
from zenflow.cli.bench.oracle import check_bits, check_stats, sample
from zenflow.cli.bench.setting import Setting


@pytest.fixture
def arrays(memory: Memory, numel: int) -> Sum:
    return Sum(memory, numel)


@pytest.mark.parametrize("work", ["accumulate", "accumulate_stats"])
def test_accumulate(
    benchmark: BenchmarkFixture, pool: _core.Pool, memory: Memory, numel: int, work: str
) -> None:
    """bf16 into fp32, alone and with the norm and whether all is finite."""
    compete(benchmark, work, Setting(numel, pool, _core.all_cores(), peers.names(), memory))


def test_accumulate_sees_infinity(pool: _core.Pool, arrays: Sum) -> None:
    """What the contest's numbers, all finite, don't show."""
    arrays.reset()
    arrays.total[-1] = math.inf
    assert _core.accumulate(pool, arrays.total, arrays.grad)[1]


def test_accumulate_first(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """The first of a sum: a cast from bf16 to fp32 that learns the norm."""

    def ours() -> tuple[float, bool]:
        return _core.accumulate(pool, arrays.total, arrays.grad, first=True)

    def cast() -> None:
        arrays.total.copy_(arrays.grad)

    check_stats("zenflow", ours(), arrays.grad, OURS_WITHIN)
    arrays.check("zenflow", first=True)
    arrays.total.zero_()
    cast()
    arrays.check("torch", first=True)
    contest(
        benchmark,
        "accumulate_first: bf16 to fp32",
        numel=numel,
        bytes_per_element=6,
        ours=ours,
        peers={"torch total.copy_(grad), no norm": cast},
        roofline=lambda: _core.roofline(pool, arrays.grad, [], arrays.total),
    )


def test_grad_stats(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """The squared norm of a bf16 gradient and whether it is finite."""

    def ours() -> tuple[float, bool]:
        return _core.grad_stats(pool, [arrays.grad])

    def torch_stats() -> tuple[float, bool]:
        norm = torch.linalg.vector_norm(arrays.grad, dtype=torch.float32)
        return float(norm) ** 2, not bool(torch.isfinite(arrays.grad).all())

    check_stats("zenflow", ours(), arrays.grad, OURS_WITHIN)
    check_stats("torch", torch_stats(), arrays.grad, TORCH_WITHIN)
    contest(
        benchmark,
        "grad_stats",
        numel=numel,
        bytes_per_element=2,
        ours=ours,
        peers={"torch vector_norm, isfinite": torch_stats},
        roofline=lambda: _core.roofline(pool, arrays.grad, []),
    )


def test_cast_down(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """fp32 to bf16 by torch: the pass that the offload pass spares."""

    def cast() -> None:
        arrays.grad.copy_(arrays.total)

    arrays.reset()
    cast()
    at = sample(numel)
    check_bits("torch", arrays.grad[at], EXP_AVG[at % EXP_AVG.numel()].bfloat16())
    contest(
        benchmark,
        "cast_down: fp32 to bf16",
        numel=numel,
        bytes_per_element=6,
        ours=cast,
        ours_name="torch grad.copy_(total)",
        peers={},
        roofline=lambda: _core.roofline(pool, arrays.total, [], arrays.grad),
    )
