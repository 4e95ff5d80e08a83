"""CPUAdamW with lean states: near float32, exact through checkpoints, and safe when others write the weights."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zenflow import ArgumentError, CPUAdamW
from zenflow.lean_state import LeanState, _join, _split

LEAN = ["bfloat16", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMEL = 10_001


def weights_of(dtype: torch.dtype, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((torch.randn(NUMEL, generator=generator) * 0.1).to(dtype))


def run(weight: nn.Parameter, optimizer: CPUAdamW, first: int, stop: int) -> list[Tensor]:
    """Steps ``first`` to ``stop``, with gradients that depend on nothing else; the weights after each."""
    seen = []
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(100 + step)
        grad = torch.randn(NUMEL, generator=generator) * 10 ** (torch.arange(NUMEL) / NUMEL - 1)
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


def saved(optimizer: CPUAdamW) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    a, b = left["state"][0], right["state"][0]
    return [key for key in a.keys() | b.keys() if not torch.equal(a[key], b[key])]


# ||error|| / ||update|| of the masters against float64 after so many steps. The first step moves by the moments as
# computed; from then on by what was kept of them.
BUDGETS = {
    "bfloat16": {1: 4e-6, 10: 3e-3, 100: 5e-3, 1000: 1.1e-2},
    "int8": {1: 4e-6, 10: 4.5e-2, 100: 6.5e-2, 1000: 8e-2},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", LEAN)
def test_weights_follow_torchs_adamw(state_dtype: str, dtype: torch.dtype) -> None:
    weight, reference = weights_of(dtype), nn.Parameter(weights_of(dtype).detach().double())
    start = reference.detach().clone()
    optimizer = CPUAdamW([weight], lr=1e-3, state_dtype=state_dtype)
    oracle = torch.optim.AdamW([reference], lr=1e-3)
    for step in range(1, 1001):
        generator = torch.Generator().manual_seed(step)
        weight.grad = (torch.randn(NUMEL, generator=generator) + 0.5).to(dtype)
        reference.grad = weight.grad.double()
        optimizer.step()
        oracle.step()
        if step in BUDGETS[state_dtype]:
            entry = optimizer.state_dict()["state"][0]
            master = weight if dtype == torch.float32 else entry["master_weight"]
            error = (master.detach().double() - reference.detach()).norm()
            assert error < BUDGETS[state_dtype][step] * (reference.detach() - start).norm(), step
    # What is shown is the master, rounded to nearest.
    assert (weight.detach().float() - master.detach()).abs().max() <= 2.0**-8 * master.detach().abs().max()
    ulp = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    shown = weight.detach().float()
    assert ((shown - master.detach()).abs() <= ulp * 2.01 * master.detach().abs() + 2.0**-25).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("way", ["file", "pickle", "deepcopy"])
def test_going_on_from_anywhere_is_the_uninterrupted_run(
    state_dtype: str, dtype: torch.dtype, way: str
) -> None:
    weight = weights_of(dtype)
    optimizer = CPUAdamW([weight], lr=1e-2, state_dtype=state_dtype)
    run(weight, optimizer, 0, 5)
    if way == "file":
        other = nn.Parameter(weight.detach().clone())
        resumed = CPUAdamW([other], lr=1e-2, state_dtype=state_dtype)
        resumed.load_state_dict(saved(optimizer))
    else:
        pair = weight, optimizer
        other, resumed = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    ahead, behind = run(weight, optimizer, 5, 12), run(other, resumed, 5, 12)
    assert all(torch.equal(a, b) for a, b in zip(ahead, behind, strict=True))
    assert not differences(saved(optimizer), saved(resumed))
    # And it matters: without the moments the run is another one.
    third = nn.Parameter(weight.detach().clone())
    assert not torch.equal(
        run(third, CPUAdamW([third], lr=1e-2, state_dtype=state_dtype), 12, 14)[-1],
        run(weight, optimizer, 12, 14)[-1],
    )


@pytest.mark.parametrize("state_dtype", LEAN)
def test_memory_is_what_is_promised(state_dtype: str) -> None:
    """6 bytes an element for a bfloat16 parameter with bfloat16 moments, 4 and 1/32 with 8 bits; 12 in float32."""
    weight = weights_of(torch.bfloat16)
    optimizer = CPUAdamW([weight], state_dtype=state_dtype)
    run(weight, optimizer, 0, 1)
    state = optimizer._parameters._records[weight].state
    assert isinstance(state, LeanState)
    assert state.master_weight is None
    assert state.master_low is not None
    tensors = [
        state.master_low,
        state.exp_avg,
        state.exp_avg_sq,
        *([] if state.scales is None else [state.scales]),
    ]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert nbytes == {"bfloat16": 6 * NUMEL, "int8": 4 * NUMEL + 8 * -(-NUMEL // 256)}[state_dtype]


@pytest.mark.parametrize("state_dtype", LEAN)
def test_float32_checkpoints_go_in_and_out(state_dtype: str) -> None:
    weight = weights_of(torch.bfloat16)
    wide = CPUAdamW([weight])
    run(weight, wide, 0, 6)
    lean = CPUAdamW([nn.Parameter(weight.detach().clone())], state_dtype=state_dtype)
    lean.load_state_dict(saved(wide))
    once = saved(lean)
    lean.load_state_dict(once)
    assert not differences(once, saved(lean))
    coarse = {"bfloat16": 2.0**-8, "int8": 2.0**-3}[state_dtype]
    before, after = saved(wide)["state"][0], once["state"][0]
    for key in ("exp_avg", "exp_avg_sq"):
        assert (
            (before[key] - after[key]).abs()
            <= coarse * before[key].abs() + 2.0**-13 * before[key].abs().max()
        ).all()
    # Masters come through exactly, but where a tie was rounded the other way.
    tie = before["master_weight"].view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(before["master_weight"][~tie], after["master_weight"][~tie])
    reference = torch.optim.AdamW([nn.Parameter(weight.detach().clone())])
    reference.load_state_dict(once)


@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("order", ["channels_last", "gaps"])
def test_memory_orders(state_dtype: str, order: str) -> None:
    """A weight in another order has its states in that order; the numbers are those of its contiguous twin, nearly."""
    plain = nn.Parameter(torch.randn(16, 8, 8, 8, generator=torch.Generator().manual_seed(1)))
    if order == "channels_last":
        other = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    else:
        other = nn.Parameter(torch.zeros(16, 8, 8, 16)[..., ::2])
        other.data.copy_(plain.detach())
    optimizers = [CPUAdamW([w], lr=1e-2, state_dtype=state_dtype) for w in (plain, other)]
    for step in range(5):
        grad = torch.randn(16, 8, 8, 8, generator=torch.Generator().manual_seed(step))
        for weight, optimizer in zip((plain, other), optimizers, strict=True):
            weight.grad = torch.empty_like(weight).copy_(grad)
            optimizer.step()
        if step == 2:
            # Other memory, in another order, under the optimizer's feet.
            other.data = other.detach().clone(memory_format=torch.contiguous_format)
    assert other.is_contiguous()
    assert (plain - other).abs().max() < {"bfloat16": 2e-3, "int8": 2e-2}[state_dtype]
    entries = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert (entries[0]["exp_avg"] - entries[1]["exp_avg"]).abs().max() < 0.2 * entries[0][
        "exp_avg"
    ].abs().max()


@pytest.mark.parametrize("state_dtype", LEAN)
@pytest.mark.parametrize("seen", [True, False])
def test_a_foreign_write_is_the_new_master(state_dtype: str, seen: bool) -> None:
    """In place autograd sees it; through ``.data`` nobody does, and still no lower half may join it to nonsense."""
    weight = weights_of(torch.bfloat16)
    optimizer = CPUAdamW([weight], lr=1e-3, weight_decay=0.0, state_dtype=state_dtype)
    run(weight, optimizer, 0, 4)
    new = torch.cat(
        [torch.zeros(NUMEL // 2), -torch.zeros(NUMEL // 4), torch.ones(NUMEL - NUMEL // 2 - NUMEL // 4)]
    )
    if seen:
        with torch.no_grad():
            weight.copy_(new)
    else:
        weight.data.copy_(new)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight.detach().float() - new).abs().max() < 0.02
    if seen:
        # The direction of four steps' moments at most, from exactly there.
        assert (optimizer.state_dict()["state"][0]["master_weight"] - new).abs().max() < 2e-3


def test_halves_join() -> None:
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 3.4e38, torch.inf, -torch.inf, 1e-45, -1e-40, 1 + 2.0**-8, 1 + 2.0**-9]
    )
    values = torch.cat([special, torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    high, low = _split(values)
    joined = _join(high.view(torch.bfloat16), low)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
    high, low = _split(torch.tensor([torch.nan]))
    assert high.view(torch.bfloat16).isnan().all()
    assert _join(high.view(torch.bfloat16), low).isnan().all()


@pytest.mark.parametrize("state_dtype", LEAN)
def test_small_tensors_stay_in_float32(state_dtype: str) -> None:
    weights = [nn.Parameter(torch.ones(100)) for _ in range(2)]
    for weight, kind in zip(weights, ("float32", state_dtype), strict=True):
        optimizer = CPUAdamW([weight], state_dtype=kind)
        for _ in range(3):
            weight.grad = torch.full((100,), 0.3)
            optimizer.step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("state_dtype", LEAN)
def test_clipping_and_voids_work_as_ever(state_dtype: str) -> None:
    weight = weights_of(torch.bfloat16)
    optimizer = CPUAdamW([weight], state_dtype=state_dtype, skip_nonfinite=True, max_grad_norm=1.0)
    run(weight, optimizer, 0, 3)
    before, state = weight.detach().clone(), saved(optimizer)
    weight.grad = torch.full_like(weight, torch.nan)
    with pytest.warns(UserWarning, match="was skipped"):
        optimizer.step()
    assert torch.equal(weight.detach(), before)
    assert not differences(saved(optimizer), state)


def test_other_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"state_dtype is 'int4'; accepted"):
        CPUAdamW([weights_of(torch.float32)], state_dtype="int4")  # type: ignore[arg-type]
