"""Numbers: what is computed, against float64. Each test is a fault that optimizers of this kind have had."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import (
    DTYPES,
    HAS_GRAD_DTYPE,
    Adam64,
    Deferred64,
    as64,
    assert_same_bits,
    assert_same_state,
    assert_unchanged,
    bits,
    clones,
    gradients,
    parameters,
    progress,
    run,
    set_gradients,
    snapshot,
)
from zenflow import CPUAdamW, ZenFlowAdamW, _core

MakeZenFlow = Callable[..., ZenFlowAdamW]


def at_step(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], step: int
) -> list[dict[str, Tensor]]:
    """Puts the optimizer where ``step`` updates have led, with moments of a likely size; returns them."""
    generator = torch.Generator().manual_seed(step)
    entries = []
    for param in params:
        exp_avg = 3e-3 * torch.randn(param.shape, generator=generator)
        spread = 1e-2 * torch.rand(param.shape, generator=generator)
        entries.append(
            {
                "step": torch.tensor(float(step), dtype=torch.float64),
                "exp_avg": exp_avg,
                "exp_avg_sq": spread**2,
            }
        )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(enumerate(entries)), "param_groups": groups})
    return entries


def oracle_at(oracle: Adam64, entry: dict[str, Tensor]) -> None:
    """The same for an oracle."""
    oracle.k = int(entry["step"])
    oracle.exp_avg, oracle.exp_avg_sq = as64(entry["exp_avg"]), as64(entry["exp_avg_sq"])


# --- Steps and bias correction --------------------------------------------------------------------------------

# Where a counter in bfloat16 (256), float16 (2048) or float32 (2^24) stops counting. There, betas at which the
# correction still means something.
COUNTS = [
    (254, 46, (0.9, 0.999)),
    (2046, 14, (0.99, 0.9999)),
    (2**24 - 3, 6, (0.99999, 0.99999999)),
]


@pytest.mark.parametrize(("first", "steps", "betas"), COUNTS)
@pytest.mark.parametrize("interval", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_correction_never_stands_still(
    zenflow_adamw: MakeZenFlow,
    first: int,
    steps: int,
    betas: tuple[float, float],
    interval: int | None,
    dtype: torch.dtype,
) -> None:
    """The correction follows the exact step number, far beyond where 16-bit and 32-bit floats can count."""
    params = parameters([(24, 10), (12,)], dtype)
    optimizer: torch.optim.Optimizer
    oracles: list[Adam64]
    if interval is None:
        optimizer = CPUAdamW(params, betas=betas)
        oracles = [Adam64(param) for param in params]
    else:
        optimizer = zenflow_adamw(params, betas=betas, update_interval=interval, topk_ratio=0.0)
        oracles = [Deferred64(params[0], interval), Adam64(params[1])]
    for oracle, entry in zip(oracles, at_step(optimizer, params, first), strict=True):
        oracle_at(oracle, entry)
    for step in range(steps):
        for param, oracle, grad in zip(params, oracles, gradients(params, step), strict=True):
            param.grad = grad
            oracle.step(grad, betas=betas)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, (param, oracle) in enumerate(zip(params, oracles, strict=True)):
        assert state[i]["step"].item() == first + steps
        assert oracle.error(state[i].get("master_weight", param)) < 2e-6


@pytest.mark.parametrize("kind", ["cpu", "zenflow"])
def test_the_count_is_exact_through_checkpoints_beyond_float32(zenflow_adamw: MakeZenFlow, kind: str) -> None:
    """2^24 + 1 is no float32; the count goes on, through a state dict too."""
    params = parameters([(8, 8)])

    def make() -> torch.optim.Optimizer:
        return CPUAdamW(params) if kind == "cpu" else zenflow_adamw(params)

    optimizer = make()
    at_step(optimizer, params, 2**24 - 1)
    for step in range(4):
        run(optimizer, params, [step])
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["state"][0]["step"].item() == 2**24 + step
        optimizer = make()
        optimizer.load_state_dict(saved)


@settings(max_examples=20)
@given(
    present=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=20),
    interval=st.sampled_from([1, 2, 3, 5]),
)
def test_every_parameter_counts_its_own_updates(present: list[tuple[bool, ...]], interval: int) -> None:
    """Bias correction and windows go by a parameter's own updates, not by the optimizer's steps."""
    params = parameters([(9, 7), (5, 11), (6,)])
    oracles: list[Adam64] = [*(Deferred64(param, interval) for param in params[:2]), Adam64(params[2])]
    with ZenFlowAdamW(
        params, update_interval=interval, topk_ratio=0.0, min_offload_numel=1, bucket_numel=1024
    ) as optimizer:
        for step, row in enumerate(present):
            grads = gradients(params, step)
            for param, oracle, grad, there in zip(params, oracles, grads, row, strict=True):
                param.grad = grad if there else None
                if there:
                    oracle.step(grad)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        for i, (param, oracle) in enumerate(zip(params, oracles, strict=True)):
            assert oracle.error(param) < 2e-6
            assert (state[i]["step"].item() if i in state else 0) == oracle.k


# --- Small updates, masters, windows --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [None, {"topk_ratio": 0.0}, {"topk_ratio": 0.3, "select_interval": 5}, {"topk_ratio": 1.0}],
    ids=["cpu", "deferred", "mixed", "selected"],
)
def test_a_thousand_updates_too_small_for_16_bits(
    zenflow_adamw: MakeZenFlow, dtype: torch.dtype, options: dict[str, Any] | None
) -> None:
    """0.02 in bfloat16 never moves under steps of 2e-5 if it is its own master; ours arrives where float64 does."""
    param = nn.Parameter(torch.full((16, 20), 0.02, dtype=dtype))
    start = float(param.detach()[0, 0])
    optimizer: Any
    if options is None:
        optimizer = CPUAdamW([param], lr=2e-5, weight_decay=0.0)
    else:
        optimizer = zenflow_adamw([param], lr=2e-5, weight_decay=0.0, **options)
    for _ in range(1000):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()
    # The gradient never changes, so each update is lr; at step 1000 up to 3 of them may still be pending.
    final = 2e-5 * 1000
    pending = 3 * 2e-5 if options is not None else 0.0
    moved = start - param.detach().double()
    ulp = torch.finfo(dtype).eps * 0.02
    assert (moved > final - pending - ulp).all()
    assert (moved < final + ulp).all()
    master = optimizer.state_dict()["state"][0]["master_weight"]
    # A thousand roundings of an fp32 value below 2^-5, all in the same direction at worst.
    assert (start - master.double() > final - pending - 1000 * 2.0**-30).all()


@pytest.mark.parametrize("interval", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_and_weights_over_20_windows(
    zenflow_adamw: MakeZenFlow, interval: int, dtype: torch.dtype
) -> None:
    """One set of moments, in fp32, that forgets nothing at a window's end; the weight follows the rule."""
    params = parameters([(30, 17), (21, 40)], dtype)
    oracles = [Deferred64(param, interval) for param in params]
    optimizer = zenflow_adamw(params, lr=3e-3, weight_decay=0.1, update_interval=interval, topk_ratio=0.0)
    for step in range(20 * interval):
        for param, oracle, grad in zip(params, oracles, gradients(params, step), strict=True):
            param.grad = grad
            oracle.step(grad, lr=3e-3, weight_decay=0.1)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, (param, oracle) in enumerate(zip(params, oracles, strict=True)):
        assert oracle.error(state[i].get("master_weight", param)) < 2e-6
        assert abs(as64(state[i]["exp_avg"]) - oracle.exp_avg).max() < 1e-8
        assert as64(state[i]["exp_avg_sq"]) == pytest.approx(oracle.exp_avg_sq, rel=2e-6, abs=1e-15)


