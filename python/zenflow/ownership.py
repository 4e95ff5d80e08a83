"""Who owns which column of a parameter, and the one way in which that changes.

A column's master weight is live on exactly one side. The device holds fp32 masters and working moments of the columns
it owns, compact, ``[rows, columns]``; the host's moments are complete for all columns at every step, since every
gradient goes there whole. So only masters have to be handed over on leaving, and nothing is ever cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .dense_adamw import DenseState

__all__ = ["ColumnStore", "DeviceColumns", "change_owner"]


class ColumnStore(Protocol):
    """The host's side of an exchange: the engine. Both calls are refused while a ticket of the parameter runs."""

    def gather_columns(
        self, parameter: int, cols: int, columns: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        """Copies columns of the host state into compact tensors."""

    def scatter_columns(self, parameter: int, cols: int, columns: Tensor, master: Tensor) -> None:
        """Copies compact masters into columns of the host's."""


@dataclass(eq=False)
class DeviceColumns:
    """The columns that the device owns: their indices (int64, ascending) and state, ``[rows, len(columns)]``.

    ``state.weight`` is the weight in the parameter's dtype, on its way into the parameter.
    """

    columns: Tensor
    state: DenseState


def change_owner(
    store: ColumnStore,
    parameter: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    old: DeviceColumns | None,
    columns: Tensor,
) -> DeviceColumns:
    """Gives the columns in ``old`` back to the host and takes ``columns`` (int64) from it.

    The parameter must have nothing pending: it closed as a whole. Repeated, this is the identity on the state.
    """
    rows, cols = shape
    if old is not None and old.columns.numel():
        store.scatter_columns(parameter, cols, old.columns, old.state.master)
    compact = (rows, columns.numel())
    state = DenseState(
        weight=torch.empty(compact, dtype=dtype),
        master_weight=None if dtype == torch.float32 else torch.empty(compact),
        exp_avg=torch.empty(compact),
        exp_avg_sq=torch.empty(compact),
    )
    store.gather_columns(parameter, cols, columns, state.master, state.exp_avg, state.exp_avg_sq)
    return DeviceColumns(columns, state)
