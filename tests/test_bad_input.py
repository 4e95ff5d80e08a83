"""What can't be right is refused: the error names the argument, its value and what is accepted; nothing changes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zenflow
from helpers import HAS_GRAD_DTYPE, Make, assert_unchanged, parameters, run, set_gradients, snapshot
from zenflow import ArgumentError, CPUAdamW, ZenFlowAdamW

SHAPES: list[tuple[int, ...]] = [(24, 10), (10,), (6, 8)]
NAN, INF = math.nan, math.inf


@pytest.fixture(params=["cpu", "zenflow"])
def make(request: pytest.FixtureRequest, zenflow_adamw: Callable[..., ZenFlowAdamW]) -> Make:
    """Both optimizers in turn."""
    return CPUAdamW if request.param == "cpu" else zenflow_adamw


@pytest.fixture
def trained(make: Make) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer in mid-window, and its parameters."""
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = make(params)
    run(optimizer, params, range(3))
    return optimizer, params


def refused(*words: str) -> Any:
    """Expects an ArgumentError, which is a ValueError, whose message has each of ``words`` and what is accepted."""
    everything = "".join(f"(?=.*{re.escape(word)})" for word in (*words, "accepted"))
    return pytest.raises(ArgumentError, match=f"(?s){everything}")


def test_the_error_is_both_families() -> None:
    """``except ValueError`` and ``except zenflow.ZenFlowError`` both catch it."""
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentError, zenflow.ZenFlowError)


# --- Arguments ------------------------------------------------------------------------------------------------

COMMON: list[tuple[str, Any, str]] = [
    *[("lr", value, "lr is") for value in (NAN, INF, -INF, -1e-3, "1e-3", None, True, 1j, torch.ones(2))],
    ("lr", torch.tensor(NAN), "lr is nan"),
    *[("eps", value, "eps is") for value in (NAN, INF, -1e-8, "x", None)],
    *[("weight_decay", value, "weight_decay is") for value in (NAN, INF, -0.1, "x", None)],
    *[("betas", (value, 0.999), "betas[0] is") for value in (1.0, -0.1, 1.5, NAN, INF, "x", None)],
    *[("betas", (0.9, value), "betas[1] is") for value in (1.0, -0.1, 1.5, NAN, INF, "x", None)],
    *[("betas", value, "betas is") for value in ((), (0.9,), (0.9, 0.99, 0.999), 0.9, None)],
    *[("max_grad_norm", value, "max_grad_norm is") for value in (0, 0.0, -1, NAN, INF, "x", True)],
    *[
        ("cores", value, "cores is")
        for value in ([], (), [0, 0], [10**6], [-1], "all", "0", 1, [0.5], [True], None)
    ],
    *[("skip_nonfinite", value, "skip_nonfinite is") for value in (1, None, "yes")],
    *[("maximize", value, "maximize is") for value in (1, None, "yes")],
    *[
        (name, True, f"{name} is True")
        for name in ("amsgrad", "foreach", "fused", "capturable", "differentiable")
    ],
]

ZENFLOW: list[tuple[str, Any, str]] = [
    *[("topk_ratio", value, "topk_ratio is") for value in (-0.1, 1.1, NAN, INF, "x", None, True)],
    *[("update_interval", value, "update_interval is") for value in (0, -1, 1.5, "x", True, None, 4.0)],
    *[("staleness", value, "staleness is") for value in (2, -1, True, False, "0", None, 0.5)],
    *[("select_interval", value, "select_interval is") for value in (0, -1, 1.5, "x", True, None)],
    *[("full_warm_up_rounds", value, "full_warm_up_rounds is") for value in (-1, 0.5, "x", True, None)],
    *[("min_offload_numel", value, "min_offload_numel is") for value in (-1, 0.5, "x", None)],
    *[("bucket_numel", value, "bucket_numel is") for value in (10, 0, -1, 1e6, "x", None)],
    *[("max_staging_bytes", value, "max_staging_bytes is") for value in (0, -1, 0.5, "x", None)],
    ("decoupled_weight_decay", False, "decoupled_weight_decay is False"),
]


