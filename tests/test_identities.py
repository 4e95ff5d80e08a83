"""What must hold to the bit on the host accelerator, and the whole algorithm against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zenflow
from reference import ReferenceParameter
from zenflow import CPUAdamW, ZenFlowAdamW
from zenflow import _core as core

SHAPES = {"embed": (37, 24), "wide": (19, 65), "tall": (130, 11), "conv": (12, 5, 3, 2), "bias": (29,)}
STEPS = 24


def fresh_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES.values()]


def gradients(dtype: torch.dtype, steps: int = STEPS) -> Iterator[list[Tensor]]:
    """The same sequence at every call; columns of very different size, so that a selection means something."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        row = []
        for shape in SHAPES.values():
            size = torch.logspace(-3, 1, shape[-1]).roll(step // 5)
            row.append((torch.randn(shape, generator=generator) * size).to(dtype))
        yield row


def feed(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], row: list[Tensor]) -> None:
    for param, grad in zip(params, row, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[i][key].clone() for i in state for key in ("exp_avg", "exp_avg_sq")]


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained(make: Make, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and moments after all steps."""
    params = fresh_parameters(dtype)
    optimizer = make(params)
    for row in gradients(dtype):
        feed(optimizer, params, row)
    result = moments(optimizer)
    if isinstance(optimizer, ZenFlowAdamW):
        optimizer.close()
    return [param.detach().clone() for param in params], result


def zenflow_adamw(**settings: Any) -> Make:
    settings = {"lr": 1e-2, "weight_decay": 0.1, "min_offload_numel": 1, **settings}
    return lambda params: ZenFlowAdamW(params, **settings)


def cpu_adamw(**settings: Any) -> Make:
    return lambda params: CPUAdamW(params, lr=1e-2, weight_decay=0.1, **settings)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        {"topk_ratio": 1.0, "update_interval": 4},
        {"topk_ratio": 0.0, "update_interval": 1},
        {"topk_ratio": 0.1, "update_interval": 1, "select_interval": 1},
        {"topk_ratio": 0.5, "update_interval": 1, "select_interval": 1},
        {"topk_ratio": 0.3, "update_interval": 1, "select_interval": 7},
        {"topk_ratio": 0.3, "update_interval": 8, "full_warm_up_rounds": STEPS},
    ],
    ids=["all-selected", "none-selected", "reselect", "reselect-half", "reselect-7", "warm-up"],
)
def test_is_adamw_where_it_says_so(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    assert equal(trained(zenflow_adamw(**settings), dtype)[0], trained(cpu_adamw(), dtype)[0])


def test_a_window_is_not_adamw() -> None:
    assert not equal(trained(zenflow_adamw(topk_ratio=0.1))[0], trained(cpu_adamw())[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_moments_follow_adamw_under_given_gradients(dtype: torch.dtype, clip: float | None) -> None:
    expected = trained(cpu_adamw(max_grad_norm=clip), dtype)[1]
    for interval in (1, 2, 3, 4, 8):
        for staleness in (0, 1):
            for topk in (0.0, 0.1, 1.0):
                make = zenflow_adamw(
                    update_interval=interval,
                    staleness=staleness,
                    topk_ratio=topk,
                    select_interval=5,
                    max_grad_norm=clip,
                )
                assert equal(trained(make, dtype)[1], expected), (interval, staleness, topk)


def test_clipping_inside_and_by_torch_agree() -> None:
    def clipped(make: Make) -> list[Tensor]:
        params = fresh_parameters()
        optimizer = make(params)
        for row in gradients(torch.float32):
            for param, grad in zip(params, row, strict=True):
                param.grad = grad.clone()
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        return [param.detach() for param in params]

    exact = zenflow_adamw(topk_ratio=0.2, update_interval=1, select_interval=3)
    assert equal(clipped(exact), clipped(cpu_adamw()))
    inside = zenflow_adamw(topk_ratio=0.2, update_interval=1, select_interval=3, max_grad_norm=0.5)
    assert equal(trained(inside)[0], trained(cpu_adamw(max_grad_norm=0.5))[0])
    for a, b in zip(trained(inside)[0], clipped(exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fifty_changes_of_owner_change_nothing() -> None:
    params = fresh_parameters(torch.bfloat16)
    optimizer = ZenFlowAdamW(params, lr=1e-2, topk_ratio=0.2, min_offload_numel=1, select_interval=1000)
    for row in gradients(torch.bfloat16, 5):
        feed(optimizer, params, row)
    keys = ("exp_avg", "exp_avg_sq", "master_weight", "pending_lr_sum", "pending_decay")

    def snapshot() -> list[Tensor]:
        state = optimizer.state_dict()["state"]
        return [state[i][key].clone() for i in state for key in keys if key in state[i]]

    before, weights = snapshot(), [param.detach().clone() for param in params]
    registry = optimizer._pipeline.registry
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        for record in registry.offloaded:
            count = record.columns.columns.numel()
            columns = torch.randperm(record.matrix.cols, generator=generator)[:count].sort().values
            registry.exchange(record, columns)
    assert equal(snapshot(), before)
    assert equal([param.detach() for param in params], weights)


@settings(deadline=None, max_examples=25)
@given(
    S=st.integers(1, 9),
    D=st.integers(0, 1),
    topk=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    every=st.integers(1, 9),
    warm=st.integers(0, 5),
    bucket=st.sampled_from([1024, 1 << 24]),
)
def test_the_whole_algorithm_against_float64(
    S: int, D: int, topk: float, every: int, warm: int, bucket: int
) -> None:
    params = [param for param in fresh_parameters() if param.ndim == 2]
    hyper = {"lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "wd": 0.1}
    reference = [
        ReferenceParameter(param.detach().double().numpy(), i, S=S, D=D, topk=topk, every=every, warm=warm)
        for i, param in enumerate(params)
    ]
    with ZenFlowAdamW(
        params,
        lr=0.02,
        betas=(0.9, 0.99),
        eps=1e-6,
        weight_decay=0.1,
        topk_ratio=topk,
        update_interval=S,
        staleness=D,
        select_interval=every,
        full_warm_up_rounds=warm,
        min_offload_numel=1,
        bucket_numel=bucket,
    ) as optimizer:
        for row in gradients(torch.float32):
            kept = [grad for grad in row if grad.ndim == 2]
            feed(optimizer, params, kept)
            for param, expected, grad in zip(params, reference, kept, strict=True):
                expected.step(grad.double().numpy(), 1.0, hyper)
                shown = param.detach().double().numpy()
                np.testing.assert_allclose(shown, expected.shown, rtol=2e-5, atol=2e-6)
        for i, expected in enumerate(reference):
            state = optimizer.state_dict()["state"][i]
            np.testing.assert_allclose(state["master_weight"].double(), expected.w, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(state["exp_avg_sq"].double(), expected.v, rtol=1e-5, atol=1e-9)
            np.testing.assert_allclose(state["pending_lr_sum"], expected.L, atol=1e-12)
            np.testing.assert_allclose(1 - state["pending_decay"], expected.P, atol=1e-12)


def patched(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Makes optimizers built from now on use an engine and a pool with these arguments."""
    pool_arguments = {key: value for key, value in arguments.items() if key in ("isa", "pin")}

    def engine(_: Any) -> core.Engine:
        return core.Engine(arguments.get("cores"), **{k: v for k, v in arguments.items() if k != "cores"})

    monkeypatch.setattr(zenflow.pipeline, "Engine", engine)
    monkeypatch.setattr(zenflow.pipeline, "Pool", lambda: core.Pool(arguments.get("cores"), **pool_arguments))


WINDOW = {"topk_ratio": 0.15, "update_interval": 4, "select_interval": 5, "bucket_numel": 1024}


@pytest.mark.parametrize("isa", core.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, isa: str, dtype: torch.dtype
) -> None:
    expected = trained(zenflow_adamw(**WINDOW), dtype)
    patched(monkeypatch, isa=isa)
    got = trained(zenflow_adamw(**WINDOW), dtype)
    assert equal(got[0], expected[0])
    assert equal(got[1], expected[1])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_thread_count_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    expected = trained(zenflow_adamw(**WINDOW))
    patched(monkeypatch, threads=threads, chunk=1024)
    assert equal(trained(zenflow_adamw(**WINDOW))[0], expected[0])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_slow_host_changes_no_bit(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    make = zenflow_adamw(**WINDOW, staleness=staleness)
    expected = trained(make)
    patched(monkeypatch, delay=0.002)
    assert equal(trained(make)[0], expected[0])


@pytest.mark.parametrize("staleness", [0, 1])
def test_little_staging_memory_changes_no_bit(staleness: int) -> None:
    expected = trained(zenflow_adamw(**WINDOW, staleness=staleness))
    got = trained(zenflow_adamw(**WINDOW, staleness=staleness, max_staging_bytes=1))
    assert equal(got[0], expected[0])
    assert equal(got[1], expected[1])
