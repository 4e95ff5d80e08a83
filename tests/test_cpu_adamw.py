"""CPUAdamW against float64 and against torch's own AdamW and Adam: numbers, shapes, states, bits."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
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
    GRADIENT_LAYOUTS,
    HAS_GRAD_DTYPE,
    Adam64,
    as64,
    assert_same_bits,
    assert_same_state,
    assert_unchanged,
    clones,
    gradients,
    laid_out,
    layouts,
    parameters,
    run,
    set_gradients,
    snapshot,
    update_error,
)
from zenflow import CPUAdamW, _core

# --- Accuracy ---------------------------------------------------------------------------------------------

# ||error|| / ||update|| against float64, fp32 weights of about 0.02, lr 1e-3. The floor at step 1 is the rounding of
# the weight itself; later steps are wrong by less, relative to what they moved.
BUDGETS = {1: 1e-6, 10: 5e-7, 1000: 1e-6}


def test_fp32_stays_near_float64_and_nearer_than_torch() -> None:
    """The budgets hold after 1, 10 and 1,000 steps, and after 1,000 torch's own error is several times ours."""
    ours = parameters([(37, 29), (101,)])
    theirs = clones(ours)
    oracles = [Adam64(param) for param in ours]
    optimizer = CPUAdamW(ours, lr=1e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1)
    for step in range(1, 1001):
        for param, other, oracle, grad in zip(ours, theirs, oracles, gradients(ours, step), strict=True):
            param.grad, other.grad = grad, grad.clone()
            oracle.step(grad, lr=1e-3, weight_decay=0.1)
        optimizer.step()
        reference.step()
        if step in BUDGETS:
            for param, other, oracle in zip(ours, theirs, oracles, strict=True):
                assert oracle.error(param) <= BUDGETS[step], step
                assert oracle.error(param) <= 1.05 * oracle.error(other), step
    for param, other, oracle in zip(ours, theirs, oracles, strict=True):
        assert 3 * oracle.error(param) < oracle.error(other)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 9), max_size=3),
    lr=st.floats(1e-6, 1e-1),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9, 0.99]), st.sampled_from([0.5, 0.9, 0.999, 0.99999])),
    eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 1.0]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    steps=st.integers(1, 30),
)
def test_any_setting_follows_the_equations(
    dtype: torch.dtype, shape: list[int], lr: float, decoupled: bool, maximize: bool, steps: int, **rest: Any
) -> None:
    """Moments and master within a few ULPs of float64 for every dtype and setting; the weight is the rounded master."""
    (param,) = parameters([shape], dtype)
    oracle = Adam64(param, decoupled=decoupled, maximize=maximize)
    optimizer = CPUAdamW([param], lr=lr, decoupled_weight_decay=decoupled, maximize=maximize, **rest)
    for step in range(steps):
        param.grad = gradients([param], step)[0]
        optimizer.step()
        oracle.step(param.grad, lr=lr, **rest)
    state = optimizer.state[param]
    master = state.get("master_weight", param)
    # L2 decay feeds the weight's rounding back into the gradient, where it may stand against a small difference.
    loose = 1.0 if decoupled else 30.0
    size = np.linalg.norm(oracle.weight) + np.linalg.norm(oracle.start)
    moved = np.linalg.norm(oracle.weight - oracle.start) + lr * np.sqrt(oracle.weight.size)
    wrong = np.linalg.norm(as64(master) - oracle.weight)
    assert wrong <= loose * (1e-6 * moved + 6e-8 * np.sqrt(steps) * size)
    for key in ("exp_avg", "exp_avg_sq"):
        moment = getattr(oracle, key)
        highest = 0.05 if key == "exp_avg" else 0.0025
        assert abs(as64(state[key]) - moment).max() <= loose * 2**-22 * (highest + abs(moment).max()), key
    assert_same_bits(param, master.detach().to(dtype), "weight")