def shown(value: Any) -> str:
    """How a message shows a value; for a tensor of several elements its shape will do."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) and value.numel() > 1 else ""


@pytest.mark.parametrize(("name", "value", "message"), COMMON, ids=lambda value: str(value)[:24])
def test_arguments_out_of_range(make: Make, name: str, value: Any, message: str) -> None:
    """Refused by the constructor; parameters are as they were."""
    params = parameters(SHAPES)
    kept = [param.detach().clone() for param in params]
    with refused(message, shown(value)):
        make(params, **{name: value})
    for param, other in zip(params, kept, strict=True):
        assert torch.equal(param, other)
        assert param.grad is None


@pytest.mark.parametrize(("name", "value", "message"), ZENFLOW, ids=lambda value: str(value)[:24])
def test_zenflow_arguments_out_of_range(
    zenflow_adamw: Callable[..., ZenFlowAdamW], name: str, value: Any, message: str
) -> None:
    """The same for what ZenFlowAdamW alone has; a model that was given bears no hooks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with refused(message):
        zenflow_adamw(model, **{name: value})
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_value_is_in_the_message() -> None:
    """Not only the name: what was given, as Python writes it."""
    params = parameters(SHAPES)
    for option, text in (
        ({"lr": -0.25}, "-0.25"),
        ({"betas": (0.9, 1.5)}, "1.5"),
        ({"topk_ratio": 1.25}, "1.25"),
        ({"update_interval": "often"}, "'often'"),
        ({"cores": [10**6]}, "1000000"),
        ({"bucket_numel": 10}, "10"),
    ):
        with refused(*option, text):
            ZenFlowAdamW(params, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[entry[:2] for entry in COMMON if entry[0] in ("lr", "eps", "weight_decay", "betas")],
        *[entry[:2] for entry in COMMON if entry[0] in ("maximize", "amsgrad", "fused", "foreach")],
        ("decoupled_weight_decay", "yes"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_group_settings_out_of_range(make: Make, option: str, value: Any) -> None:
    """In a group: at construction, in add_param_group, and when set by hand before a step."""
    params = parameters([*SHAPES, (4,)], torch.bfloat16)
    with refused(option):
        make([{"params": params[:2]}, {"params": params[2:], option: value}])
    optimizer = make(params[:3])
    run(optimizer, params[:3], range(3))
    before = snapshot(optimizer)
    with refused(option):
        optimizer.add_param_group({"params": params[3:], option: value})
    assert_unchanged(before, optimizer)
    good = optimizer.param_groups[0][option]
    set_gradients(params[:3], 3)
    optimizer.param_groups[0][option] = value
    with refused(option):
        optimizer.step()
    optimizer.param_groups[0][option] = good
    assert_unchanged(before, optimizer)
    optimizer.step()


def test_a_scheduler_that_makes_the_rate_nan(
    trained: tuple[torch.optim.Optimizer, list[nn.Parameter]],
) -> None:
    """Refused before anything is changed; a good rate goes on as if nothing had been."""
    optimizer, params = trained
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: NAN if step == 1 else 1.0)
    before = snapshot(optimizer)
    set_gradients(params, 3)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    with refused("lr is nan"):
        optimizer.step()
    assert_unchanged(before, optimizer)
    scheduler.step()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"].item() == 4


# --- Parameters -----------------------------------------------------------------------------------------------


def non_leaf() -> Tensor:
    """A tensor that autograd computed."""
    return torch.ones(4, 4, requires_grad=True) * 2


BAD_PARAMETERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "float64": (lambda: nn.Parameter(torch.ones(3, 3, dtype=torch.float64)), ("float64",)),
    "int64": (lambda: torch.ones(3, dtype=torch.int64), ("int64",)),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), ("bool",)),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), ("float8",)),
    "complex": (lambda: nn.Parameter(torch.ones(3, 3, dtype=torch.complex64)), ("complex64", "view_as_real")),
    "meta": (lambda: nn.Parameter(torch.ones(3, 3, device="meta")), ("meta", "CPU")),
    "sparse": (lambda: nn.Parameter(torch.eye(3).to_sparse()), ("sparse",)),
    "expanded": (lambda: nn.Parameter(torch.ones(3, 1).expand(3, 5)), ("expanded", "(1, 0)")),
    "non-leaf": (non_leaf, ("not a leaf",)),
    "number": (lambda: 3, ("int",)),
    "text": (lambda: "weight", ("str",)),
    "None": (lambda: None, ("NoneType",)),
}


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_parameters_that_cannot_be_held(make: Make, kind: str, place: int) -> None:
    """Refused by place, or by name where there are names; at construction and in add_param_group."""
    create, words = BAD_PARAMETERS[kind]
    params: list[Any] = list(parameters([(4, 4), (3,)]))
    params.insert(place, create())
    with refused(f"parameter {place} of group 0", *words):
        make(params)
    optimizer = make(parameters([(4, 4)]))
    before = snapshot(optimizer)
    with refused(f"parameter {place} of group 1", *words):
        optimizer.add_param_group({"params": params})
    assert_unchanged(before, optimizer)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], ("params is empty",)),
        (iter([]), ("params is empty",)),
        (torch.ones(3), ("params is a Tensor",)),
        (nn.Parameter(torch.ones(3)), ("params is a Parameter",)),
        ({nn.Parameter(torch.ones(3))}, ("params is a set",)),
        ([{"params": {nn.Parameter(torch.ones(3))}}], ("params of group 0 is a set",)),
        ([{"lr": 1e-3}], ("group 0", "'params'")),
    ],
    ids=["empty", "empty iterator", "tensor", "parameter", "set", "set in a group", "no params"],
)
def test_lists_of_parameters(make: Make, params: Any, words: tuple[str, ...]) -> None:
    """What isn't an ordered list of at least one parameter."""
    with refused(*words):
        make(params)


