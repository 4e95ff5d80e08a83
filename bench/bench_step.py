"""What Python costs: CPUAdamW.step() against the bare kernel call on the same arrays."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness import FULL, contest
from zenflow import CPUAdamW, _core
from zenflow.cli.bench.adam_arrays import GROUP, WEIGHT, noise
from zenflow.cli.bench.oracle import HYPER, adamw64, check_close, sample

TENSORS = [1, 256]


@pytest.mark.parametrize("count", TENSORS)
def test_step(benchmark: BenchmarkFixture, pool: _core.Pool, count: int) -> None:
    """32 Mi fp32 elements in one tensor and in 256, all in memory as torch allocates it, ours for the states too."""
    each = (32 << 20) // count if FULL else 70_001 // count
    block = noise(9, 1e-2)
    params = [
        torch.nn.Parameter(WEIGHT.repeat(-(-each // WEIGHT.numel()))[:each].clone()) for _ in range(count)
    ]
    for param in params:
        param.grad = block.repeat(-(-each // block.numel()))[:each].clone()
    lr, beta1, beta2, eps, weight_decay = HYPER
    optimizer = CPUAdamW(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)

    at = sample(each)
    start, grad = WEIGHT[at % WEIGHT.numel()].double(), block[at % block.numel()].double()
    zero = torch.zeros_like(start)
    weight, exp_avg, exp_avg_sq = adamw64(start, zero, zero, grad, 1)
    optimizer.step()
    for param in (params[0], params[-1]):
        state = optimizer.state[param]
        check_close("weight", param.detach()[at], weight, moved=lr)
        check_close("exp_avg", state["exp_avg"][at], exp_avg)
        check_close("exp_avg_sq", state["exp_avg_sq"][at], exp_avg_sq)

    tensors = _core.AdamTensors(
        params,
        [None] * count,
        [optimizer.state[param]["exp_avg"] for param in params],
        [optimizer.state[param]["exp_avg_sq"] for param in params],
    )
    grads = [param.grad for param in params]
    arguments = list(range(count)), grads, [2] * count, [GROUP], [0] * count

    def kernel() -> None:
        tensors.step(pool, *arguments)

    contest(
        benchmark,
        f"step: {count} tensor{'s' * (count > 1)} of {each:,}",
        numel=count * each,
        bytes_per_element=28,
        ours=optimizer.step,
        ours_name="zenflow CPUAdamW.step()",
        peers={"zenflow kernel call": kernel},
    )
