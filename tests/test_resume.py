"""Checkpoints: a run that was saved and loaded anywhere is, to the bit, the run that was not.

The oracle is the uninterrupted run. That the comparison can fail is a test of its own: without any one key of the
state dict the resumed run must differ or be refused.
"""

import copy
import gc
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from models import (
    SETTINGS,
    Tower,
    Trace,
    assert_same_trace,
    assert_same_weights,
    attached,
    loss_of,
    pending,
    pipeline_of,
    same,
    seeded,
    train,
    unattached,
)
from zenflow import ArgumentError, ZenFlowAdamW

LAST = 24
VOID = 7

#: Everything that keeps state: selection with an exchange at most steps, warm-up, void steps.
FULL: dict[str, Any] = {"full_warm_up_rounds": 2, "skip_nonfinite": True, "select_interval": 3, "lr": 2e-2}


@pytest.fixture(autouse=True)
def _single() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "a step with inf or NaN")
        yield
    torch.set_num_threads(threads)


def through_a_file(value: Any) -> Any:
    """As a checkpoint comes back, with nothing but plain data."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Run:
    """A training with everything that has state."""

    def __init__(self, *, gates: bool, dtype: torch.dtype, **options: Any) -> None:
        self.model = seeded(lambda: Tower(1), dtype)
        self.optimizer = (attached if gates else unattached)(self.model, **{**FULL, **options})
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: 1.0 / (1 + t % 5))
        self.trace: Trace = []

    def go(self, first: int, stop: int) -> "Run":
        for step in range(first, stop):
            if step == VOID:
                # Half of the block's gradients become NaN after the backward: the whole step is void.
                handle = self.model.blocks[0].up.weight.register_hook(lambda grad: grad * float("nan"))
                self.trace += train(self.model, self.optimizer, [step], scheduler=self.scheduler)
                handle.remove()
            else:
                self.trace += train(self.model, self.optimizer, [step], scheduler=self.scheduler)
        return self

    def save(self) -> dict[str, Any]:
        saved: dict[str, Any] = through_a_file(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
            }
        )
        return saved

    def load(self, saved: dict[str, Any], *, optimizer_first: bool = False) -> "Run":
        if optimizer_first:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.model.load_state_dict(saved["model"])
        if not optimizer_first:
            self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        return self

    def distrusted(self) -> list[str]:
        gates = pipeline_of(self.optimizer).gates
        return [] if gates is None else [gate.name for gate in gates.gates if not gate.trusted]

    def state(self) -> dict[str, Any]:
        self.optimizer.synchronize()
        state: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return state


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of entries of two optimizer state dicts that aren't equal to the bit."""
    found = []
    for index in left["state"].keys() | right["state"].keys():
        a, b = left["state"].get(index, {}), right["state"].get(index, {})
        found += [f"{index}.{key}" for key in a.keys() | b.keys() if not same(a.get(key), b.get(key))]
    if left["param_groups"] != right["param_groups"]:
        found.append("param_groups")
    if left["zenflow"] != right["zenflow"]:
        found.append("zenflow")
    return found


def uninterrupted(**options: Any) -> tuple[Run, list[dict[str, Any]]]:
    """A whole run, and its checkpoint after each step."""
    run = Run(**options)
    saves = []
    for step in range(LAST):
        run.go(step, step + 1)
        saves.append(run.save())
    return run, saves


MODES = [
    {"gates": gates, "dtype": dtype, "staleness": staleness}
    for gates in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
    for staleness in (0, 1)
] + [
    {"gates": True, "dtype": torch.bfloat16, "staleness": 1, "state_dtype": "int8"},
    {"gates": True, "dtype": torch.float32, "staleness": 0, "state_dtype": "bfloat16"},
]


def mode_name(mode: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in mode.values())


# --- resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_resuming_at_each_of_20_steps_is_the_uninterrupted_run(mode: dict[str, Any]) -> None:
    whole, saves = uninterrupted(**mode)
    state = whole.state()
    assert state["zenflow"]["skipped_steps"] == 1
    for kind in ("next_columns", "selected_columns"):
        assert any(kind in entry for save in saves for entry in save["optimizer"]["state"].values()), kind
    for step in range(20):
        resumed = Run(**mode).load(saves[step], optimizer_first=bool(step % 2))
        resumed.go(step + 1, LAST)
        assert_same_trace(resumed.trace, whole.trace[step + 1 :])
        assert not differences(resumed.state(), state), step
        assert_same_weights(resumed.model, whole.model)
        stats, expected = resumed.optimizer.stats(), whole.optimizer.stats()
        assert (stats.steps, stats.skipped_steps) == (expected.steps, expected.skipped_steps)


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_saving_changes_nothing(mode: dict[str, Any]) -> None:
    plain = Run(**mode).go(0, LAST)
    saved, _ = uninterrupted(**mode)
    assert_same_trace(saved.trace, plain.trace)
    assert not differences(saved.state(), plain.state())


