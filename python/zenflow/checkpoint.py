"""ZenFlowAdamW's state dict: AdamW's format, plus what is needed to go on bit for bit.

Beside ``step``, ``exp_avg``, ``exp_avg_sq`` and ``master_weight`` a parameter has, where it is offloaded:

- ``pending_lr_sum``, ``pending_decay`` (float64, one a stripe): L and 1 - P, the movement that is still to come;
- ``late_stripes`` (bool, one a stripe): closed, but not shown yet (``staleness=1``);
- ``selected_columns`` (int64), ``column_importance`` (fp32), and ``next_columns`` (int64) between a choice and its
  exchange;
- ``stripe_grain`` (rows), and ``selected_exp_avg``, ``selected_exp_avg_sq`` (fp32, ``[rows, selected]``), where the
  moments are kept in a lean format.

Counters are under one key of their own. Everything is a tensor, a number or a dict, so ``weights_only=True`` loads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._core import Engine
from .config import Config
from .errors import ArgumentError
from .matrix import ParameterMatrix
from .parameters import OffloadedParameter
from .registry import Registry, SmallParameter, fill_from
from .schedule import stripe_bounds
from .selection import selected_count
from .state import StateDict, check_entry, step_tensor, update_count
from .transfer import Transfer

__all__ = ["KEY", "VERSION", "check", "export", "fill"]

#: Key of the counters in the state dict.
KEY = "zenflow"
#: Of the format; a newer one is refused.
VERSION = 1


_NO_GRAIN = torch.tensor(1)

# Keys that say nothing without the columns they are for.
_OF_COLUMNS = ("selected_columns", "selected_exp_avg", "selected_exp_avg_sq", "next_columns")


def export(
    registry: Registry, transfer: Transfer, engine: Engine, update_interval: int
) -> dict[Tensor, StateDict]:
    """The state entries of every parameter that was updated at least once. The worker must be idle."""
    entries: dict[Tensor, StateDict] = {}
    for record in registry:
        if isinstance(record, OffloadedParameter):
            if record.mastered:
                entries[record.param] = _export_offloaded(record, registry, transfer, engine, update_interval)
        elif record.k:
            state = record.state
            entry = {"step": step_tensor(record.k), "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
            if state.master_weight is not None:
                entry["master_weight"] = state.master_weight
            entries[record.param] = entry
    return entries


def _export_offloaded(
    record: OffloadedParameter,
    registry: Registry,
    transfer: Transfer,
    engine: Engine,
    update_interval: int,
) -> StateDict:
    shape = record.param.shape
    lr_sum = torch.zeros(update_interval, dtype=torch.float64)
    decay = torch.zeros(update_interval, dtype=torch.float64)
    late = torch.zeros(update_interval, dtype=torch.bool)
    for bucket, i in record.segments:
        _, lr_sum[bucket.phase], decay[bucket.phase] = engine.progress(bucket.engine_id)[i]
        pending = transfer.pending.get(bucket.engine_id)
        if pending is not None and any(segment is bucket.segments[i] for segment, _ in pending.segments):
            late[bucket.phase] = True
    exp_avg, exp_avg_sq = registry.moments(record)
    entry: StateDict = {
        "step": step_tensor(record.k),
        "exp_avg": exp_avg.view(shape),
        "exp_avg_sq": exp_avg_sq.view(shape),
        "master_weight": registry.whole_master(record).view(shape),
        "pending_lr_sum": lr_sum,
        "pending_decay": decay,
        "late_stripes": late,
    }
    if record.grain != 1:
        entry["stripe_grain"] = torch.tensor(record.grain)
    if record.columns is not None:
        entry["selected_columns"] = record.columns.columns
        if record.moments is None:
            # The device's are in float32, and so not the host's.
            entry["selected_exp_avg"] = record.columns.state.exp_avg
            entry["selected_exp_avg_sq"] = record.columns.state.exp_avg_sq
    if record.importance is not None:
        entry["column_importance"] = record.importance
    if record.chosen is not None:
        entry["next_columns"] = record.chosen
    return entry


def check(named: list[tuple[Tensor, str, int]], given: StateDict) -> None:
    """Raises :class:`ArgumentError` unless ``given`` can be loaded whole."""
    header = given.get(KEY, {})
    version = header.get("version", VERSION)
    if version != VERSION:
        raise ArgumentError(
            f"the state dict has format version {version}; accepted: {VERSION}. Update torch-zenflow to read it"
        )
    for index, entry in given["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(named):
            raise ArgumentError(f"the state dict has an entry for {index!r}; accepted: indices of parameters")
        check_entry(entry, *named[index][:2])
        _check_own(entry, *named[index][:2])


def _check_own(entry: StateDict, param: Tensor, name: str) -> None:
    """The same for what ``torch.optim.AdamW`` doesn't have."""

    def refuse(key: str, accepted: str) -> ArgumentError:
        return ArgumentError(f"{key} of {name} in the state dict is {entry[key]!r}; accepted: {accepted}")

    cols = ParameterMatrix(param).cols if param.ndim else 0
    for key in ("selected_columns", "next_columns"):
        if key in entry:
            columns = entry[key]
            if columns.dtype != torch.int64 or columns.ndim != 1 or (columns.diff() <= 0).any():
                raise refuse(key, "indices of columns (int64), ascending")
            if columns.numel() and not 0 <= int(columns[0]) <= int(columns[-1]) < cols:
                raise refuse(key, f"indices of its {cols} columns")
    selected = entry.get("selected_columns")
    for key in ("selected_exp_avg", "selected_exp_avg_sq"):
        if key in entry and (
            selected is None or entry[key].numel() * cols != param.numel() * selected.numel()
        ):
            raise refuse(key, "one number for each element of the selected columns")
    grain = entry.get("stripe_grain", _NO_GRAIN)
    if grain.dtype != torch.int64 or grain.numel() != 1 or grain < 1:
        raise refuse("stripe_grain", "a number of rows (int64), 1 or more")
    if "column_importance" in entry and entry["column_importance"].shape != (cols,):
        raise refuse("column_importance", f"one number for each of its {cols} columns")
    stripes: tuple[int, ...] = entry["pending_lr_sum"].shape if "pending_lr_sum" in entry else ()
    for key in ("pending_lr_sum", "pending_decay", "late_stripes"):
        if key not in entry:
            continue
        if len(stripes) != 1 or not stripes[0] or entry[key].shape != stripes:
            raise refuse(
                key, f"one number for each stripe, as many as pending_lr_sum has (shape {tuple(stripes)})"
            )
        if not entry[key].isfinite().all():
            raise refuse(key, "finite numbers")


