"""How CPUAdamW walks over its parameters: by torch's C exchange or attribute by attribute, with equal results.

The usual case never leaves the core; each unusual one is here: gradients that come and go, memory that is replaced,
other strides, foreign writes, counts beyond float32.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import (
    Adam64,
    assert_same_bits,
    assert_same_state,
    assert_unchanged,
    clones,
    gradients,
    parameters,
    run,
    set_gradients,
    snapshot,
)
from zenflow import ArgumentError, CPUAdamW, parameter_table

EXCHANGE = "__dlpack_c_exchange_api__"
SHAPES: list[tuple[int, ...]] = [(12, 7), (5,), (), (3, 4, 5), (0, 3), (1,)]


@pytest.fixture(params=["exchange", "attributes"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read a tensor; the second is all that an older torch has."""
    if request.param == "attributes":
        monkeypatch.delattr(torch.Tensor, EXCHANGE, raising=False)
    elif not hasattr(torch.Tensor, EXCHANGE):
        pytest.skip("this torch has no DLPack exchange")
    return str(request.param)


def both_ways(monkeypatch: pytest.MonkeyPatch, train: Callable[[], list[Tensor]]) -> None:
    """What ``train`` returns has the same bits on either path."""
    fast = train()
    monkeypatch.delattr(torch.Tensor, EXCHANGE, raising=False)
    for got, want in zip(train(), fast, strict=True):
        assert_same_bits(got, want)


def everything(optimizer: CPUAdamW, params: list[nn.Parameter]) -> list[Tensor]:
    """Weights and states."""
    states = [value for param in params for value in optimizer.state[param].values()]
    return [param.detach().clone() for param in params] + [value.clone() for value in states]


# --- The usual case -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipped", [False, True])
def test_a_steady_step_looks_at_no_parameter_in_python(
    path: str, dtype: torch.dtype, clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first step a parameter is read by the core alone, whatever it is clipped by."""
    params = parameters(SHAPES, dtype)
    optimizer = CPUAdamW(params, max_grad_norm=0.1 if clipped else None)
    run(optimizer, params, range(2))

    def never(*_: Any) -> None:
        raise AssertionError("a parameter was looked at in the long way")

    monkeypatch.setattr(parameter_table, "check_gradient", never)
    run(optimizer, params, range(2, 5))
    assert [optimizer.state[param]["step"].item() for param in params] == [5] * len(params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_on_both_paths(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping included."""

    def train() -> list[Tensor]:
        params = parameters(SHAPES, dtype)
        optimizer = CPUAdamW(params, max_grad_norm=0.05)
        run(optimizer, params, range(4))
        return everything(optimizer, params)

    both_ways(monkeypatch, train)


def test_gradients_that_come_and_go(path: str) -> None:
    """Another subset at every step, first gradients late and out of order, groups of their own: as float64 has it."""
    params = parameters([(6, 5)] * 9)
    oracles = [Adam64(param) for param in params]
    optimizer = CPUAdamW([{"params": params[i::3], "lr": (i + 1) * 1e-3} for i in range(3)])
    for step in range(12):
        grads = gradients(params, step)
        for i, param in enumerate(params):
            present = step >= (7 * i) % 5 and (i + step) % 4 != 0
            param.grad = grads[i] if present else None
            if present:
                oracles[i].step(grads[i], lr=(i % 3 + 1) * 1e-3)
        optimizer.step()
    for param, oracle in zip(params, oracles, strict=True):
        assert optimizer.state[param]["step"].item() == oracle.k
        assert oracle.error(param) < 1e-6


def test_parameters_that_are_reordered_and_removed(path: str) -> None:
    """Lists that a user edits: each parameter keeps its own state, and one that is out moves no more."""
    params = parameters([(4, 3), (6,), (2, 2), (9,)])
    twins = clones(params)
    optimizer, references = CPUAdamW(params), [CPUAdamW([twin]) for twin in twins]
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["params"].reverse()
        if step == 4:
            assert optimizer.param_groups[0]["params"].pop(2) is params[1]
        for i, (param, grad) in enumerate(zip(params, gradients(params, step), strict=True)):
            param.grad, twins[i].grad = grad, grad.clone()
            if step < 4 or i != 1:
                references[i].step()
        optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param, twin)