KEYS = {
    "step",
    "exp_avg",
    "exp_avg_sq",
    "master_weight",
    "pending_lr_sum",
    "pending_decay",
    "late_stripes",
    "selected_columns",
    "column_importance",
    "next_columns",
}


#: And those of lean moments.
LEAN_KEYS = {"stripe_grain", "selected_exp_avg", "selected_exp_avg_sq"}

Saved = tuple[Run, list[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def late_bf16() -> Saved:
    return saved_run({"gates": False, "dtype": torch.bfloat16, "staleness": 1})


@pytest.fixture(scope="module")
def late_int8() -> Saved:
    return saved_run({"gates": False, "dtype": torch.bfloat16, "staleness": 1, "state_dtype": "int8"})


def saved_run(mode: dict[str, Any]) -> Saved:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, saves = uninterrupted(**mode)
        return whole, saves, mode


def test_the_keys_under_test_are_all_there_are(late_bf16: Saved, late_int8: Saved) -> None:
    for (_, saves, _), keys in ((late_bf16, KEYS), (late_int8, KEYS | LEAN_KEYS)):
        found = {key for save in saves for entry in save["optimizer"]["state"].values() for key in entry}
        assert found == keys


@pytest.mark.parametrize("spoil", ["drop", "zero"])
@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_of_the_state_matters(key: str, spoil: str, late_bf16: Saved) -> None:
    matters(key, spoil, late_bf16)


@pytest.mark.parametrize("spoil", ["drop", "zero"])
@pytest.mark.parametrize("key", sorted(KEYS | LEAN_KEYS))
def test_every_key_of_a_lean_state_matters(key: str, spoil: str, late_int8: Saved) -> None:
    matters(key, spoil, late_int8)


def matters(key: str, spoil: str, run: Saved) -> None:
    whole, saves, mode = run
    state = whole.state()
    for step in range(8, 20):
        saved = copy.deepcopy(saves[step])
        spoiled = False
        for entry in saved["optimizer"]["state"].values():
            if key in entry and bool(torch.as_tensor(entry[key]).any()):
                spoiled = True
                if spoil == "drop":
                    del entry[key]
                elif key in ("selected_columns", "next_columns"):
                    entry[key] = torch.arange(entry[key].numel())
                else:
                    entry[key] = 0 * entry[key]
        if not spoiled:
            continue
        try:
            resumed = Run(**mode).load(saved).go(step + 1, LAST)
        except ArgumentError:
            return
        if any(not key.startswith("zenflow") for key in differences(resumed.state(), state)):
            return
    pytest.fail(f"{key} is saved for nothing, or the comparison is blind")


def test_counters_matter(late_bf16: Any) -> None:
    _, saves, mode = late_bf16
    saved = copy.deepcopy(saves[12])
    assert saved["optimizer"]["zenflow"]["steps"] == 12
    del saved["optimizer"]["zenflow"]
    run = Run(**mode).load(saved)
    assert run.optimizer.stats().steps == 0, "without its own key nobody knows"


@settings(max_examples=10)
@given(
    at=st.integers(1, 12),
    update_interval=st.sampled_from([1, 2, 3, 4, 8]),
    topk_ratio=st.sampled_from([0.0, 0.1, 1.0]),
    staleness=st.sampled_from([0, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_resuming_under_any_settings(
    at: int, update_interval: int, topk_ratio: float, staleness: int, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {
        "gates": True,
        "dtype": dtype,
        "update_interval": update_interval,
        "topk_ratio": topk_ratio,
        "staleness": staleness,
    }
    whole = Run(**options).go(0, at)
    saved = whole.save()
    whole.go(at, at + 10)
    resumed = Run(**options).load(saved).go(at, at + 10)
    assert_same_trace(resumed.trace, whole.trace[at:])
    assert not differences(resumed.state(), whole.state())


def test_loading_into_an_optimizer_that_was_used() -> None:
    """What a state dict doesn't know of, an earlier life with other pending closes, is gone."""
    for staleness in (0, 1):
        mode: dict[str, Any] = {"gates": True, "dtype": torch.bfloat16, "staleness": staleness}
        whole = Run(**mode).go(0, 9)
        saved = whole.save()
        whole.go(9, LAST)
        used = Run(**mode).go(0, 14)
        assert pending(used.optimizer)
        used.load(saved)
        used.trace.clear()
        used.go(9, LAST)
        assert_same_trace(used.trace, whole.trace[9:])
        assert not differences(used.state(), whole.state())


def test_a_checkpoint_just_after_weights_were_loaded_has_their_masters() -> None:
    """Best weights are loaded in mid-training and saved at once: nothing of the old masters comes back."""
    for gates in (False, True):
        mode: dict[str, Any] = {"gates": gates, "dtype": torch.bfloat16, "staleness": 0}
        run = Run(**mode).go(0, 3)
        best = copy.deepcopy(run.model.state_dict())
        run.go(3, 10)
        run.model.load_state_dict(best)
        saved = run.save()
        for index, param in enumerate(run.model.parameters()):
            master = saved["optimizer"]["state"][index]["master_weight"]
            assert same(master.bfloat16(), param.detach()), index
        run.trace.clear()
        run.go(10, 16)
        resumed = Run(**mode).load(saved).go(10, 16)
        assert_same_trace(resumed.trace, run.trace)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_other_weights_than_the_states_win(optimizer_first: bool) -> None:
    """As in torch's AdamW: weights are the model's, moments the optimizer's, in either order of loading."""
    mode: dict[str, Any] = {"gates": True, "dtype": torch.bfloat16, "staleness": 0, "lr": 1e-4}
    run = Run(**mode).go(0, 10)
    saved = run.save()
    for value in saved["model"].values():
        value.mul_(2)
    resumed = Run(**mode).load(saved, optimizer_first=optimizer_first).go(10, 16)
    for param, value in zip(resumed.model.parameters(), saved["model"].values(), strict=True):
        assert float((param.detach() - value).abs().max()) < 0.03 * (1 + float(value.abs().max()))


def test_a_state_copied_while_training_goes_on() -> None:
    run = Run(gates=True, dtype=torch.bfloat16, staleness=1).go(0, 9)
    kept = copy.deepcopy({"optimizer": run.optimizer.state_dict(), "model": run.model.state_dict()})
    scheduler = copy.deepcopy(run.scheduler.state_dict())
    run.go(9, LAST)
    saved = through_a_file({**kept, "scheduler": scheduler})
    resumed = Run(gates=True, dtype=torch.bfloat16, staleness=1).load(saved).go(9, LAST)
    assert_same_trace(resumed.trace, run.trace[9:])


def test_a_round_trip_is_the_identity() -> None:
    run = Run(gates=False, dtype=torch.bfloat16, staleness=1).go(0, 11)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(state)
    assert not differences(run.optimizer.state_dict(), state)
    other = Run(gates=False, dtype=torch.bfloat16, staleness=1).load(run.save())
    assert not differences(other.optimizer.state_dict(), state)


# --- torch's AdamW -------------------------------------------------------------------------------------


def test_torchs_adamw_takes_ours() -> None:
    model = seeded(Tower)
    optimizer = unattached(model, update_interval=1)
    train(model, optimizer, range(6))
    ours = through_a_file(optimizer.state_dict())
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=7.0)
    theirs.load_state_dict(ours)
    assert theirs.param_groups[0]["lr"] == SETTINGS["lr"]
    for index, param in enumerate(twin.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert same(theirs.state[param][key], ours["state"][index][key])
        assert float(theirs.state[param]["step"]) == 6
    train(model, optimizer, range(6, 12))
    train(twin, theirs, range(6, 12))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_ours_takes_torchs_adamw() -> None:
    model = seeded(Tower)
    theirs = torch.optim.AdamW(model.parameters(), lr=SETTINGS["lr"], weight_decay=0.1)
    train(model, theirs, range(6))
    twin, fresh = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = attached(twin, update_interval=1, lr=7.0, weight_decay=0.0)
    optimizer.load_state_dict(through_a_file(theirs.state_dict()))
    train(model, theirs, range(6, 12))
    train(twin, optimizer, range(6, 12))
    optimizer.synchronize()
    train(fresh, attached(fresh, update_interval=1), range(6, 12))
    for a, b, c in zip(model.parameters(), twin.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(a, c, rtol=1e-3, atol=1e-4), "a fresh state would pass as well"


# --- other settings than the saved ones ----------------------------------------------------------------


class Definition:
    """The algorithm in float64, for one matrix whose gradients are given, by its definition."""

    def __init__(self, weight: Tensor, update_interval: int, lr: float, decay: float) -> None:
        self.w = weight.detach().double().clone()
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.t, self.lr, self.decay = 0, lr, decay
        self.selected = torch.zeros(weight.shape[1], dtype=torch.bool)
        self.window(update_interval)

    def window(self, update_interval: int) -> None:
        """All stripes start a window of so many steps."""
        self.S = update_interval
        self.sums = [(0.0, 1.0)] * update_interval

    def direction(self) -> Tensor:
        first, second = 1 - 0.9**self.t, 1 - 0.999**self.t
        return (self.m / first) / ((self.v / second).sqrt() + 1e-8)

    def close(self, j: int) -> None:
        rows = self.w.shape[0]
        part = slice(j * rows // self.S, (j + 1) * rows // self.S)
        L, P = self.sums[j]
        moved = P * self.w[part] - L * self.direction()[part]
        self.w[part] = torch.where(self.selected, self.w[part], moved)
        self.sums[j] = (0.0, 1.0)

    def step(self, grad: Tensor) -> None:
        grad = grad.double()
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = 0.999 * self.v + 0.001 * grad**2
        dense = (1 - self.lr * self.decay) * self.w - self.lr * self.direction()
        self.w = torch.where(self.selected, dense, self.w)
        self.sums = [(L + self.lr, P * (1 - self.lr * self.decay)) for L, P in self.sums]
        for j in range(self.S):
            if (self.t + j) % self.S == 0:
                self.close(j)


class OneMatrix:
    """A 24 x 64 weight with gradients by hand; 24 is a multiple of each interval."""

    def __init__(self, **options: Any) -> None:
        self.weight = nn.Parameter(
            seeded(lambda: nn.Linear(64, 24, bias=False), torch.float32).weight.detach().clone()
        )
        self.optimizer = ZenFlowAdamW(
            [self.weight],
            lr=1e-2,
            weight_decay=0.5,
            min_offload_numel=1,
            bucket_numel=1024,
            **{"select_interval": 1000, **options},
        )

    def grad(self, step: int) -> Tensor:
        # Columns of very unequal size, the same ones at all steps.
        generator = torch.Generator().manual_seed(step)
        return torch.randn(24, 64, generator=generator) * torch.linspace(1, 9, 64)

    def step(self, step: int) -> None:
        self.weight.grad = self.grad(step)
        self.optimizer.step()

    def columns(self) -> Tensor:
        mask = torch.zeros(64, dtype=torch.bool)
        entry = self.optimizer.state_dict()["state"][0]
        mask[entry.get("selected_columns", torch.empty(0, dtype=torch.int64))] = True
        return mask


def check_against_definition(
    before: dict[str, Any], after: dict[str, Any], at: int, *, staleness: int = 0
) -> None:
    """Trains ``at`` steps with ``before``, loads into ``after`` and trains on, beside the definition."""
    first = OneMatrix(**before, staleness=staleness)
    expected = Definition(first.weight, before["update_interval"], 1e-2, 0.5)
    for step in range(at):
        first.step(step)
        if step == 0:
            expected.selected = first.columns()
        expected.step(first.grad(step))
    saved = through_a_file({"w": first.weight.detach(), "optimizer": first.optimizer.state_dict()})
    second = OneMatrix(**after, staleness=staleness)
    with torch.no_grad():
        second.weight.copy_(saved["w"])
    second.optimizer.load_state_dict(saved["optimizer"])
    # All that is pending moves at the change, none of it twice.
    for j in range(expected.S):
        expected.close(j)
    expected.window(after["update_interval"])
    for step in range(at, at + 9):
        second.step(step)
        if step == at:
            expected.selected = second.columns()
        expected.step(second.grad(step))
        if staleness == 0:
            torch.testing.assert_close(second.weight.detach().double(), expected.w, rtol=1e-5, atol=1e-6)
    want = round(after["topk_ratio"] * 64)
    assert int(second.columns().sum()) == want
    state = second.optimizer.state_dict()["state"][0]
    torch.testing.assert_close(state["master_weight"].double(), expected.w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["exp_avg"].double(), expected.m, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("at", [1, 3, 5, 8, 10])
@pytest.mark.parametrize("change", [(8, 4), (4, 8), (4, 1), (1, 4), (3, 2)], ids=str)
def test_another_update_interval_moves_what_is_pending_once(
    change: tuple[int, int], at: int, staleness: int
) -> None:
    before, after = ({"update_interval": S, "topk_ratio": 0.25} for S in change)
    check_against_definition(before, after, at, staleness=staleness)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("at", [1, 6, 8])
@pytest.mark.parametrize("change", [(0.25, 0.5), (0.5, 0.25), (0.0, 0.25), (0.25, 0.0), (0.25, 1.0)], ids=str)
def test_another_share_of_columns_loses_no_movement(
    change: tuple[float, float], at: int, staleness: int
) -> None:
    before, after = ({"update_interval": 4, "topk_ratio": ratio} for ratio in change)
    check_against_definition(before, after, at, staleness=staleness)


def test_another_staleness_and_select_interval() -> None:
    for change in ((0, 1), (1, 0)):
        first = Run(gates=True, dtype=torch.bfloat16, staleness=change[0]).go(0, 10)
        saved = first.save()
        second = Run(gates=True, dtype=torch.bfloat16, staleness=change[1], select_interval=5)
        second.load(saved).go(10, 14)
        assert_moments_follow(second, first, 10, 14)


def assert_moments_follow(run: Run, whole: Run, start: int, stop: int) -> None:
    """Moments depend on gradients alone: float64 recursion over the trace from the state that was saved."""
    entries = run.state()["state"]
    before = whole.state()["state"]
    for index in range(len(entries)):
        m = before[index]["exp_avg"].double()
        for seen in run.trace[: stop - start]:
            grad = seen.grads[index]
            assert grad is not None
            m = 0.9 * m + 0.1 * grad.double()
        torch.testing.assert_close(entries[index]["exp_avg"].double(), m, rtol=1e-4, atol=1e-6)


# --- formats -------------------------------------------------------------------------------------------


def test_unknown_keys_are_ignored() -> None:
    run = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 9)
    saved = run.save()
    for entry in saved["optimizer"]["state"].values():
        entry["of_a_later_version"] = torch.ones(3)
    saved["optimizer"]["another"] = {"key": 1}
    saved["optimizer"]["zenflow"]["more"] = 5
    resumed = Run(gates=False, dtype=torch.float32, staleness=0).load(saved).go(9, 14)
    run.go(9, 14)
    assert_same_trace(resumed.trace, run.trace[9:])


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_another_version_is_refused_and_changes_nothing(version: Any) -> None:
    run = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 5)
    before = run.state()
    saved = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 8).save()["optimizer"]
    saved["zenflow"]["version"] = version
    with pytest.raises(ArgumentError, match=f"version {version}"):
        run.optimizer.load_state_dict(saved)
    assert not differences(run.state(), before)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_broken_entry_is_refused_and_changes_nothing(key: str) -> None:
    run = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 5)
    before = run.state()
    for bad in (torch.zeros(3), None, "text"):
        saved = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 8).save()["optimizer"]
        saved["state"][1][key] = bad
        with pytest.raises(ArgumentError, match=key):
            run.optimizer.load_state_dict(saved)
        assert not differences(run.state(), before)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("pending_lr_sum", torch.zeros(0)),
        ("pending_decay", torch.zeros(3)),
        ("late_stripes", torch.zeros(9, dtype=torch.bool)),
        ("selected_columns", torch.tensor([0, 10_000])),
        ("selected_columns", torch.tensor([-1, 2])),
        ("selected_columns", torch.tensor([2, 2])),
        ("next_columns", torch.tensor([0, 10_000])),
        ("column_importance", torch.zeros(2)),
    ],
    ids=str,
)
def test_broken_private_entries_are_refused_and_change_nothing(key: str, bad: Tensor) -> None:
    run = Run(gates=False, dtype=torch.float32, staleness=1).go(0, 5)
    before = run.state()
    saved = Run(gates=False, dtype=torch.float32, staleness=1).go(0, 8).save()["optimizer"]
    saved["state"][1][key] = bad
    with pytest.raises(ArgumentError, match=key):
        run.optimizer.load_state_dict(saved)
    assert not differences(run.state(), before)


def test_steps_may_be_numbers_of_any_kind() -> None:
    run = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 9)
    saved = run.save()
    for kind in (int, float, lambda step: torch.tensor(int(step)), lambda step: step.double().reshape(1)):
        other = copy.deepcopy(saved)
        for entry in other["optimizer"]["state"].values():
            entry["step"] = kind(entry["step"])
        resumed = Run(gates=False, dtype=torch.float32, staleness=0).load(other)
        assert not differences(resumed.optimizer.state_dict(), saved["optimizer"])


def test_states_arrive_in_other_dtypes_and_stay_fp32() -> None:
    run = Run(gates=False, dtype=torch.bfloat16, staleness=0).go(0, 9)
    state = run.state()["state"]
    assert all(
        entry[key].dtype == torch.float32
        for entry in state.values()
        for key in ("exp_avg", "exp_avg_sq", "master_weight")
    )
    saved = run.save()
    for entry in saved["optimizer"]["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
    resumed = Run(gates=False, dtype=torch.bfloat16, staleness=0).load(saved)
    assert not differences(resumed.state(), run.state())


# --- memory --------------------------------------------------------------------------------------------


def resident(key: str) -> int:
    """Bytes of resident memory: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_keeps_no_second_copy() -> None:
    """A state of 100 MB that is at hand loads without a copy of even one of its three arrays (a third of it)."""
    weight = nn.Parameter(torch.zeros(4096, 2048, dtype=torch.bfloat16))
    with ZenFlowAdamW([weight], topk_ratio=0.01) as optimizer:
        nbytes = 12 * weight.numel()
        assert nbytes > 100_000_000
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.synchronize()
        gc.collect()
        before = resident("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            pytest.skip("the system doesn't let a process reset its peak of resident memory")
        if resident("VmHWM") > before + nbytes // 10:
            pytest.skip("the peak of resident memory was not reset")
        optimizer.load_state_dict(state)
        optimizer.step()
        assert resident("VmHWM") - before < 0.3 * nbytes
        assert resident("VmRSS") - before < 0.3 * nbytes


# --- torch.distributed.checkpoint ----------------------------------------------------------------------


@pytest.fixture
def dcp() -> Any:
    return pytest.importorskip("torch.distributed.checkpoint.state_dict")


def test_distributed_state_dicts_round_trip(dcp: Any) -> None:
    """By parameter names, without a process group. Counters aren't parameters' and stay behind."""
    for staleness in (0, 1):
        mode: dict[str, Any] = {"gates": True, "dtype": torch.bfloat16, "staleness": staleness}
        whole = Run(**mode).go(0, 10)
        weights = through_a_file(dcp.get_model_state_dict(whole.model))
        state = through_a_file(dcp.get_optimizer_state_dict(whole.model, whole.optimizer))
        scheduler = whole.scheduler.state_dict()
        assert "blocks.0.up.weight" in state["state"]
        whole.go(10, LAST)
        resumed = Run(**mode)
        dcp.set_model_state_dict(resumed.model, weights)
        dcp.set_optimizer_state_dict(resumed.model, resumed.optimizer, state)
        resumed.scheduler.load_state_dict(scheduler)
        resumed.go(10, LAST)
        assert_same_trace(resumed.trace, whole.trace[10:])
        assert not resumed.distrusted(), "the gates still stand"
        assert pending(resumed.optimizer)


def test_asking_for_a_distributed_state_dict_changes_nothing(dcp: Any) -> None:
    """DCP steps an optimizer that looks unused, with zero gradients and a rate of 0, to make it have a state."""
    for gates in (False, True):
        mode: dict[str, Any] = {"gates": gates, "dtype": torch.bfloat16, "staleness": 0}
        whole = Run(**mode).go(0, LAST)
        asked = Run(**mode)
        for step in range(LAST):
            asked.go(step, step + 1)
            if step in (3, 4, 9, 14):
                dcp.get_optimizer_state_dict(asked.model, asked.optimizer)
        assert_same_trace(asked.trace, whole.trace)
        assert not differences(asked.state(), whole.state())


def test_distributed_state_dicts_with_gradients_present(dcp: Any) -> None:
    whole = Run(gates=False, dtype=torch.float32, staleness=0).go(0, 10)
    state = through_a_file(dcp.get_optimizer_state_dict(whole.model, whole.optimizer))
    resumed = Run(gates=False, dtype=torch.float32, staleness=0)
    resumed.model.load_state_dict(through_a_file(whole.model.state_dict()))
    loss_of(resumed.model, 0).backward()
    dcp.set_optimizer_state_dict(resumed.model, resumed.optimizer, state)
    resumed.model.zero_grad()
    resumed.scheduler.load_state_dict(whole.scheduler.state_dict())
    whole.go(10, 16)
    resumed.go(10, 16)
    assert_same_trace(resumed.trace, whole.trace[10:])