@pytest.mark.parametrize("params", [None, 3, 0.5])
def test_what_is_no_list_at_all(make: Make, params: Any) -> None:
    """The same TypeError that torch raises."""
    with pytest.raises(TypeError):
        make(params)


def test_a_parameter_given_twice(make: Make) -> None:
    """In one list, over groups, and in add_param_group, where the optimizer goes on without the group."""
    first, second = parameters([(4, 4), (3,)])
    with refused("parameter 2 of group 0", "more than once"):
        make([first, second, first])
    with refused("parameter 1 of group 1", "more than once"):
        make([{"params": [first]}, {"params": [second, first]}])
    optimizer = make([first])
    run(optimizer, [first], range(2))
    before = snapshot(optimizer)
    for group in ([first], [second, first], [second, second]):
        with refused("of group 1", "more than once"):
            optimizer.add_param_group({"params": group})
        assert_unchanged(before, optimizer)
    run(optimizer, [first], range(2, 3))


def test_models(zenflow_adamw: Callable[..., ZenFlowAdamW]) -> None:
    """``model`` is a module, and the one that owns the parameters."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with refused("model", "another module"):
        zenflow_adamw(model, model=other)
    with refused("model", "int"):
        zenflow_adamw(model.parameters(), model=3)
    with refused("model", "type"):
        zenflow_adamw(model.parameters(), model=nn.Linear)
    with refused("model doesn't own parameter 0 of group 0"):
        zenflow_adamw(other.parameters(), model=model)
    with refused("model doesn't own parameter 'bias'"):
        zenflow_adamw([("weight", model.weight), ("bias", other.bias)], model=model)
    with refused("params is empty"):
        zenflow_adamw(model.requires_grad_(False))
    for module in (model, other):
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks


# --- Gradients ------------------------------------------------------------------------------------------------


def sparse_like(param: Tensor) -> Tensor:
    """A sparse gradient."""
    return torch.zeros_like(param).to_sparse()


def with_grad_dtype(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A gradient of another dtype, where torch lets one be set."""

    def make_grad(param: Tensor) -> Tensor:
        if not HAS_GRAD_DTYPE:
            pytest.skip("this torch refuses a gradient of another dtype than its parameter's")
        param.grad = None
        param.grad_dtype = None
        return torch.ones(param.shape, dtype=dtype)

    return make_grad