@pytest.mark.parametrize(("param_dtype", "grad_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_every_dtype_pair(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """A gradient of any of the three dtypes updates a parameter of any: as its exact float32 value would."""
    if param_dtype != grad_dtype and not HAS_GRAD_DTYPE:
        pytest.skip("this torch refuses a gradient of another dtype than its parameter's")
    (param,) = parameters([(13, 11)], param_dtype)
    oracle = Adam64(param)
    optimizer = CPUAdamW([param])
    if param_dtype != grad_dtype:
        param.grad_dtype = grad_dtype
    for step in range(20):
        grad = gradients([param.float()], step)[0].to(grad_dtype)
        param.grad = grad
        optimizer.step()
        oracle.step(grad)
    state = optimizer.state[param]
    master = state.get("master_weight", param)
    assert oracle.error(master) <= 1e-6
    assert_same_bits(param, master.detach().to(param_dtype), "weight")
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_equals_torch_in_both_kinds_of_decay(decoupled: bool, maximize: bool) -> None:
    """AdamW against torch.optim.AdamW, L2 against torch.optim.Adam; the two differ."""
    ours = parameters([(40, 20), (20,)])
    start, theirs = clones(ours), clones(ours)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.5, "maximize": maximize}
    run(CPUAdamW(ours, decoupled_weight_decay=decoupled, **options), ours, range(50))
    run(kind(theirs, **options), theirs, range(50))
    assert update_error(ours, theirs, start) < 2e-5
    other = clones(start)
    run(CPUAdamW(other, decoupled_weight_decay=not decoupled, **options), other, range(50))
    assert update_error(other, theirs, start) > 1e-2


def test_groups_keep_their_own_settings_interleaved() -> None:
    """lr, betas, eps, decay and maximize of four interleaved groups each reach their own parameters."""
    ours = parameters([(8, 5), (7,), (3, 3, 3), (6, 4)] * 2)
    start, theirs = clones(ours), clones(ours)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [
            {"lr": 1e-2, "weight_decay": 0.1},
            {"lr": torch.tensor(1e-4), "weight_decay": 0.0, "betas": (0.5, 0.9)},
            {"eps": 1e-3, "maximize": True},
            {"betas": (0.0, 0.99)},
        ]
        return [{"params": params[i::4], **own[i]} for i in range(4)]

    run(CPUAdamW(groups(ours), lr=1e-3), ours, range(30))
    run(torch.optim.AdamW(groups(theirs), lr=1e-3), theirs, range(30))
    for mine, other, first in zip(ours, theirs, start, strict=True):
        assert update_error([mine], [other], [first]) < 2e-5


def test_max_grad_norm_is_clip_grad_norm() -> None:
    """The option equals torch's clipping of the global norm, above and below the bound."""
    ours = parameters([(50, 20), (300,)])
    start, theirs = clones(ours), clones(ours)
    optimizer = CPUAdamW(ours, max_grad_norm=0.3)
    reference = torch.optim.AdamW(theirs)
    for step in range(20):
        for params in (ours, theirs):
            set_gradients(params, step, scale=1e-3 if step % 3 else 1.0)
        torch.nn.utils.clip_grad_norm_(theirs, 0.3)
        kept = [param.grad.clone() for param in ours if param.grad is not None]
        optimizer.step()
        reference.step()
        for param, grad in zip(ours, kept, strict=True):
            assert param.grad is not None
            assert_same_bits(param.grad, grad, "a gradient, which the step only reads")
    assert update_error(ours, theirs, start) < 2e-5


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_skip_nonfinite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    """One bad element anywhere voids the step for all parameters: counted, warned of once."""
    params = parameters([(9, 7), (5,), (4, 4)], dtype)
    twins = clones(params)
    optimizer = CPUAdamW(params, skip_nonfinite=True)
    reference = CPUAdamW(twins)
    for chosen in (params, twins):
        run(optimizer if chosen is params else reference, chosen, range(3))
    before = snapshot(optimizer)
    for i, element in enumerate((0, 4, 15)):
        set_gradients(params, i)
        grad = params[i].grad
        assert grad is not None
        grad.view(-1)[element] = bad
        if i == 0:
            with pytest.warns(UserWarning, match="inf or NaN gradients was skipped"):
                optimizer.step()
        else:
            optimizer.step()
        assert_unchanged(before, optimizer)
    assert optimizer.skipped_steps == 3
    for opt, chosen in ((optimizer, params), (reference, twins)):
        run(opt, chosen, range(3, 6))
    for mine, other in zip(params, twins, strict=True):
        assert_same_bits(mine, other)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_without_skip_nonfinite_a_nan_goes_through_as_in_torch() -> None:
    """Like torch: the element turns NaN, its neighbours don't."""
    (param,) = parameters([(6,)])
    param.grad = torch.ones(6)
    param.grad[2] = float("nan")
    CPUAdamW([param]).step()
    assert param.isnan().tolist() == [False, False, True, False, False, False]


# --- Bits -------------------------------------------------------------------------------------------------


def dense_step(pool: _core.Pool, dtype: torch.dtype, decoupled: bool) -> list[Tensor]:
    """Three steps of the kernel over many pieces of work; all that it wrote."""
    weights = [param.detach() for param in parameters([(1,), (530_001,), (63,), (4097,), (300, 300)], dtype)]
    masters = [None if dtype == torch.float32 else weight.float() for weight in weights]
    first = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    second = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    tensors = _core.AdamTensors(weights, masters, first, second)
    group = ((1e-3, 0.9, 0.999, 1e-8, 0.1), 0.7, decoupled)
    for step in range(1, 4):
        grads = gradients(weights, step)
        tensors.step(pool, range(5), grads, [step] * 5, [group], [0] * 5)
    return [*weights, *(master for master in masters if master is not None), *first, *second]


def pools() -> dict[str, Callable[[], _core.Pool]]:
    """Every instruction set on all cores, and 1, 2 and 7 threads wherever the system puts them."""
    made: dict[str, Callable[[], _core.Pool]] = {
        isa: functools.partial(_core.Pool, _core.all_cores(), isa=isa) for isa in _core.isas()
    }
    for threads in (1, 2, 7):
        made[f"{threads} threads"] = functools.partial(_core.Pool, threads=threads)
    return made


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_on_every_isa_and_thread_count(dtype: torch.dtype, decoupled: bool) -> None:
    """Neither the instruction set nor the number of threads shows in the result."""
    expected = dense_step(_core.Pool([_core.all_cores()[0]], isa="portable"), dtype, decoupled)
    for name, make in pools().items():
        for got, want in zip(dense_step(make(), dtype, decoupled), expected, strict=True):
            assert_same_bits(got, want, name)


def test_cores_of_the_optimizer_don_t_show() -> None:
    """One core or all of them: equal bits."""
    results = []
    for cores in (_core.all_cores()[:1], "auto"):
        params = parameters([(600, 700), (50,)], torch.bfloat16)
        optimizer = CPUAdamW(params, cores=cores, max_grad_norm=0.1)
        run(optimizer, params, range(3))
        results.append(optimizer.state_dict())
    assert_same_state(results[0], results[1])


def test_two_runs_give_equal_bits() -> None:
    """Nothing depends on timing or memory."""
    states = []
    for _ in range(2):
        params = parameters([(300, 1001), (77,)], torch.bfloat16)
        optimizer = CPUAdamW(params, max_grad_norm=0.5)
        run(optimizer, params, range(5))
        states.append(optimizer.state_dict())
    assert_same_state(states[0], states[1])


# --- Shapes and memory layouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
def test_shapes_and_layouts(layout: str, dtype: torch.dtype, grad_layout: str) -> None:
    """Each layout of parameter and gradient has the numbers that contiguous ones have, bit for bit."""
    memory = layouts()[layout](dtype)
    param = nn.Parameter(memory)
    assert param.data_ptr() == memory.data_ptr()
    plain = nn.Parameter(memory.clone(memory_format=torch.contiguous_format))
    optimizer, reference = CPUAdamW([param]), CPUAdamW([plain])
    for step in range(4):
        plain.grad = gradients([plain], step)[0]
        if grad_layout == "expanded":
            plain.grad = plain.grad.mean().to(dtype).expand(plain.shape).contiguous()
        param.grad = laid_out(plain.grad, param, grad_layout)
        optimizer.step()
        reference.step()
    assert_same_bits(memory, plain.detach(), "the memory that the parameter was made of")
    for key, value in reference.state[plain].items():
        assert optimizer.state[param][key].shape == value.shape
        assert_same_bits(optimizer.state[param][key], value, key)


def test_what_lies_between_a_sliced_parameter_s_elements_stays() -> None:
    """A step writes the parameter's elements and no others."""
    base = torch.full((10, 24), 3.0)
    param = nn.Parameter(base[:, ::2])
    param.grad = torch.ones(10, 12)
    CPUAdamW([param]).step()
    assert (base[:, 1::2] == 3.0).all()
    assert (base[:, ::2] != 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_memory_format_in_mid_training(dtype: torch.dtype) -> None:
    """``module.to(memory_format=...)`` gives parameters other memory in another order; the moments follow."""
    conv, plain = nn.Conv2d(5, 6, 3).to(dtype), nn.Conv2d(5, 6, 3).to(dtype)
    plain.load_state_dict(conv.state_dict())
    optimizer, reference = CPUAdamW(conv.parameters()), CPUAdamW(plain.parameters())
    for step in range(6):
        if step in (2, 4):
            conv.to(memory_format=torch.channels_last if step == 2 else torch.contiguous_format)
        for module, opt in ((conv, optimizer), (plain, reference)):
            run(opt, list(module.parameters()), [step])
    for got, want in zip(conv.parameters(), plain.parameters(), strict=True):
        assert_same_bits(got, want)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


# --- Who is updated -----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(present=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=12))
def test_missing_gradients_count_for_nobody(present: list[list[bool]]) -> None:
    """A parameter without a gradient is left alone, counts no step, and shifts no other."""
    shapes: list[tuple[int, ...]] = [(4, 3), (5,), (), (2, 2, 2)]
    ours = parameters(shapes, torch.bfloat16)
    optimizer = CPUAdamW(ours)
    alone = clones(ours)
    references = [CPUAdamW([param]) for param in alone]
    for step, row in enumerate(present):
        grads = gradients(ours, step)
        for i, there in enumerate(row):
            ours[i].grad = grads[i] if there else None
            if there:
                alone[i].grad = grads[i].clone()
                references[i].step()
        optimizer.step()
    for i, param in enumerate(ours):
        count = sum(row[i] for row in present)
        assert (param in optimizer.state) == (count > 0)
        assert_same_bits(param, alone[i])
        if count:
            assert optimizer.state[param]["step"].item() == count


def test_foreign_writes_become_the_master() -> None:
    """What is written into a 16-bit weight under no_grad is where training goes on; other elements keep their bits."""
    (param,) = parameters([(40,)], torch.bfloat16)
    optimizer = CPUAdamW([param])
    run(optimizer, [param], range(3))
    master = optimizer.state[param]["master_weight"].clone()
    with torch.no_grad():
        param[:10] = 1.5
    param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    now = optimizer.state[param]["master_weight"]
    assert (now[:10] == 1.5).all()
    assert_same_bits(now[10:], master[10:], "masters of elements that nobody wrote")


# --- State dicts --------------------------------------------------------------------------------------------


def through_file(state: Any) -> Any:
    """Saved and loaded as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_state_goes_to_torch_and_back(kind: type[torch.optim.Optimizer], named: bool) -> None:
    """A run that changes optimizers twice, torch to ours to torch, is the run that never did."""

    def entries(params: list[nn.Parameter]) -> Any:
        return [(f"layer.{i}", param) for i, param in enumerate(params)] if named else params

    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    ours = parameters([(20, 10), (10,), ()])
    start, theirs = clones(ours), clones(ours)
    steady = kind(entries(theirs), **options)
    run(steady, theirs, range(30))

    first = kind(entries(ours), **options)
    run(first, ours, range(10))
    # Every setting comes with the state dict; the kind of decay too.
    second = CPUAdamW(entries(ours))
    second.load_state_dict(through_file(first.state_dict()))
    assert second.param_groups[0]["lr"] == 3e-3
    run(second, ours, range(10, 20))
    third = kind(entries(ours), **options)
    third.load_state_dict(through_file(second.state_dict()))
    run(third, ours, range(20, 30))
    assert update_error(ours, theirs, start) < 2e-5
    assert third.state[ours[0]]["step"].item() == 30
    if named:
        assert second.param_groups[0]["param_names"] == ["layer.0", "layer.1", "layer.2"]


def test_fp32_state_of_bf16_parameters_survives_bit_for_bit() -> None:
    """torch's own load would round moments to the parameter's dtype; ours doesn't, and training goes on equal."""
    params = parameters([(33, 7), (5,)], torch.bfloat16)
    optimizer = CPUAdamW(params)
    run(optimizer, params, range(7))
    saved = through_file(optimizer.state_dict())
    twins = clones(params)
    loaded = CPUAdamW(twins)
    loaded.load_state_dict(saved)
    assert_same_state(loaded.state_dict(), optimizer.state_dict())
    for opt, chosen in ((optimizer, params), (loaded, twins)):
        run(opt, chosen, range(7, 12))
    for mine, other in zip(params, twins, strict=True):
        assert_same_bits(mine, other)
    assert_same_state(loaded.state_dict(), optimizer.state_dict())


def test_loading_takes_a_copy() -> None:
    """The state dict that was loaded doesn't change as training goes on."""
    (param,) = parameters([(5, 5)])
    optimizer = CPUAdamW([param])
    run(optimizer, [param], range(2))
    saved = through_file(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    run(optimizer, [param], range(2))
    assert_same_state(saved, kept)


@pytest.mark.parametrize(
    "step", [41, 41.0, torch.tensor(41), torch.tensor(41.0), torch.tensor(41.0, dtype=torch.float64)]
)
def test_int_float_and_tensor_steps_load(step: Any) -> None:
    """Older checkpoints keep ``step`` as a number, some as an integer tensor."""
    (param,) = parameters([(6,)])
    optimizer = CPUAdamW([param])
    run(optimizer, [param], range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    run(optimizer, [param], range(1))
    assert optimizer.state[param]["step"].item() == 42


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": False}])
def test_a_torch_checkpoint_loads_whatever_it_ran_on(options: dict[str, Any]) -> None:
    """``foreach`` and ``fused`` name ways to run AdamW, not another algorithm: such checkpoints load and step."""
    params = parameters([(6, 3)])
    theirs = torch.optim.AdamW(params, **options)
    run(theirs, params, range(2))
    optimizer = CPUAdamW(params)
    optimizer.load_state_dict(theirs.state_dict())
    run(optimizer, params, range(2, 4))
    assert optimizer.state[params[0]]["step"].item() == 4


def test_a_checkpoint_of_an_older_torch_loads() -> None:
    """Group keys that torch added over the years may be missing."""
    params = parameters([(6, 3)])
    optimizer = CPUAdamW(params)
    run(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        del saved["param_groups"][0][key]
    fresh = CPUAdamW(params)
    fresh.load_state_dict(saved)
    run(fresh, params, range(2, 3))
    assert fresh.state[params[0]]["step"].item() == 3


def pickled(value: Any) -> Any:
    """Through pickle."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("layout", ["odd", "channels_last", "every other", "sliced and transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_go_on_equal(copied: Callable[[Any], Any], layout: str, dtype: torch.dtype) -> None:
    """A copy made in mid-training takes the same steps as the original, and shares nothing with it."""
    params = [nn.Parameter(layouts()[layout](dtype)), *parameters([(4,)], dtype)]
    optimizer = CPUAdamW(params, lr=1e-2, max_grad_norm=0.1, skip_nonfinite=True)
    run(optimizer, params, range(3))
    twins, twin = copied((params, optimizer))
    assert twin.param_groups[0]["params"][0] is twins[0]
    for opt, chosen in ((optimizer, params), (twin, twins)):
        run(opt, chosen, range(3, 6))
    for mine, other in zip(params, twins, strict=True):
        assert mine.data_ptr() != other.data_ptr()
        assert_same_bits(mine, other)
    assert_same_state(twin.state_dict(), optimizer.state_dict())