def fill(
    registry: Registry,
    transfer: Transfer,
    engine: Engine,
    config: Config,
    named: list[tuple[Tensor, str, int]],
    given: StateDict,
) -> None:
    """Makes the live state what ``given`` says. Parameters without an entry start anew."""
    update_interval = config.update_interval
    transfer.finish()
    transfer.discard(registry.offloaded)
    for index, (param, name, group) in enumerate(named):
        if param not in registry:
            continue
        record = registry[param]
        entry = given["state"].get(index, {})
        if isinstance(record, SmallParameter):
            _fill_small(record, entry, name)
            continue
        _fill_offloaded(record, registry, entry, name)
        count = selected_count(record.matrix.cols, config.topk_ratio)
        if "pending_lr_sum" in entry and (
            entry["pending_lr_sum"].numel() != update_interval
            or int(entry.get("stripe_grain", _NO_GRAIN)) != record.grain
            or _selected(entry).numel() != count
        ):
            # Saved with other stripes, or other columns than will be selected: all that is pending moves now.
            _move_pending(record, registry, entry, given["param_groups"][group])
            late = [True] * update_interval
            _set_progress(record, engine, [(0.0, 0.0)] * update_interval)
            if _selected(entry).numel() != count:  # the next step selects anew
                entry = {key: value for key, value in entry.items() if key not in _OF_COLUMNS}
        else:
            late = entry.get("late_stripes", torch.zeros(update_interval, dtype=torch.bool)).tolist()
            lr_sum, decay = entry.get("pending_lr_sum"), entry.get("pending_decay")
            none = lr_sum is None or decay is None
            pending = (
                [(0.0, 0.0)] * update_interval
                if none
                else list(zip(lr_sum.tolist(), decay.tolist(), strict=True))
            )
            _set_progress(record, engine, pending)
        _select(record, entry, registry)
        for bucket, i in record.segments:
            if late[bucket.phase]:
                transfer.restore(bucket, [bucket.segments[i]])