def test_autograd_knows_of_the_writing(path: str) -> None:
    """A backward that still needs the old weights fails, also after steps that Python saw nothing of."""
    for dtype in (torch.float32, torch.bfloat16):
        (param,) = parameters([(4, 4)], dtype)
        optimizer = CPUAdamW([param])
        run(optimizer, [param], range(3))
        loss = (param * param).sum()
        set_gradients([param], 3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- The unusual cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["same order", "other order", "other values", "gaps"])
def test_memory_that_is_replaced(path: str, dtype: torch.dtype, how: str) -> None:
    """``param.data = ...`` between two steps: training goes on in the new memory, the old one is left alone."""
    params, twins = parameters([(8, 6), (5,)], dtype), parameters([(8, 6), (5,)], dtype)
    optimizer, reference = CPUAdamW(params), CPUAdamW(twins)
    for step in range(6):
        if step == 3:
            old = params[0].data
            kept, new = old.clone(), old.clone()
            if how == "other order":
                new = new.t().contiguous().t()
            elif how == "other values":
                new.mul_(1.5)
                with torch.no_grad():
                    twins[0].mul_(1.5)
            elif how == "gaps":
                new = torch.stack([new, new], dim=-1)[..., 0]
            params[0].data = new
        for opt, chosen in ((optimizer, params), (reference, twins)):
            run(opt, chosen, [step])
    assert_same_bits(old, kept, "the memory that was given up")
    for param, twin in zip(params, twins, strict=True):
        assert_same_bits(param, twin)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_in_another_order(path: str, dtype: torch.dtype, clipped: bool) -> None:
    """Transposed, sliced and expanded gradients mean what contiguous ones do, in steps of their own between others."""
    (param,), (twin,) = parameters([(6, 6)], dtype), parameters([(6, 6)], dtype)
    bound = 1e9 if clipped else None
    optimizer, reference = CPUAdamW([param], max_grad_norm=bound), CPUAdamW([twin], max_grad_norm=bound)
    for step in range(8):
        grad = gradients([param], step)[0]
        if step % 4 == 3:
            grad = grad[0].expand(6, 6)
        twin.grad = grad.contiguous()
        param.grad = {
            0: grad,
            1: grad.t().contiguous().t(),
            2: torch.stack([grad, grad], dim=-1)[..., 1],
            3: grad,
        }[step % 4]
        for opt in (optimizer, reference):
            opt.step()
    assert_same_bits(param, twin)


def test_a_lazily_negated_gradient(path: str) -> None:
    """The imaginary part of a conjugate is stored with its sign flipped; the step reads its value."""
    for count in (1, 3):
        (param,), (twin,) = parameters([(count,)]), parameters([(count,)])
        optimizer, reference = CPUAdamW([param]), CPUAdamW([twin])
        for step in range(3):
            values = gradients([param], step)[0]
            param.grad = torch.complex(values, -values).conj().imag
            assert param.grad.is_neg()
            twin.grad = values
            optimizer.step()
            reference.step()
        assert_same_bits(param, twin)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sparse", "no memory", "parameter's shape", "parameter's dtype"])
