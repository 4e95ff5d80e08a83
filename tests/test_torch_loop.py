"""The loops that users of torch.optim write, unchanged, with CPUAdamW and with ZenFlowAdamW.

A *loop* is a function that builds an optimizer with the ``make`` it is given and trains with it. Gradients in it depend
on the step alone, so that three comparisons hold whatever the loop does: CPUAdamW has torch.optim.AdamW's numbers;
ZenFlowAdamW at ``update_interval=1`` has CPUAdamW's bits; at 4 its moments have them, and the weights of parameters
that aren't deferred.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from helpers import (
    GRADIENT_LAYOUTS,
    Adam64,
    Deferred64,
    Make,
    as64,
    assert_same_bits,
    assert_same_state,
    backward,
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
from zenflow import CPUAdamW, ZenFlowAdamW

MakeZenFlow = Callable[..., ZenFlowAdamW]
Loop = Callable[[list[nn.Parameter], Make], torch.optim.Optimizer]

SHAPES: list[tuple[int, ...]] = [(24, 10), (10,), (5, 4, 3, 3), (3, 12, 33), (), (33, 7)]

# Columns change owner at every third step.
EXACT: dict[str, Any] = {"update_interval": 1, "topk_ratio": 0.25, "select_interval": 3}
DEFERRED: dict[str, Any] = {"update_interval": 4, "topk_ratio": 0.25, "select_interval": 6}


@pytest.fixture(params=["cpu", "exact", "deferred"])
def make(request: pytest.FixtureRequest, zenflow_adamw: MakeZenFlow) -> Make:
    """Each of our optimizers in turn."""
    return makers(zenflow_adamw)[request.param]


def makers(zenflow_adamw: MakeZenFlow) -> dict[str, Make]:
    """How the same loop is run with each optimizer."""
    return {
        "torch": torch.optim.AdamW,
        "cpu": CPUAdamW,
        "exact": lambda params, **options: zenflow_adamw(params, **EXACT, **options),
        "deferred": lambda params, **options: zenflow_adamw(params, **DEFERRED, **options),
    }


# --- Loops ----------------------------------------------------------------------------------------------------


def plain(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Backward, step, zero_grad."""
    optimizer = make(params, lr=1e-2)
    for step in range(10):
        backward(params, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def gradients_kept_as_zeros(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """zero_grad leaves tensors; a parameter that isn't used has a gradient of zeros, which counts."""
    optimizer = make(params)
    for step in range(10):
        backward(params[: 3 + step % 4], step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return optimizer


def accumulation(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Four backwards to a step."""
    optimizer = make(params)
    for step in range(10):
        for micro in range(4):
            backward(params, 4 * step + micro, 0.25)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def clipped_by_torch(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """clip_grad_norm_ between backward and step."""
    optimizer = make(params)
    for step in range(10):
        backward(params, step, 100.0 if step % 3 == 0 else 1.0)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def scaled(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """GradScaler, with one step whose gradients are infinite."""
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    for step in range(10):
        grads = gradients(params, step)
        loss = sum(((p * g).sum() for p, g in zip(params, grads, strict=True)), start=torch.zeros(()))
        scaler.scale(loss * float("inf") if step == 4 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() != 2.0**12
    return optimizer


def edited(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """The user changes gradients in place after the backward."""
    optimizer = make(params)
    for step in range(10):
        backward(params, step)
        for i, param in enumerate(params):
            assert param.grad is not None
            param.grad.mul_(1 + i)
            param.grad.view(-1)[0] = 0.125
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def hand_set(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """No backward at all."""
    optimizer = make(params)
    run(optimizer, params, range(10))
    return optimizer


def sometimes_absent(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """None in every position at some step, in several at others, in all at one."""
    optimizer = make(params)
    for step in range(20):
        set_gradients(params, step)
        for i, param in enumerate(params):
            if step % len(params) == i or (step + i) % 5 == 0 or step == 9:
                param.grad = None
        optimizer.step()
    return optimizer


def groups_interleaved(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Neighbours with other lr, betas, eps, decay and direction."""
    own: list[dict[str, Any]] = [
        {"lr": 1e-2, "weight_decay": 0.1},
        {"weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"eps": 1e-3, "maximize": True, "betas": (0.8, 0.99)},
    ]
    groups = [{"params": params[i::3], **own[i]} for i in range(3)]
    optimizer = make(groups, lr=1e-3)
    run(optimizer, params, range(12))
    return optimizer


def tensor_lr(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Each group's lr is a tensor, which the scheduler fills and the user may."""
    halves = [{"params": params[i::2], "lr": torch.tensor(1e-2 / (1 + i))} for i in range(2)]
    optimizer = make(halves, lr=torch.tensor(1e-3))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(10):
        run(optimizer, params, [step])
        scheduler.step()
        if step == 5:
            optimizer.param_groups[0]["lr"].mul_(0.5)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert optimizer.param_groups[0]["lr"] < 1e-3
    return optimizer


def settings_changed_by_hand(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Every entry of a group is read at each step."""
    optimizer = make(params)
    changes: list[dict[str, Any]] = [
        {"lr": 5e-3},
        {"betas": [0.5, 0.99]},
        {"weight_decay": 0.3},
        {"eps": 1e-4},
        {"maximize": True},
        {"lr": 0.0},
        {"lr": 1e-4},
    ]
    for step, change in enumerate(changes):
        optimizer.param_groups[0].update(change)
        run(optimizer, params, [step])
    return optimizer


def closure(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """step(closure), called where gradients are off."""
    optimizer = make(params)
    for step in range(10):

        def evaluate(step: int = step) -> Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            return backward(params, step)

        with torch.no_grad():
            loss = optimizer.step(evaluate)
        assert isinstance(loss, Tensor)
    return optimizer


def unfrozen_later(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Half of the layers join with add_param_group in mid-training, in groups of their own."""
    half = len(params) // 2
    for param in params[half:]:
        param.requires_grad_(False)
    optimizer = make([param for param in params if param.requires_grad], weight_decay=0.1)
    for step in range(14):
        if step == 5:
            params[half].requires_grad_(True)
            optimizer.add_param_group({"params": params[half], "lr": 1e-2})
        if step == 7:
            for param in params[half + 1 :]:
                param.requires_grad_(True)
            optimizer.add_param_group({"params": iter(params[half + 1 :]), "weight_decay": 0.0})
        backward(params[: half + (step >= 5)] if step < 7 else params, step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def given_frozen(params: list[nn.Parameter], make: Make) -> torch.optim.Optimizer:
    """Frozen parameters may be given from the start: they stay, until they have gradients."""
    for param in params[::2]:
        param.requires_grad_(False)
    kept = clones(params)
    optimizer = make(params)
    for step in range(12):
        if step == 6:
            for mine, other in zip(params[::2], kept[::2], strict=True):
                assert_same_bits(mine, other)
                mine.requires_grad_(True)
        backward(params if step >= 6 else params[1::2], step)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


LOOPS: list[Loop] = [
    plain,
    gradients_kept_as_zeros,
    accumulation,
    clipped_by_torch,
    scaled,
    edited,
    hand_set,
    sometimes_absent,
    groups_interleaved,
    tensor_lr,
    settings_changed_by_hand,
    closure,
    unfrozen_later,
    given_frozen,
]


def assert_deferred_equal(
    got: tuple[list[nn.Parameter], torch.optim.Optimizer],
    expected: tuple[list[nn.Parameter], torch.optim.Optimizer],
) -> None:
    """Moments and counts of all parameters, and the weights of those that aren't deferred, bit for bit."""
    assert_same_state(got[1].state_dict(), expected[1].state_dict(), ("step", "exp_avg", "exp_avg_sq"))
    for mine, other in zip(got[0], expected[0], strict=True):
        if mine.ndim < 2:
            assert_same_bits(mine, other)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop_with_cpu_adamw_equals_torch(loop: Loop) -> None:
    """The same loop with torch.optim.AdamW: equal but for rounding, which torch has more of."""
    ours = parameters(SHAPES)
    theirs, start = clones(ours), clones(ours)
    loop(ours, CPUAdamW)
    loop(theirs, torch.optim.AdamW)
    for mine, other, first in zip(ours, theirs, start, strict=True):
        assert update_error([mine], [other], [first]) < 5e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop_with_zenflow_equals_cpu_adamw(
    zenflow_adamw: MakeZenFlow, loop: Loop, dtype: torch.dtype
) -> None:
    """At S=1 every bit; at S=4 all that isn't deferred."""
    runs = {}
    for name in ("cpu", "exact", "deferred"):
        params = parameters(SHAPES, dtype)
        runs[name] = params, loop(params, makers(zenflow_adamw)[name])
    for mine, other in zip(runs["exact"][0], runs["cpu"][0], strict=True):
        assert_same_bits(mine, other)
    assert_same_state(runs["exact"][1].state_dict(), runs["cpu"][1].state_dict())
    assert_deferred_equal(runs["deferred"], runs["cpu"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_grad_norm_in_the_pipeline(zenflow_adamw: MakeZenFlow, dtype: torch.dtype) -> None:
    """The option clips each step's gradients by that step's norm, on both sides; it leaves ``.grad`` alone."""
    runs = {}
    for name in ("cpu", "exact", "deferred"):
        params = parameters(SHAPES, dtype)
        optimizer = makers(zenflow_adamw)[name](params, max_grad_norm=0.3)
        for step in range(10):
            set_gradients(params, step, scale=1e-4 if step % 3 else 1.0)
            kept = [param.grad.clone() for param in params if param.grad is not None]
            optimizer.step()
            for param, grad in zip(params, kept, strict=True):
                assert param.grad is not None
                assert_same_bits(param.grad, grad, "gradient")
        runs[name] = params, optimizer
    for mine, other in zip(runs["exact"][0], runs["cpu"][0], strict=True):
        assert_same_bits(mine, other)
    assert_same_state(runs["exact"][1].state_dict(), runs["cpu"][1].state_dict())
    assert_deferred_equal(runs["deferred"], runs["cpu"])


# --- Schedulers -------------------------------------------------------------------------------------------------

Schedule = Callable[[torch.optim.Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-4, anneal_epochs=6),
}


def scheduled(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, schedule: Schedule
) -> Iterator[tuple[float, tuple[float, float]]]:
    """Twelve steps; yields the lr and betas of each before it is taken."""
    scheduler = schedule(optimizer)
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    for step in range(12):
        group = optimizer.param_groups[0]
        yield float(group["lr"]), tuple(group["betas"])  # type: ignore[misc]
        run(optimizer, params, [step])
        scheduler.step(1.0) if plateau else scheduler.step()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_every_scheduler_changes_the_rate_really_used(zenflow_adamw: MakeZenFlow, name: str) -> None:
    """Against torch with the same scheduler; where moves are deferred, against float64 with the rates of each step."""
    schedule = SCHEDULES[name]
    runs = {}
    for kind in ("torch", "cpu", "exact"):
        params = parameters(SHAPES)
        optimizer = makers(zenflow_adamw)[kind](params, lr=5e-3)
        used = list(scheduled(params, optimizer, schedule))
        runs[kind] = params, used
    assert len({lr for lr, _ in runs["cpu"][1]}) > 1
    assert runs["cpu"][1] == runs["torch"][1] == runs["exact"][1]
    assert update_error(runs["cpu"][0], runs["torch"][0], parameters(SHAPES)) < 5e-5
    for mine, other in zip(runs["exact"][0], runs["cpu"][0], strict=True):
        assert_same_bits(mine, other)

    params = parameters(SHAPES)
    optimizer = zenflow_adamw(params, lr=5e-3, topk_ratio=0.0)
    oracles = [Deferred64(param, 4) if param.ndim == 2 else Adam64(param) for param in params]
    for step, (lr, betas) in enumerate(scheduled(params, optimizer, schedule)):
        for oracle, grad in zip(oracles, gradients(params, step), strict=True):
            oracle.step(grad, lr=lr, betas=betas)
    for param, oracle in zip(params, oracles, strict=True):
        if param.ndim in (0, 1, 2):
            assert oracle.error(param) < 3e-6


def test_the_list_of_schedulers_is_whole() -> None:
    """Every scheduler that this torch offers is in the table."""
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= set(SCHEDULES)


# --- Hooks, graphs, copies ----------------------------------------------------------------------------------------


def test_step_hooks_fire_once(make: Make) -> None:
    """Also with a closure; a pre-hook that edits gradients is heard."""
    params = parameters(SHAPES)
    optimizer = make(params)
    fired: list[str] = []

    def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        fired.append("before")
        for param in params:
            if param.grad is not None:
                param.grad.zero_()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    set_gradients(params, 0)
    optimizer.step()
    assert fired == ["before", "after"]
    assert float(optimizer.state_dict()["state"][0]["exp_avg"].abs().max()) == 0.0
    optimizer.step(lambda: backward(params, 1))
    assert fired == ["before", "after"] * 2


def test_state_dict_hooks_fire(make: Make) -> None:
    """The four hooks around state dicts run, and a pre-hook's replacement is what loads."""
    params = parameters(SHAPES)
    optimizer = make(params)
    run(optimizer, params, range(3))
    fired: list[str] = []

    def rewrite(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        fired.append("load pre")
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.25
        return state

    optimizer.register_state_dict_pre_hook(lambda *_: fired.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda *_: fired.append("save post"))
    optimizer.register_load_state_dict_pre_hook(rewrite)
    optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("load post"))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert fired == ["save pre", "save post", "load pre", "load post"]
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("shape", [(8, 6), (6,), ()])
def test_a_backward_through_old_weights_fails(make: Make, shape: tuple[int, ...]) -> None:
    """After a step a retained graph would mix old and new weights; torch must be able to see that."""
    params = parameters([shape])
    optimizer = make(params)
    loss = (params[0] ** 2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_without_gradients_is_none(make: Make) -> None:
    """Before the first backward, and after zero_grad."""
    params = parameters(SHAPES)
    optimizer = make(params)
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    run(optimizer, params, range(3))
    before = snapshot(optimizer)
    for param in params:
        assert param.grad is None  # run() ends with zero_grad
    pending = optimizer.state_dict()
    optimizer.step()
    assert_same_state(optimizer.state_dict(), pending)
    for mine, other in zip([p.detach() for p in params], before[0], strict=True):
        assert_same_bits(mine, other)


def test_closure_returns_the_loss_and_sees_gradients(make: Make) -> None:
    """Whatever the closure returns comes back, None included."""
    params = parameters(SHAPES)
    optimizer = make(params)
    with torch.no_grad():
        assert optimizer.step(lambda: (torch.is_grad_enabled(), "loss")) == (True, "loss")
    assert optimizer.step(lambda: None) is None


def pickled(value: Any) -> Any:
    """Through pickle."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", range(1, 7))
def test_copies_in_mid_window_go_on_equal(
    zenflow_adamw: MakeZenFlow, copied: Callable[[Any], Any], steps: int
) -> None:
    """Masters, moments, what is pending and who owns which column all come along; nothing is shared."""
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = zenflow_adamw(params, lr=1e-2, **DEFERRED)
    run(optimizer, params, range(steps))
    twins, twin = copied((params, optimizer))
    assert twin.param_groups[0]["params"][0] is twins[0]
    for opt, chosen in ((optimizer, params), (twin, twins)):
        run(opt, chosen, range(steps, steps + 8))
    for mine, other in zip(params, twins, strict=True):
        assert mine.data_ptr() != other.data_ptr()
        assert_same_bits(mine, other)
    assert_same_state(twin.state_dict(), optimizer.state_dict())
    twin.close()


def test_state_goes_to_torch_and_back(zenflow_adamw: MakeZenFlow) -> None:
    """At S=1 a run that changes optimizers twice, torch to ours to torch, is the run that never did."""
    ours = parameters(SHAPES)
    start, theirs = clones(ours), clones(ours)
    run(torch.optim.AdamW(theirs, lr=3e-3), theirs, range(30))
    first = torch.optim.AdamW(ours, lr=3e-3, fused=True)
    run(first, ours, range(10))
    second = zenflow_adamw(ours, **EXACT)
    second.load_state_dict(first.state_dict())
    run(second, ours, range(10, 20))
    third = torch.optim.AdamW(ours)
    third.load_state_dict(second.state_dict())
    run(third, ours, range(20, 30))
    assert update_error(ours, theirs, start) < 5e-5
    assert third.state[ours[0]]["step"].item() == 30


# --- Shapes, layouts, sharing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
def test_shapes_and_layouts(
    zenflow_adamw: MakeZenFlow, layout: str, dtype: torch.dtype, grad_layout: str
) -> None:
    """Each layout of parameter and gradient: at S=1 the bits of a contiguous one in CPUAdamW; at S=4 its moments."""
    memories = [layouts()[layout](dtype) for _ in range(2)]
    params = [nn.Parameter(memory) for memory in memories]
    plain = nn.Parameter(memories[0].clone(memory_format=torch.contiguous_format))
    optimizers: list[torch.optim.Optimizer] = [
        zenflow_adamw(params[:1], **EXACT),
        zenflow_adamw(params[1:], **DEFERRED),
    ]
    reference = CPUAdamW([plain])
    for step in range(7):
        plain.grad = gradients([plain], step)[0]
        if grad_layout == "expanded":
            plain.grad = plain.grad.mean().to(dtype).expand(plain.shape).contiguous()
        reference.step()
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = laid_out(plain.grad, param, grad_layout)
            optimizer.step()
    assert_same_bits(memories[0], plain.detach(), "the memory that the parameter was made of")
    assert_same_state(optimizers[0].state_dict(), reference.state_dict())
    assert_same_state(optimizers[1].state_dict(), reference.state_dict(), ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("min_offload_numel", [1, 1 << 20], ids=["offloaded", "small"])
def test_a_change_of_memory_format_in_mid_training(
    zenflow_adamw: MakeZenFlow, dtype: torch.dtype, min_offload_numel: int
) -> None:
    """``module.to(memory_format=...)`` gives parameters other memory in another order; the states follow."""
    conv, other = nn.Conv2d(5, 6, 3).to(dtype), nn.Conv2d(5, 6, 3).to(dtype)
    other.load_state_dict(conv.state_dict())
    optimizer = zenflow_adamw(conv.parameters(), **EXACT, min_offload_numel=min_offload_numel)
    reference = CPUAdamW(other.parameters())
    for step in range(6):
        if step in (2, 4):
            conv.to(memory_format=torch.channels_last if step == 2 else torch.contiguous_format)
        for module, opt in ((conv, optimizer), (other, reference)):
            run(opt, list(module.parameters()), [step])
    for got, want in zip(conv.parameters(), other.parameters(), strict=True):
        assert_same_bits(got, want)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


class Tied(nn.Module):
    """A language model whose head is its embedding, and whose two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([nn.Sequential(shared, nn.LayerNorm(16)), nn.Sequential(shared)])
        self.head = nn.Linear(16, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = x + functional.silu(block(x))
        return self.head(x)


@pytest.mark.parametrize("attached", [False, True], ids=["parameters", "model"])
def test_a_model_with_tied_and_shared_weights_trains_the_same(
    zenflow_adamw: MakeZenFlow, attached: bool
) -> None:
    """Real backwards: at S=1 all losses and weights are CPUAdamW's, bit for bit; at S=4 it learns as well."""
    tokens = torch.randint(0, 19, (12, 8, 11))
    losses: dict[str, list[Tensor]] = {}
    models: dict[str, Tied] = {}
    for name in ("cpu", "exact", "deferred"):
        torch.manual_seed(3)
        model = models[name] = Tied()
        owner = model if attached and name != "cpu" else model.parameters()
        optimizer = makers(zenflow_adamw)[name](owner, lr=1e-2)
        losses[name] = []
        for step in range(24):
            batch = tokens[step % 12]
            loss = functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.detach())
        assert model.head.weight is model.embedding.weight
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.synchronize()
    assert_same_bits(torch.stack(losses["exact"]), torch.stack(losses["cpu"]), "losses")
    for mine, other in zip(models["exact"].parameters(), models["cpu"].parameters(), strict=True):
        assert_same_bits(mine, other)
    assert losses["deferred"][-1] < losses["deferred"][0] - 0.3
    assert abs(losses["deferred"][-1] - losses["cpu"][-1]) < 0.1


# --- Others write into weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_between_steps_are_adopted(zenflow_adamw: MakeZenFlow, dtype: torch.dtype) -> None:
    """What is written under no_grad, or swapped in as other memory, is where training goes on."""

    def write(params: list[nn.Parameter], step: int) -> None:
        with torch.no_grad():
            if step == 2:
                params[0][3:9].fill_(0.5)
                params[1].neg_()
            if step == 5:
                params[0].copy_(torch.linspace(-1, 1, params[0].numel()).view_as(params[0]))
            if step == 6:
                for param in params:
                    param.data = (param.detach() + 1).clone()

    runs = {}
    for name in ("cpu", "exact"):
        params = parameters([(24, 10), (10,)], dtype)
        optimizer = makers(zenflow_adamw)[name](params, lr=1e-2)
        for step in range(9):
            run(optimizer, params, [step])
            write(params, step)
        runs[name] = params, optimizer
    for mine, other in zip(runs["exact"][0], runs["cpu"][0], strict=True):
        assert_same_bits(mine, other)
    assert_same_state(runs["exact"][1].state_dict(), runs["cpu"][1].state_dict())

    # Deferred: the weight is the one written, what is pending is still to come.
    params = parameters([(24, 10)], dtype)
    oracle = Deferred64(params[0], 4)
    deferred = zenflow_adamw(params, lr=1e-2, topk_ratio=0.0)
    written = torch.linspace(-1, 1, 240).view(24, 10).to(dtype)
    for step in range(9):
        oracle.step(gradients(params, step)[0], lr=1e-2)
        run(deferred, params, [step])
        if step == 5:
            with torch.no_grad():
                params[0].copy_(written)
            assert_same_bits(params[0], written)
            oracle.weight = oracle.start = as64(written)
    state = deferred.state_dict()["state"][0]
    assert oracle.error(state.get("master_weight", params[0])) < 1e-5


def test_a_write_while_new_weights_are_on_their_way_warns(zenflow_adamw: MakeZenFlow) -> None:
    """With gates, weights land in the next forward; what someone wrote meanwhile stays, and is the new master."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = zenflow_adamw(model, update_interval=1, topk_ratio=0.0, lr=1e-2)
    model(torch.ones(4, 16)).square().sum().backward()
    optimizer.step()
    weight = model[1].weight
    with torch.no_grad():
        weight.fill_(0.25)
    with pytest.warns(UserWarning, match=r"1\.weight.*was written to while new weights were on their way"):
        loss = model(torch.ones(4, 16)).square().sum()
    assert (weight == 0.25).all()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.synchronize()
    moved = (optimizer.state_dict()["state"][2]["master_weight"] - 0.25).abs()
    assert 0 < float(moved.max()) < 0.05


def test_no_warning_in_an_ordinary_loop(make: Make) -> None:
    """Nothing that users do every day is warned about."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            model(torch.randn(3, 8)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


# --- What remains of an optimizer -------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_twenty_optimizers_leave_no_memory_behind(closed: bool) -> None:
    """6 MiB of states and more of staging each: created, stepped, and gone, whether closed or just dropped."""
    param = nn.Parameter(torch.zeros(512, 1024))
    param.grad = torch.ones_like(param)
    sizes = []
    for count in (5, 15):
        for _ in range(count):
            optimizer = ZenFlowAdamW([param])
            optimizer.step()
            if closed:
                optimizer.close()
            del optimizer
        gc.collect()
        sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 30 * 2**20