def _selected(entry: StateDict) -> Tensor:
    columns: Tensor = entry.get("selected_columns", torch.empty(0, dtype=torch.int64))
    return columns


def _fill_small(record: SmallParameter, entry: StateDict, name: str) -> None:
    record.k = update_count(entry.get("step", 0), name)
    # The next step looks whether the model's weight is the one of the state.
    record.stamp = -1, record.param.data_ptr()
    state = record.state
    for key, target in (("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
        fill_from(target, entry.get(key))
    if state.master_weight is not None:
        fill_from(state.master_weight, entry.get("master_weight", record.param.detach()))


def _fill_offloaded(record: OffloadedParameter, registry: Registry, entry: StateDict, name: str) -> None:
    record.k = update_count(entry.get("step", 0), name)
    record.mastered = bool(entry)
    record.stamp_now()
    record.columns = record.importance = record.chosen = None
    registry.set_moments(record, entry.get("exp_avg"), entry.get("exp_avg_sq"))
    fill_from(record.master_weight, entry.get("master_weight", record.param.detach()))


def _set_progress(record: OffloadedParameter, engine: Engine, pending: list[tuple[float, float]]) -> None:
    for bucket, i in record.segments:
        rows = engine.progress(bucket.engine_id)
        rows[i] = (record.k, *pending[bucket.phase])
        engine.set_progress(bucket.engine_id, rows)


def _select(record: OffloadedParameter, entry: StateDict, registry: Registry) -> None:
    if "selected_columns" in entry:
        registry.exchange(record, _columns(entry["selected_columns"]))
        if record.columns is not None and record.moments is None:
            # A float32 checkpoint doesn't have them; the host's are theirs, rounded.
            for key in ("exp_avg", "exp_avg_sq"):
                if f"selected_{key}" in entry:
                    fill_from(getattr(record.columns.state, key), entry[f"selected_{key}"])
    if "column_importance" in entry:
        record.importance = entry["column_importance"].detach().to("cpu", torch.float32, copy=True)
    if "next_columns" in entry:
        record.chosen = _columns(entry["next_columns"])


def _move_pending(record: OffloadedParameter, registry: Registry, entry: StateDict, group: StateDict) -> None:
    """Closes every stripe of a checkpoint, as its own next close would have with no further gradient."""
    if not record.k:
        return
    lr_sum, decay = entry["pending_lr_sum"], entry["pending_decay"]
    beta1, beta2 = group["betas"]
    first, second = 1.0 - beta1**record.k, 1.0 - beta2**record.k
    shape = record.matrix.rows, record.matrix.cols
    master, m, v = (t.view(shape) for t in (record.master_weight, *registry.moments(record)))
    deferred = torch.ones(shape[1], dtype=torch.bool)
    deferred[_columns(_selected(entry))] = False
    for phase, (start, stop) in enumerate(
        stripe_bounds(shape[0], lr_sum.numel(), int(entry.get("stripe_grain", _NO_GRAIN)))
    ):
        rows = slice(start, stop)
        direction = (m[rows] / first) / ((v[rows] / second).sqrt() + group["eps"])
        moved = master[rows] * (1.0 - float(decay[phase])) - float(lr_sum[phase]) * direction
        master[rows] = torch.where(deferred, moved, master[rows])


def _columns(columns: Tensor) -> Tensor:
    return columns.detach().to("cpu", torch.int64, copy=True)