def test_one_refusal_changes_nothing(path: str, dtype: torch.dtype, kind: str) -> None:
    """The last parameter's gradient is bad: no other has moved, no state was made, and all goes on afterwards."""
    params = parameters([(4, 3), (6,), (2, 5)], dtype)
    optimizer = CPUAdamW(params)
    params[0].grad = params[2].grad = None
    run(optimizer, params[1:], range(2))
    before = snapshot(optimizer)
    set_gradients(params, 2)
    last, good = params[2], params[2].data
    assert last.grad is not None
    if kind == "sparse":
        last.grad = torch.zeros(2, 5, dtype=dtype).to_sparse()
    elif kind == "no memory":
        last.grad.untyped_storage().resize_(0)
    else:
        last.grad = None
        last.data = torch.ones(3, dtype=dtype) if "shape" in kind else torch.ones(2, 5, dtype=torch.float16)
        last.grad = torch.ones_like(last)
    with pytest.raises(ArgumentError, match=r"parameter 2 of group 0.*accepted"):
        optimizer.step()
    last.grad = None
    last.data = good
    assert_unchanged(before, optimizer)
    run(optimizer, params, [2])
    assert [optimizer.state[param]["step"].item() for param in params] == [1, 3, 3]


class Tagged(Tensor):
    """A subclass of Tensor that changes nothing."""


def test_subclasses_without_tricks(path: str) -> None:
    """As parameters and as gradients."""
    (twin,) = parameters([(4, 3)])
    param = twin.detach().clone().as_subclass(Tagged).requires_grad_()
    optimizer, reference = CPUAdamW([param]), CPUAdamW([twin])
    for step in range(3):
        twin.grad = gradients([twin], step)[0]
        param.grad = twin.grad.clone().as_subclass(Tagged)
        optimizer.step()
        reference.step()
    assert_same_bits(param.detach().as_subclass(Tensor), twin)


def test_a_parameter_listed_twice_by_hand(path: str) -> None:
    """Two updates of one tensor at once would race; so there is none."""
    params = parameters([(4,), (3,)])
    optimizer = CPUAdamW(params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["params"].append(params[0])
    before = [param.detach().clone() for param in params]
    set_gradients(params, 2)
    with pytest.raises(ArgumentError, match="at most once"):
        optimizer.step()
    for param, kept in zip(params, before, strict=True):
        assert_same_bits(param, kept)


# --- Counts and copies --------------------------------------------------------------------------------------


def test_counts_beyond_float32_stay_exact(path: str) -> None:
    """2^24 + 1 isn't a float32: from there on ``step`` is float64, live and saved."""
    params = parameters([(3,), (4,)])
    optimizer = CPUAdamW(params)
    run(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(float((1 << 24) - 1))
    optimizer.load_state_dict(saved)
    for k in range(1 << 24, (1 << 24) + 4):
        run(optimizer, params, [0])
        assert optimizer.state[params[0]]["step"].item() == k
        again = CPUAdamW(clones(params))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert again.state_dict()["state"][0]["step"].item() == k
    assert optimizer.state[params[1]]["step"].item() == 5
    assert optimizer.state[params[1]]["step"].dtype == torch.float32


def test_entries_share_nothing_with_each_other(path: str) -> None:
    """A saved ``step`` can be edited without another parameter's following, and survives a file."""
    params = parameters([(3,), (4,), (5,)], torch.bfloat16)
    optimizer = CPUAdamW(params)
    run(optimizer, params, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)["state"]
    state[0]["step"].add_(10)
    assert [state[i]["step"].item() for i in range(3)] == [12, 2, 2]
    memory = [
        value.untyped_storage().data_ptr() for entry in optimizer.state.values() for value in entry.values()
    ]
    assert len(set(memory)) == len(memory)
    torch_optimizer = torch.optim.AdamW(params)
    torch_optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    assert torch_optimizer.state[params[0]]["step"].item() == 12


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_walks_by_itself(path: str, copied: Callable[[Any], Any]) -> None:
    """Copies made in mid-training go on as the original does, which doesn't move with them."""
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = CPUAdamW(params)
    run(optimizer, params[1:], range(2))
    twins, twin = copied((params, optimizer))
    before = snapshot(optimizer)
    run(twin, twins, range(2, 4))
    assert_unchanged(before, optimizer)
    run(optimizer, params, range(2, 4))
    assert_same_state(twin.state_dict(), optimizer.state_dict())
    for mine, other in zip(params, twins, strict=True):
        assert_same_bits(mine, other)
