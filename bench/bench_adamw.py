"""AdamW: everything in fp32, the offload pass, and many small tensors."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from harness import FULL, contest
from zenflow import CPUAdamW, _core
from zenflow.cli.bench import peers
from zenflow.cli.bench.adam_arrays import GROUP, AdamArrays, split
from zenflow.cli.bench.memory import Memory
from zenflow.cli.bench.oracle import HYPER, K
from zenflow.cli.bench.peers import Peer

#: Gradient, master and two moments read; master and moments written. The offload pass: the same sum, otherwise divided.
BYTES = 28


def test_adamw_fp32(benchmark: BenchmarkFixture, pool: _core.Pool, memory: Memory, numel: int) -> None:
    """In place, gradient and weight in fp32."""
    arrays = AdamArrays(memory, numel, torch.float32)
    tensors = arrays.tensors()

    def ours() -> None:
        tensors.step(pool, [0], [arrays.grad], [K], [GROUP], [0])

    ours()
    arrays.check("zenflow")
    others = {}
    for name in peers.names():
        arrays.reset()
        peer = Peer(name, [arrays.weight], [arrays.exp_avg], [arrays.exp_avg_sq], [arrays.grad])
        peer.step()
        arrays.check(name)
        others[f"{name} step()"] = peer.step
    contest(
        benchmark,
        "adamw_fp32",
        numel=numel,
        bytes_per_element=BYTES,
        ours=ours,
        peers=others,
        roofline=lambda: arrays.roofline(pool),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_offload_pass(
    benchmark: BenchmarkFixture, pool: _core.Pool, memory: Memory, numel: int, dtype: torch.dtype
) -> None:
    """A 16-bit gradient in, fp32 master and 16-bit weights out; peers cast, step and cast."""
    arrays = AdamArrays(memory, numel, dtype)
    tensors = arrays.tensors()

    def ours() -> None:
        tensors.step(pool, [0], [arrays.grad], [K], [GROUP], [0])

    ours()
    arrays.check("zenflow")
    others = {}
    for name in peers.names():
        if "foreach" in name:
            continue
        peer = Peer(name, [arrays.weight], [arrays.exp_avg], [arrays.exp_avg_sq], [arrays.grad32])

        def cast_step_cast(peer: Peer = peer) -> None:
            arrays.grad32.copy_(arrays.grad)
            peer.step()
            assert arrays.out is not None
            arrays.out.copy_(arrays.weight)

        arrays.reset()
        cast_step_cast()
        arrays.check(name)
        others[f"cast + {name} + cast"] = cast_step_cast
    contest(
        benchmark,
        f"offload_pass[{str(dtype).removeprefix('torch.')}]",
        numel=numel,
        bytes_per_element=BYTES,
        ours=ours,
        peers=others,
        roofline=lambda: arrays.roofline(pool),
    )


def test_many_small(benchmark: BenchmarkFixture, pool: _core.Pool, memory: Memory) -> None:
    """16,384 tensors of 4,096 elements, fp32 in place: whole optimizer steps, and the bare kernel."""
    count, each = (16_384, 4096) if FULL else (1024, 64)
    arrays = AdamArrays(memory, count * each, torch.float32)
    views = [split(x, count) for x in (arrays.weight, arrays.exp_avg, arrays.exp_avg_sq, arrays.grad)]
    others = {}
    for name in peers.names():
        peer = Peer(name, *views)
        arrays.reset()
        peer.step()
        arrays.check(name)
        others[f"{name} step()"] = peer.step
    weights, exp_avgs, exp_avg_sqs, grads = views
    tensors = _core.AdamTensors(weights, [None] * count, exp_avgs, exp_avg_sqs)
    indices, steps, group_of = list(range(count)), [K] * count, [0] * count

    def kernel() -> None:
        tensors.step(pool, indices, grads, steps, [GROUP], group_of)

    arrays.reset()
    kernel()
    arrays.check("kernel")

    arrays.reset()
    optimizer = at_update_k(weights, exp_avgs, exp_avg_sqs, grads)
    optimizer.step()
    for state, exp_avg, exp_avg_sq in zip(optimizer.state.values(), exp_avgs, exp_avg_sqs, strict=True):
        exp_avg.copy_(state["exp_avg"])
        exp_avg_sq.copy_(state["exp_avg_sq"])
    arrays.check("CPUAdamW")

    contest(
        benchmark,
        f"many_small: {count:,} tensors of {each:,}",
        numel=count * each,
        bytes_per_element=BYTES,
        ours=optimizer.step,
        ours_name="zenflow CPUAdamW.step()",
        peers={"zenflow kernel call": kernel, **others},
        roofline=lambda: arrays.roofline(pool),
        rounds=9,  # torch's can take seconds each
    )


def at_update_k(
    weights: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], grads: list[Tensor]
) -> CPUAdamW:
    """A CPUAdamW whose next step is update ``K``, from copies of these moments."""
    params = [torch.nn.Parameter(weight) for weight in weights]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    lr, beta1, beta2, eps, weight_decay = HYPER
    optimizer = CPUAdamW(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    entries = zip(exp_avgs, exp_avg_sqs, strict=True)
    state = {
        i: {"step": torch.tensor(float(K - 1)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for i, (exp_avg, exp_avg_sq) in enumerate(entries)
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return optimizer