def test_64_micro_batches_reach_the_moments_whole(zenflow_adamw: MakeZenFlow) -> None:
    """torch accumulates in ``.grad``; what the optimizer makes of the sum is exact, in fp32."""
    params = parameters([(16, 12)])
    oracle = Deferred64(params[0], 4)
    optimizer = zenflow_adamw(params, topk_ratio=0.2)
    for step in range(4):
        for micro in range(64):
            (params[0] * gradients(params, 64 * step + micro)[0]).sum().backward()
        assert params[0].grad is not None
        oracle.moments(params[0].grad, (0.9, 0.999))
        optimizer.step()
        optimizer.zero_grad()
    entry = optimizer.state_dict()["state"][0]
    assert abs(as64(entry["exp_avg"]) - oracle.exp_avg).max() < 1e-8
    assert as64(entry["exp_avg_sq"]) == pytest.approx(oracle.exp_avg_sq, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_leaves_masters_and_moments_alone(zenflow_adamw: MakeZenFlow, dtype: torch.dtype) -> None:
    """Columns that change sides at every step: the same bits as if none ever did."""
    results = []
    for options in ({"topk_ratio": 0.3, "select_interval": 1}, {"topk_ratio": 0.0}):
        params = parameters([(14, 33), (50, 8)], dtype)
        optimizer = zenflow_adamw(params, update_interval=1, **options)
        for step in range(50):
            for param, grad in zip(params, gradients(params, step), strict=True):
                grad[:, (5 * step) % grad.shape[1]] *= 20  # another column is the most important one
                param.grad = grad
            optimizer.step()
        results.append((optimizer.state_dict(), params, optimizer.stats()))
    assert_same_state(results[0][0], results[1][0])
    for mine, other in zip(results[0][1], results[1][1], strict=True):
        assert_same_bits(mine, other)
    assert results[0][2].selected_share > 0.3 > results[1][2].selected_share == 0.0


def test_reselection_keeps_no_old_state(zenflow_adamw: MakeZenFlow) -> None:
    """The device's states of columns that left are freed: their number doesn't grow with the steps."""
    params = parameters([(14, 33)])
    optimizer = zenflow_adamw(params, update_interval=1, topk_ratio=0.3, select_interval=1)
    for step in range(20):
        params[0].grad = gradients(params, step)[0].roll(step, 1)
        optimizer.step()
    assert optimizer._pipeline is not None
    assert len(optimizer._pipeline._dense._states) <= 2


# --- Clipping, huge and non-finite gradients --------------------------------------------------------------------


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    scale=st.sampled_from([1e-20, 1e-6, 1.0, 1e4]),
    huge=st.booleans(),
)
def test_the_norm_against_float64(dtype: torch.dtype, sizes: list[int], scale: float, huge: bool) -> None:
    """The global norm behind ``max_grad_norm`` is right to 1e-6, where squares leave fp32's range too."""
    grads = [scale * grad.float() for grad in gradients([torch.empty(size) for size in sizes], 0, scale=1.0)]
    if huge:
        grads[-1][-1] = 1e30 if dtype != torch.float16 else 6e4
    grads = [grad.to(dtype) for grad in grads]
    squares, non_finite = _core.grad_stats(_core.Pool(), grads)
    assert not non_finite
    expected = math.fsum(float((grad.double() ** 2).sum()) for grad in grads)
    # Squares below 1e-45 vanish, as in torch.
    assert squares == pytest.approx(expected, rel=2e-6, abs=1e-40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interval", [None, 1, 4])
def test_one_huge_gradient_is_clipped_on_both_sides(
    zenflow_adamw: MakeZenFlow, dtype: torch.dtype, interval: int | None
) -> None:
    """The clip coefficient reaches selected, deferred and small parameters alike, in their own gradient's step."""
    params = parameters([(16, 12), (9,)], dtype)
    oracles: list[Adam64] = [Adam64(param) for param in params]
    optimizer: torch.optim.Optimizer
    if interval is None:
        optimizer = CPUAdamW(params, max_grad_norm=1.0)
    else:
        optimizer = zenflow_adamw(params, max_grad_norm=1.0, update_interval=interval, topk_ratio=0.25)
    for step in range(8):
        set_gradients(params, step)
        if step == 3:
            first = params[0].grad
            assert first is not None
            first[2, 3] = 6e4 if dtype == torch.float16 else 1e25
        norm = math.sqrt(sum(float((as64(p.grad) ** 2).sum()) for p in params if p.grad is not None))
        for param, oracle in zip(params, oracles, strict=True):
            assert param.grad is not None
            oracle.step(param.grad, scale=min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, oracle in enumerate(oracles):
        assert abs(as64(state[i]["exp_avg"]) - oracle.exp_avg).max() < 2e-7 * abs(oracle.exp_avg).max()
        assert abs(as64(state[i]["exp_avg_sq"]) - oracle.exp_avg_sq).max() < 1e-6 * oracle.exp_avg_sq.max()
        # Where nothing is deferred, the weights too.
        if interval != 4 or i == 1:
            assert oracle.error(state[i].get("master_weight", params[i])) < 2e-6


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [(0, 0), (0, -1), (1, 4)], ids=["first", "last", "small"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_void_step_leaves_every_byte(
    zenflow_adamw: MakeZenFlow, dtype: torch.dtype, where: tuple[int, int], bad: float
) -> None:
    """Weights, masters, moments, k, what is pending, importances, choices: all as before; then training goes on."""
    params = parameters([(24, 30), (9,)], dtype)
    twins = clones(params)
    options: dict[str, Any] = {"topk_ratio": 0.2, "select_interval": 3, "skip_nonfinite": True}
    optimizer, steady = zenflow_adamw(params, **options), zenflow_adamw(twins, **options)
    pending = 0
    for step in range(9):
        for opt, chosen in ((optimizer, params), (steady, twins)):
            run(opt, chosen, [step])
        before = snapshot(optimizer)
        pending += any(lr_sum > 0 and decay > 0 for rows in progress(optimizer) for _, lr_sum, decay in rows)
        set_gradients(params, 100 + step)
        grad = params[where[0]].grad
        assert grad is not None
        grad.view(-1)[where[1]] = bad
        if step == 0:
            with pytest.warns(UserWarning, match="inf or NaN gradients was skipped"):
                optimizer.step()
        else:
            optimizer.step()
        assert_unchanged(before, optimizer)
    assert pending > 4  # or the test would show less than it says
    assert (optimizer.stats().skipped_steps, optimizer.stats().steps) == (9, 9)
    assert_same_state(optimizer.state_dict(), steady.state_dict())
    assert progress(optimizer) == progress(steady)


# --- Rounding -------------------------------------------------------------------------------------------------


def masters_for(dtype: torch.dtype) -> Tensor:
    """fp32 values at, just below and just above each value of ``dtype`` and each tie between two of them."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(codes.view(np.int16).copy()).view(dtype)
    finite = values[values.isfinite()].double()
    # The neighbour away from zero; beyond the largest, what would come next with more exponents.
    magnitude = finite.abs().unique()
    step = torch.diff(magnitude, append=2 * magnitude[-1:] - magnitude[-2:-1])
    ties = magnitude + step / 2
    singles = [exact.float().numpy() for exact in (magnitude, ties)]
    toward = (np.float32(0), np.float32(np.inf))
    neighbours = [np.nextafter(single, end) for single in singles for end in toward]
    positive = torch.cat([torch.from_numpy(values) for values in (*singles, *neighbours)])
    positive = positive[positive.isfinite()]
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_as_torch_rounds(dtype: torch.dtype, isa: str) -> None:
    """Every value, tie and neighbour: subnormals, ±0, and what rounds to infinity. (Some hardware flushes.)"""
    master = masters_for(dtype)
    weight = torch.full(master.shape, 7.0, dtype=dtype)
    kept = master.clone()
    moments = [torch.zeros_like(master) for _ in range(2)]
    tensors = _core.AdamTensors([weight], [master], [moments[0]], [moments[1]])
    group = ((0.0, 0.9, 0.999, 1e-8, 0.0), 1.0, True)
    tensors.step(_core.Pool(isa=isa), [0], [torch.zeros_like(weight)], [1], [group], [0])
    assert_same_bits(master, kept, "masters under a step of zero")
    assert_same_bits(weight, kept.to(dtype), "weights")
    # The case list has what it says.
    assert weight.isinf().any()
    assert ((weight != 0) & (weight.abs() < torch.finfo(dtype).smallest_normal)).any()
    assert ((bits(weight) == -(1 << 15)) | (bits(weight) == 0)).any()


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_nan_stays_a_nan(dtype: torch.dtype, isa: str) -> None:
    """No payload of a NaN rounds to infinity."""
    payloads = torch.tensor(
        [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1], dtype=torch.int32
    )
    master = payloads.view(torch.float32).repeat(9)
    weight = torch.zeros(master.shape, dtype=dtype)
    moments = [torch.zeros_like(master) for _ in range(2)]
    tensors = _core.AdamTensors([weight], [master], [moments[0]], [moments[1]])
    group = ((0.0, 0.9, 0.999, 1e-8, 0.0), 1.0, True)
    tensors.step(_core.Pool(isa=isa), [0], [torch.zeros_like(weight)], [1], [group], [0])
    assert weight.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topk_ratio", [0.0, 0.4, 1.0])
def test_every_visible_weight_is_the_rounded_master(
    zenflow_adamw: MakeZenFlow, dtype: torch.dtype, topk_ratio: float
) -> None:
    """At every step, deferred or selected: pending moves are in neither of the two."""
    params = parameters([(23, 31), (7,)], dtype, scale=1.0)
    optimizer = zenflow_adamw(params, lr=1e-2, topk_ratio=topk_ratio, select_interval=3)
    for step in range(12):
        run(optimizer, params, [step])
        state = optimizer.state_dict()["state"]
        for i, param in enumerate(params):
            assert_same_bits(param, state[i]["master_weight"].to(dtype), f"weight at step {step}")


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("interval", [1, 4])
def test_every_dtype_pair_through_the_pipeline(
    zenflow_adamw: MakeZenFlow, param_dtype: torch.dtype, grad_dtype: torch.dtype, interval: int
) -> None:
    """Gradients travel in their own dtype, beside others of another dtype in the same bucket."""
    if param_dtype != grad_dtype and not HAS_GRAD_DTYPE:
        pytest.skip("this torch refuses a gradient of another dtype than its parameter's")
    params = parameters([(13, 11), (8, 12), (6,)], param_dtype)
    oracles = [*(Deferred64(param, interval) for param in params[:2]), Adam64(params[2])]
    optimizer = zenflow_adamw(params, update_interval=interval, topk_ratio=0.0)
    for param in params[::2]:
        if param_dtype != grad_dtype:
            param.grad_dtype = grad_dtype
    for step in range(9):
        for i, (param, oracle) in enumerate(zip(params, oracles, strict=True)):
            grad = gradients([param], 10 * step + i)[0]
            param.grad = grad.to(grad_dtype) if i != 1 else grad
            oracle.step(param.grad)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for i, oracle in enumerate(oracles):
        assert oracle.error(state[i].get("master_weight", params[i])) < 2e-6
