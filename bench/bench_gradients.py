"""Passes over gradients: accumulation, the norm with the non-finite check, casts."""

from __future__ import annotations

import math

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from adam_arrays import EXP_AVG, GRAD
from harness import contest
from memory import Memory, tile
from oracle import check_bits, sample
from zenflow import _core


class Sum:
    """An fp32 ``total`` and a bf16 ``grad`` to add to it; ``grad32`` for peers that cast first."""

    def __init__(self, memory: Memory, numel: int) -> None:
        self.total, self.grad32 = (memory.empty(numel, torch.float32) for _ in range(2))
        self.grad = memory.filled(numel, torch.bfloat16, GRAD)
        self.numel = numel

    def reset(self) -> None:
        tile(self.total, EXP_AVG)

    def check(self, name: str, *, first: bool = False) -> None:
        """One addition in fp32, or the gradient itself."""
        at = sample(self.numel)
        grad, start = (block[at % GRAD.numel()] for block in (GRAD.bfloat16().float(), EXP_AVG))
        check_bits(f"{name}: total", self.total[at], grad if first else start + grad)

    def add(self) -> None:
        self.total.add_(self.grad)

    def cast_and_add(self) -> None:
        self.grad32.copy_(self.grad)
        self.total.add_(self.grad32)


def squares(array: Tensor) -> float:
    """The sum of squares in float64."""
    return sum(float(part.double().square().sum()) for part in array.split(1 << 22))


#: Of our squared norm, against float64; torch adds up long runs in fp32 and ends over 1% low at 64 Mi elements.
OURS_WITHIN, TORCH_WITHIN = 1e-6, 3e-2


def check_stats(stats: tuple[float, bool], array: Tensor, within: float) -> None:
    assert math.isclose(stats[0], squares(array), rel_tol=within)
    assert stats[1] is not bool(array.isfinite().all())


@pytest.fixture
def arrays(memory: Memory, numel: int) -> Sum:
    return Sum(memory, numel)


def test_accumulate(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """bf16 into fp32 (ours learns the norm besides)."""

    def ours() -> tuple[float, bool]:
        return _core.accumulate(pool, arrays.total, arrays.grad)

    others = {"torch total.add_(grad)": arrays.add, "torch cast, add_": arrays.cast_and_add}
    for name, call in {"zenflow": ours, **others}.items():
        arrays.reset()
        call()
        arrays.check(name)
    contest(
        benchmark,
        "accumulate",
        numel=numel,
        bytes_per_element=10,
        ours=ours,
        peers=others,
        roofline=lambda: _core.roofline(pool, arrays.grad, [arrays.total]),
    )


def test_accumulate_stats(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """The same with the squared norm of the sum and whether it is finite."""

    def ours() -> tuple[float, bool]:
        return _core.accumulate(pool, arrays.total, arrays.grad)

    def stats() -> tuple[float, bool]:
        norm = torch.linalg.vector_norm(arrays.total)
        return float(norm) ** 2, not bool(torch.isfinite(arrays.total).all())

    def torch_add() -> tuple[float, bool]:
        arrays.add()
        return stats()

    def torch_cast_and_add() -> tuple[float, bool]:
        arrays.cast_and_add()
        return stats()

    others = {
        "torch add_, vector_norm, isfinite": torch_add,
        "torch cast, add_, vector_norm, isfinite": torch_cast_and_add,
    }
    for name, call in {"zenflow": ours, **others}.items():
        arrays.reset()
        found = call()
        arrays.check(name)
        check_stats(found, arrays.total, OURS_WITHIN if name == "zenflow" else TORCH_WITHIN)
    arrays.total[-1] = math.inf
    assert ours()[1]
    arrays.reset()
    contest(
        benchmark,
        "accumulate_stats",
        numel=numel,
        bytes_per_element=10,
        ours=ours,
        peers=others,
        roofline=lambda: _core.roofline(pool, arrays.grad, [arrays.total]),
    )


def test_accumulate_first(benchmark: BenchmarkFixture, pool: _core.Pool, numel: int, arrays: Sum) -> None:
    """The first of a sum: a cast from bf16 to fp32 that learns the norm."""

    def ours() -> tuple[float, bool]:
        return _core.accumulate(pool, arrays.total, arrays.grad, first=True)

    def cast() -> None:
        arrays.total.copy_(arrays.grad)

    check_stats(ours(), arrays.grad, OURS_WITHIN)
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

    check_stats(ours(), arrays.grad, OURS_WITHIN)
    check_stats(torch_stats(), arrays.grad, TORCH_WITHIN)
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
    """fp32 to bf16, of which we have no pass of its own: what the offload pass spares, against the bare stores."""

    def roofline() -> None:
        _core.roofline(pool, arrays.total, [], arrays.grad)

    def cast() -> None:
        arrays.grad.copy_(arrays.total)

    whole = numel // 32 * 32  # the roofline leaves out the rest
    for call in (roofline, cast):
        arrays.reset()
        arrays.grad.zero_()
        call()
        at = sample(whole)
        check_bits("cast", arrays.grad[at], EXP_AVG[at % EXP_AVG.numel()].bfloat16())
    contest(
        benchmark,
        "cast_down: fp32 to bf16",
        numel=numel,
        bytes_per_element=6,
        ours=roofline,
        ours_name="roofline pass",
        peers={"torch grad.copy_(total)": cast},
    )
