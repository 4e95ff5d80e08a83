"""The parameters of a CPUAdamW: their records, and one step's walk over them.

The core's table has a row a parameter. A step's walk (:meth:`Parameters.find`) is one call of the core, which reads and
checks every gradient and every parameter's memory against its row. Only what is unusual comes here, to be checked in
the long way, refused by name, or mended: a first gradient, a gradient in another memory order, memory that was
replaced, a foreign write.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._core import Found, ParameterTable, Pool
from .dense_adamw import DenseGroup
from .dense_parameter import DenseParameter
from .errors import ArgumentError
from .gradients import check_gradient, dense, gradient_like, parameter_name
from .lean_state import LeanState
from .state import EXACT_IN_FLOAT32, step_tensor

__all__ = ["Gradients", "Parameters"]

Entry = dict[str, Tensor]


class Gradients:
    """All gradients of one step, checked; ``unusual`` are those with their places in ``found`` and parameters."""

    __slots__ = ("_pool", "found", "unusual")

    def __init__(self, pool: Pool, found: Found, unusual: list[tuple[int, Tensor, Tensor]]) -> None:
        self._pool = pool
        self.found = found
        self.unusual = unusual

    def stats(self) -> tuple[float, bool]:
        """Squared l2 norm of all together and whether any element is inf or NaN; one read-only pass."""
        for position, _, grad in self.unusual:
            self.found.put(position, dense(grad))
        return self.found.stats(self._pool)


class _Record(DenseParameter):
    """A parameter with its ``step``: the number of updates, as torch.optim shows it, written by the core."""

    __slots__ = ("step",)

    def __init__(self, param: Tensor, k: int, state_dtype: str) -> None:
        super().__init__(param, state_dtype)
        self.step = torch.tensor(float(k), dtype=torch.float32)


class Parameters:
    """Those parameters of an optimizer that have had a gradient or a loaded state, and their exact update counts."""

    def __init__(self, pool: Pool, state_dtype: str) -> None:
        self._pool = pool
        self._state_dtype = state_dtype
        self.clear()

    def clear(self) -> None:
        """Forgets all of them."""
        self._table = ParameterTable()
        self._records: dict[Tensor, _Record] = {}

    @property
    def counts(self) -> dict[Tensor, int]:
        """The update count of each."""
        return {param: self._table.count(param) for param in self._records}

    def find(self, groups: Sequence[Mapping[str, Any]]) -> Gradients:
        """The gradients of all parameters of ``groups`` that have one.

        Raises:
            zenflow.ArgumentError: where a gradient can't be used, or a parameter is no longer what it was. Nothing is
                changed.
        """
        found = self._table.find([list(group["params"]) for group in groups])
        unusual = []
        for position, group_index, index in found.unusual:
            group = groups[group_index]
            param = group["params"][index]
            name = parameter_name(group, group_index, index)
            grad = check_gradient(param, name)
            assert grad is not None
            if grad.numel() and not grad.data_ptr():
                raise ArgumentError(f"the gradient of {name} has no memory; accepted: gradients on the CPU")
            record = self._records.get(param)
            if record is not None and record.changed:
                raise ArgumentError(
                    f"{name} was moved or changed to {tuple(param.shape)}, {param.dtype} after its first step; "
                    "accepted: the same tensor. Build the optimizer after model.to(...)"
                )
            unusual.append((position, param, grad))
        return Gradients(self._pool, found, unusual)

    def update(
        self, gradients: Gradients, groups: Sequence[DenseGroup], state: MutableMapping[Tensor, Entry]
    ) -> None:
        """One update of all that was found.

        Args:
            gradients: from :meth:`find`.
            groups: the settings of the groups.
            state: the optimizer's; gets the entries that are new, or not the tensors they were.
        """
        for position, param, grad in gradients.unusual:
            record = self._records.get(param)
            if record is None:
                record = self._add(param, 0)
                state[param] = self._entry(record, 0)
            else:
                if record.scratch is None:  # else its own stamp is of its last write
                    record.stamp = self._table.stamp(param)
                k = self._table.count(param)
                if record.adopt():
                    state[param] = self._entry(record, k)
                self._register(record, k)
            gradients.found.put(position, gradient_like(record.state.weight, grad))
        exact = self._table.step(self._pool, gradients.found, list(groups))
        for _, param, _ in gradients.unusual:
            self._records[param].copy_back()
        if not exact:
            for param in gradients.found.params:
                k = self._table.count(param)
                if k > EXACT_IN_FLOAT32:
                    state[param] = self._entry(self._records[param], k)

    def restore(self, param: Tensor, entry: Mapping[str, Any], k: int) -> Entry:
        """Takes copies of a state entry's tensors, after ``k`` updates; returns the live entry."""
        record = self._add(param, k)
        record.state.fill(dict(entry))
        return self._entry(record, k)

    def _add(self, param: Tensor, k: int) -> _Record:
        record = self._records[param] = _Record(param, k, self._state_dtype)
        self._register(record, k)
        return record

    def _register(self, record: _Record, k: int) -> None:
        state = record.state
        scales = state.scales if isinstance(state, LeanState) else None
        moments = state.exp_avg, state.exp_avg_sq
        self._table.register(
            record.param, state.weight, state.kernel_master, *moments, record.step, k, scales
        )

    def export(self) -> dict[Tensor, Entry]:
        """State entries as a checkpoint has them, moments in fp32."""
        entries = {}
        for param, record in self._records.items():
            k = self._table.count(param)
            entries[param] = {"step": _step(record, k), **record.state.wide()}
        return entries

    def _entry(self, record: _Record, k: int) -> Entry:
        """The live entry. Of a lean state it only says that there is one: nobody else could read it."""
        entry = {"step": _step(record, k)}
        return entry if isinstance(record.state, LeanState) else {**entry, **record.state.wide()}


def _step(record: _Record, k: int) -> Tensor:
    return record.step if k <= EXACT_IN_FLOAT32 else step_tensor(k)