BAD_GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "sparse": (sparse_like, ("sparse", "sparse=False")),
    "float64": (with_grad_dtype(torch.float64), ("float64",)),
    "complex": (with_grad_dtype(torch.complex64), ("complex64",)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", BAD_GRADIENTS)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("named", [False, True], ids=["plain", "named"])
def test_gradients_that_cannot_be_used(make: Make, kind: str, place: int, named: bool) -> None:
    """Found before any parameter is touched, whichever has it; the step can be repeated with a good one."""
    create, words = BAD_GRADIENTS[kind]
    params = parameters(SHAPES, torch.bfloat16)
    names = ["embedding.weight", "norm.bias", "head.weight"]
    optimizer = make(list(zip(names, params, strict=True)) if named else params)
    run(optimizer, params, range(3))
    before = snapshot(optimizer)
    set_gradients(params, 3)
    good = params[place].grad
    params[place].grad = create(params[place])
    name = repr(names[place]) if named else f"{place} of group 0"
    with refused(f"the gradient of parameter {name}", *words):
        optimizer.step()
    assert_unchanged(before, optimizer)
    params[place].grad = None
    params[place].grad = good
    optimizer.step()
    assert optimizer.state_dict()["state"][place]["step"].item() == 4


def test_a_sparse_embedding_names_the_remedy(make: Make) -> None:
    """From a real backward."""
    embedding = nn.Embedding(9, 4, sparse=True)
    optimizer = make(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with refused("sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("change", ["dtype", "shape", "gradient's shape"])
@pytest.mark.parametrize("started", [True, False])
def test_a_parameter_that_was_changed_afterwards(make: Make, place: int, change: str, started: bool) -> None:
    """``model.to(dtype)`` and the like after construction: refused once states exist, never silently wrong."""
    params = parameters(SHAPES)
    optimizer = make(params)
    if started:
        run(optimizer, params, range(3))
    elif isinstance(optimizer, CPUAdamW):
        pytest.skip("CPUAdamW makes its states at the first step")
    before = snapshot(optimizer)
    set_gradients(params, 3)
    good = params[place].detach()
    params[place].grad = None
    if change == "dtype":
        params[place].data = good.bfloat16()
    elif change == "shape":
        params[place].data = torch.zeros(2, *good.shape)
    else:
        # torch checks shapes when .grad is set, but not when the parameter changes under it.
        params[place].grad = torch.zeros_like(good)
        params[place].data = torch.zeros(2, *good.shape)
    if change != "gradient's shape":
        params[place].grad = torch.ones_like(params[place])
    with refused(f"parameter {place} of group 0", str(params[place].dtype if change == "dtype" else 2)):
        optimizer.step()
    params[place].grad = None
    params[place].data = good
    assert_unchanged(before, optimizer)
    set_gradients(params, 3)
    optimizer.step()


# --- State dicts ------------------------------------------------------------------------------------------------


def with_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value into the last parameter's entry."""

    def change(state: dict[str, Any]) -> None:
        state["state"][2][key] = value

    return change


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Takes out what lies at a path of keys."""

    def change(state: dict[str, Any]) -> None:
        at: Any = state
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


def with_group(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Changes settings of the group."""

    def change(state: dict[str, Any]) -> None:
        state["param_groups"][0].update(values)

    return change


def moved_entry(index: Any) -> Callable[[dict[str, Any]], None]:
    """Gives the last entry another index."""

    def change(state: dict[str, Any]) -> None:
        state["state"][index] = state["state"].pop(2)

    return change


BAD_STATES: dict[str, tuple[Callable[[dict[str, Any]], None], tuple[str, ...]]] = {
    "shape": (with_entry("exp_avg", torch.zeros(5, 5)), ("exp_avg of parameter 2", "(5, 5)", "(6, 8)")),
    "transposed": (
        with_entry("exp_avg_sq", torch.zeros(8, 6)),
        ("exp_avg_sq of parameter 2", "(8, 6)", "(6, 8)"),
    ),
    "master": (with_entry("master_weight", torch.zeros(4)), ("master_weight of parameter 2", "(4,)")),
    "no tensor": (with_entry("exp_avg", 3.0), ("exp_avg of parameter 2", "3.0")),
    "step text": (with_entry("step", "x"), ("step of parameter 2", "'x'")),
    "step negative": (with_entry("step", -1), ("step of parameter 2", "-1")),
    "step fraction": (with_entry("step", 1.5), ("step of parameter 2", "1.5")),
    "step nan": (with_entry("step", torch.tensor(NAN)), ("step of parameter 2", "nan")),
    "step inf": (with_entry("step", INF), ("step of parameter 2", "inf")),
    "no step": (without("state", 2, "step"), ("step of parameter 2",)),
    "no exp_avg": (without("state", 2, "exp_avg"), ("exp_avg of parameter 2",)),
    "no exp_avg_sq": (without("state", 2, "exp_avg_sq"), ("exp_avg_sq of parameter 2",)),
    "no state": (without("state"), ("'state'",)),
    "no groups": (without("param_groups"), ("'param_groups'",)),
    "no lr": (without("param_groups", 0, "lr"), ("'lr'",)),
    "index too large": (moved_entry(7), ("7",)),
    "index negative": (moved_entry(-1), ("-1",)),
    "index text": (moved_entry("weight"), ("'weight'",)),
    "amsgrad": (with_group(amsgrad=True), ("amsgrad",)),
    "lr nan": (with_group(lr=NAN), ("lr",)),
    "betas": (with_group(betas=(0.9,)), ("betas",)),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_state_dicts_that_do_not_fit(
    trained: tuple[torch.optim.Optimizer, list[nn.Parameter]], kind: str
) -> None:
    """Refused whole: weights, states, counters and groups stay, and training goes on."""
    optimizer, params = trained
    change, words = BAD_STATES[kind]
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    run(optimizer, params, range(3, 5))
    before = snapshot(optimizer)
    with refused(*words):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    run(optimizer, params, range(5, 6))
    assert optimizer.state_dict()["state"][2]["step"].item() == 6


@pytest.mark.parametrize("change", ["fewer groups", "fewer parameters"])
def test_state_dicts_of_another_model(
    trained: tuple[torch.optim.Optimizer, list[nn.Parameter]], change: str
) -> None:
    """torch's own ValueError; nothing has changed by then."""
    optimizer, _ = trained
    saved = copy.deepcopy(optimizer.state_dict())
    if change == "fewer groups":
        saved["param_groups"] = []
        saved["state"] = {}
    else:
        saved["param_groups"][0]["params"].pop()
        del saved["state"][2]
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer)


def test_a_newer_format_says_what_to_do(zenflow_adamw: Callable[..., ZenFlowAdamW]) -> None:
    """The version is checked before anything else."""
    params = parameters(SHAPES)
    optimizer = zenflow_adamw(params)
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["zenflow"]["version"] += 1
    before = snapshot(optimizer)
    with refused("version 2", "Update torch-zenflow"):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer)


def test_l2_state_is_refused_by_zenflow_and_kept_by_cpu_adamw(
    zenflow_adamw: Callable[..., ZenFlowAdamW],
) -> None:
    """A checkpoint of Adam with L2 decay: the error says who can take it."""
    params = parameters(SHAPES)
    adam = torch.optim.Adam(params, weight_decay=0.1)
    run(adam, params, range(2))
    optimizer = zenflow_adamw(params)
    before = snapshot(optimizer)
    with refused("decoupled_weight_decay is False", "CPUAdamW"):
        optimizer.load_state_dict(adam.state_dict())
    assert_unchanged(before, optimizer)
    other = CPUAdamW(params)
    other.load_state_dict(adam.state_dict())
    assert other.param_groups[0]["decoupled_weight_decay"] is False


BAD_EXTRAS: dict[str, tuple[str, Any]] = {
    "columns too large": ("selected_columns", torch.tensor([0, 10])),
    "columns negative": ("selected_columns", torch.tensor([-1, 3])),
    "columns twice": ("selected_columns", torch.tensor([3, 3])),
    "columns of floats": ("selected_columns", torch.tensor([0.0, 3.0])),
    "next columns too large": ("next_columns", torch.tensor([10])),
    "importance too short": ("column_importance", torch.zeros(3)),
    "pending of other lengths": ("pending_decay", torch.zeros(3, dtype=torch.float64)),
    "pending not finite": ("pending_lr_sum", torch.full((4,), NAN, dtype=torch.float64)),
    "late of another length": ("late_stripes", torch.zeros(2, dtype=torch.bool)),
}


@pytest.mark.parametrize("kind", BAD_EXTRAS)
def test_zenflow_s_own_state_that_does_not_fit(zenflow_adamw: Callable[..., ZenFlowAdamW], kind: str) -> None:
    """Columns, importances and pending movement are checked before anything changes, too."""
    key, value = BAD_EXTRAS[kind]
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = zenflow_adamw(params, topk_ratio=0.2)
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = value
    before = snapshot(optimizer)
    with refused(f"{key} of parameter 0"):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer)
    run(optimizer, params, range(3, 6))
