"""Moments in bfloat16 and 8 bits: near those of float32, smaller in memory, in and out of checkpoints."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import SETTINGS, Tower, loss_of, pipeline_of, seeded, train
from zenflow import ArgumentError, ZenFlowAdamW
from zenflow.schedule import row_grain, stripe_bounds

LEAN = ["bfloat16", "int8"]


def optimizer_of(weights: list[nn.Parameter], **options: Any) -> ZenFlowAdamW:
    return ZenFlowAdamW(weights, **{**SETTINGS, "min_offload_numel": 1, **options})


@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("cols", [96, 100])
def test_moments_follow_those_of_float32_on_average(state_dtype: str, cols: int) -> None:
    """Rounding is unbiased: over many elements the errors cancel, and no element runs away."""
    weights = [nn.Parameter(torch.zeros(300, cols)) for _ in range(2)]
    optimizers = [
        optimizer_of([w], state_dtype=d) for w, d in zip(weights, ("float32", state_dtype), strict=True)
    ]
    generator = torch.Generator().manual_seed(3)
    scale = 10 ** (torch.rand(300, 1, generator=generator) * 2 - 3)
    for _ in range(60):
        grad = torch.randn(300, cols, generator=generator) * scale
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    expected, got = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    coarse = {"bfloat16": 2.0**-8, "int8": 2.0**-3}[state_dtype]
    for key, factor in (("exp_avg", 4.0), ("exp_avg_sq", 8.0)):
        error = (got[key] - expected[key]) / expected[key].abs().mean(1, keepdim=True)
        assert error.mean().abs() < coarse / 20, key
        assert error.square().mean().sqrt() < coarse * factor, key
    assert (got["exp_avg_sq"] > 0).all()
    moved, error = weights[0].detach(), (weights[1] - weights[0]).detach()
    assert error.norm() < {"bfloat16": 0.02, "int8": 0.2}[state_dtype] * moved.norm()


@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("staleness", [0, 1])
def test_training_learns_as_with_float32(state_dtype: str, staleness: int) -> None:
    losses = {}
    for kind in ("float32", state_dtype):
        model = seeded(lambda: Tower(2))
        options = {**SETTINGS, "state_dtype": kind, "staleness": staleness, "lr": 3e-3}
        with ZenFlowAdamW(model, **options) as optimizer:
            train(model, optimizer, range(120))
            optimizer.synchronize()
            with torch.no_grad():
                losses[kind] = sum(float(loss_of(model, step)) for step in range(200, 210)) / 10
    assert losses["float32"] < 1.0 < math.log(24)
    assert losses[state_dtype] < losses["float32"] + 0.1


@pytest.mark.parametrize(
    ("state_dtype", "share"), [("float32", 12.0), ("bfloat16", 8.0), ("int8", 6 + 1 / 32)]
)
def test_host_memory_is_what_is_promised(state_dtype: str, share: float) -> None:
    weight = nn.Parameter(torch.zeros(512, 512))
    with optimizer_of([weight], state_dtype=state_dtype) as optimizer:
        assert optimizer.stats().host_bytes == share * weight.numel()


@pytest.mark.parametrize("state_dtype", LEAN)
def test_any_thread_count_gives_the_same_bits(state_dtype: str) -> None:
    from zenflow._core import Engine

    def moments(threads: int) -> list[Tensor]:
        engine = Engine(threads=threads, chunk=1024)
        numel = 10 * 1024 + 77
        parameter = engine.add_parameter(numel, state_dtype)
        bucket = engine.add_bucket([(parameter, 0, numel)])
        slot = torch.zeros(64 + 4 * numel, dtype=torch.uint8)
        number = engine.add_slot(slot)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            slot[64:].view(torch.float32).copy_(torch.randn(numel, generator=generator))
            assert engine.submit(
                bucket, number, None, b"\x01", "float32", "float32", (1e-3, 0.9, 0.999, 1e-8, 0.0)
            )
            engine.ring(number)
            assert engine.wait(60.0)
        found = [torch.empty(numel) for _ in range(2)]
        engine.read_moments(parameter, *found)
        engine.close()
        return found

    first = moments(1)
    for threads in (2, 7):
        assert all(torch.equal(a, b) for a, b in zip(first, moments(threads), strict=True))


@pytest.mark.parametrize("state_dtype", LEAN)
def test_checkpoints_go_in_and_out_of_float32(state_dtype: str) -> None:
    """Out of a lean state and into it again is exact; into it the first time rounds to nearest."""
    model = seeded(lambda: Tower(1))
    with ZenFlowAdamW(model, **SETTINGS) as wide:
        train(model, wide, range(9))
        saved = copy.deepcopy(wide.state_dict())
    lean = ZenFlowAdamW(copy.deepcopy(model), **SETTINGS, state_dtype=state_dtype)
    lean.load_state_dict(saved)
    once = copy.deepcopy(lean.state_dict())
    lean.load_state_dict(once)
    twice = lean.state_dict()
    coarse = {"bfloat16": 2.0**-8, "int8": 2.0**-3}[state_dtype]
    offloaded = pipeline_of(lean).registry.offloaded
    assert offloaded
    indices = {id(param): i for i, param in enumerate(p for g in lean.param_groups for p in g["params"])}
    for record in offloaded:
        index = indices[id(record.param)]
        for key in ("exp_avg", "exp_avg_sq"):
            a, b, c = (state["state"][index][key] for state in (saved, once, twice))
            assert torch.equal(b, c)
            top = a.abs().reshape(-1).max()
            assert ((a - b).abs() <= coarse * a.abs() + 2.0**-14 * top).all()
    reference = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3)
    reference.load_state_dict(twice)
    lean.close()


def test_a_checkpoint_of_other_stripes_moves_what_is_pending() -> None:
    """8-bit blocks make stripes start at other rows; nothing pending may go to the wrong ones."""
    rows, cols = 64, 100
    assert row_grain(cols, "int8") == 64
    assert stripe_bounds(rows, 4, 64) != stripe_bounds(rows, 4)
    weight = nn.Parameter(torch.randn(rows, cols))
    with optimizer_of([weight], topk_ratio=0.0) as wide:
        weight.grad = torch.randn(rows, cols)
        wide.step()
        wide.synchronize()
        before = weight.detach().clone()
        saved = copy.deepcopy(wide.state_dict())
    (entry,) = saved["state"].values()
    direction = entry["exp_avg"] / (1 - 0.9) / ((entry["exp_avg_sq"] / (1 - 0.999)).sqrt() + 1e-8)
    other = nn.Parameter(before.clone())
    with optimizer_of([other], topk_ratio=0.0, state_dtype="int8") as lean:
        lean.load_state_dict(saved)
        lean.synchronize()
        master = lean.state_dict()["state"][0]["master_weight"]
    expected = entry["master_weight"].clone()
    for phase, (start, stop) in enumerate(stripe_bounds(rows, 4)):
        lr_sum, decay = float(entry["pending_lr_sum"][phase]), float(entry["pending_decay"][phase])
        expected[start:stop] = expected[start:stop] * (1 - decay) - lr_sum * direction[start:stop]
    # The moments were rounded to 8 bits before they moved it.
    assert (master - expected).abs().max() < 0.2 * 1e-2
    assert (master - before).abs().max() > 0.5 * 1e-2


@pytest.mark.parametrize("value", ["float16", "fp32", 8, None, torch.float16, torch.int32])
def test_other_state_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"state_dtype is .*accepted: \"float32\", \"bfloat16\" or \"int8\""
    ):
        ZenFlowAdamW([nn.Parameter(torch.zeros(4, 4))], state_dtype=value)
