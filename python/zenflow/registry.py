"""The records of every parameter that the optimizer has met, their host memory and their buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ._core import Engine, HostArray
from .buckets import plan_buckets
from .config import Config
from .dense_adamw import adopt_weight
from .dense_parameter import DenseParameter
from .errors import ArgumentError
from .gate import Gates
from .matrix import ParameterMatrix
from .ownership import change_owner
from .parameters import Bucket, OffloadedParameter, Segment
from .schedule import row_grain
from .transfer import Transfer

__all__ = ["Registry", "SmallParameter", "fill_from"]


class SmallParameter(DenseParameter):
    """A parameter that is updated whole at every step, on the device side; ``k`` counts its updates."""

    __slots__ = ("group", "k", "name")

    def __init__(self, param: Tensor, name: str, group: int) -> None:
        super().__init__(param)
        self.name = name
        self.group = group
        self.k = 0


class Registry:
    """All records, by parameter, and all buckets, in the order of registration."""

    def __init__(self, engine: Engine, transfer: Transfer, gates: Gates | None, config: Config) -> None:
        self._engine = engine
        self._transfer = transfer
        self._gates = gates
        self._config = config
        self._records: dict[Tensor, OffloadedParameter | SmallParameter] = {}
        self.offloaded: list[OffloadedParameter] = []
        self.small: list[SmallParameter] = []
        self.buckets: list[Bucket] = []

    def __contains__(self, param: Tensor) -> bool:
        return param in self._records

    def __iter__(self) -> Iterator[OffloadedParameter | SmallParameter]:
        return iter(self._records.values())

    def __getitem__(self, param: Tensor) -> OffloadedParameter | SmallParameter:
        return self._records[param]

    @property
    def offloaded_numel(self) -> int:
        """Elements whose states the engine owns."""
        return sum(record.param.numel() for record in self.offloaded)

    @property
    def device_numel(self) -> int:
        """Elements of parameters that stay on the device side."""
        return sum(record.param.numel() for record in self.small)

    @property
    def selected_numel(self) -> int:
        """Offloaded elements that the device moves every step."""
        owned = (record.columns for record in self.offloaded)
        return sum(columns.state.weight.numel() for columns in owned if columns is not None)

    def add(self, entries: Sequence[tuple[Tensor, str, int]]) -> None:
        """Makes records and buckets for ``(parameter, name, group)`` that have none yet."""
        added = []
        for param, name, group in entries:
            if param in self._records:
                continue
            record: OffloadedParameter | SmallParameter
            if param.ndim < 2 or param.numel() < max(1, self._config.min_offload_numel):
                record = SmallParameter(param, name, group)
                self.small.append(record)
            else:
                record = self._offload(param, name, group)
                self.offloaded.append(record)
                added.append(record)
            self._records[param] = record
        for segments in plan_buckets(added, self._config.update_interval, self._config.bucket_numel):
            self._add_bucket(segments)

    def _offload(self, param: Tensor, name: str, group: int) -> OffloadedParameter:
        matrix = ParameterMatrix(param)
        state_dtype = self._config.state_dtype
        engine_id = self._engine.add_parameter(param.numel(), state_dtype)
        master_weight, exp_avg, exp_avg_sq = self._engine.arrays(engine_id)
        wide = None if exp_avg is None or exp_avg_sq is None else (_tensor(exp_avg), _tensor(exp_avg_sq))
        return OffloadedParameter(
            param=param,
            name=name,
            index=len(self.offloaded),
            group=group,
            matrix=matrix,
            engine_id=engine_id,
            master_weight=_tensor(master_weight),
            moments=wide,
            grain=row_grain(matrix.cols, state_dtype),
            gates=() if self._gates is None else self._gates.owners(param),
        )

    def moments(self, record: OffloadedParameter) -> tuple[Tensor, Tensor]:
        """Both moments in fp32, flat: the live ones where they are kept so, else copies."""
        if record.moments is not None:
            return record.moments
        exp_avg, exp_avg_sq = (torch.empty(record.param.numel()) for _ in range(2))
        self._engine.read_moments(record.engine_id, exp_avg, exp_avg_sq)
        return exp_avg, exp_avg_sq

    def set_moments(
        self, record: OffloadedParameter, exp_avg: Tensor | None, exp_avg_sq: Tensor | None
    ) -> None:
        """Takes both moments, None for zeros; rounded to nearest where they are kept in a lean format."""
        if record.moments is not None:
            for target, source in zip(record.moments, (exp_avg, exp_avg_sq), strict=True):
                fill_from(target, source)
            return
        given = [torch.empty(record.param.numel()) for _ in range(2)]
        for target, source in zip(given, (exp_avg, exp_avg_sq), strict=True):
            fill_from(target, source)
        self._engine.write_moments(record.engine_id, *given)

    def _add_bucket(self, segments: list[Segment]) -> None:
        first = segments[0].parameter
        number = self._engine.add_bucket(
            [(s.parameter.engine_id, s.start * s.parameter.matrix.cols, s.numel) for s in segments]
        )
        bucket = Bucket(
            engine_id=number,
            phase=segments[0].phase,
            group=first.group,
            dtype=first.param.dtype,
            gates=first.gates,
            segments=segments,
            numel=segments[-1].offset + segments[-1].numel,
        )
        for i, segment in enumerate(segments):
            segment.parameter.segments.append((bucket, i))
        if self._gates is not None:
            for gate in first.gates:
                self._gates.gates[gate].buckets.append(number)
        self.buckets.append(bucket)
        self._transfer.expect(bucket)

    def release(self) -> None:
        """Lets go of the host's memory; counts stay. Records, segments and buckets are in cycles until then."""
        nothing = torch.empty(0)
        for record in self.offloaded:
            record.segments.clear()
            record.master_weight, record.moments = nothing, None
        self.buckets.clear()

    def check_unmoved(self, param: Tensor, name: str) -> None:
        """Raises :class:`ArgumentError` if the parameter isn't the tensor any more that was registered."""
        record = self._records.get(param)
        if record is None:
            return
        if isinstance(record, SmallParameter):
            changed = record.changed
        else:
            dtype, numel = record.segments[0][0].dtype, record.master_weight.numel()
            changed = dtype != param.dtype or numel != param.numel() or param.device.type != "cpu"
        if changed:
            raise ArgumentError(
                f"{name} was moved or changed to {tuple(param.shape)}, {param.dtype} after the optimizer was built; "
                "accepted: the same tensor. Build the optimizer after model.to(...)"
            )

    def whole_master(self, record: OffloadedParameter) -> Tensor:
        """The host's master with the device's columns written into their places, which are dead storage there."""
        if record.columns is not None and record.columns.columns.numel():
            shape = record.matrix.cols, record.columns.columns, record.columns.state.master
            self._engine.scatter_columns(record.engine_id, *shape)
        return record.master_weight

    def exchange(self, record: OffloadedParameter, columns: Tensor) -> tuple[int, int]:
        """Gives the device these columns in place of those it has; returns bytes sent down and up."""
        old = record.columns
        if old is not None and torch.equal(old.columns, columns):
            return 0, 0
        shape = record.matrix.rows, record.matrix.cols
        record.columns = change_owner(self._engine, record.engine_id, shape, record.param.dtype, old, columns)
        down = 0 if old is None else 4 * old.state.weight.numel()
        return down, 12 * record.columns.state.weight.numel()

    def adopt(self, record: OffloadedParameter) -> None:
        """Takes the weight for the master: all of it the first time, later only where the two differ.

        A weight that is the rounded master says nothing new, and the master keeps its low bits. Stripes that are
        pending stay as they are.
        """
        self._transfer.finish(bucket.engine_id for bucket, _ in record.segments)
        master = self.whole_master(record).view(record.matrix.rows, record.matrix.cols)
        weight = record.matrix.of(record.param)
        if not record.mastered:
            master.copy_(weight)
        else:
            for bucket, i in record.segments:
                segment = bucket.segments[i]
                pending = self._transfer.pending.get(bucket.engine_id)
                if pending is None or all(late is not segment for late, _ in pending.segments):
                    adopt_weight(master[segment.start : segment.stop], weight[segment.start : segment.stop])
        if record.columns is not None:
            self.exchange_again(record)
        record.mastered = True
        record.stamp_now()

    def exchange_again(self, record: OffloadedParameter) -> None:
        """Takes the masters of the device's columns anew from the host's; their moments are what they were."""
        old = record.columns
        assert old is not None
        shape = record.matrix.rows, record.matrix.cols
        record.columns = change_owner(
            self._engine, record.engine_id, shape, record.param.dtype, None, old.columns
        )
        record.columns.state.exp_avg, record.columns.state.exp_avg_sq = (
            old.state.exp_avg,
            old.state.exp_avg_sq,
        )


def fill_from(target: Tensor, source: Tensor | None) -> None:
    """Copies a tensor of whatever shape, dtype and device; None for zeros."""
    if source is None:
        target.zero_()
    else:
        target.copy_(source.detach().reshape(target.shape))


def _tensor(array: HostArray) -> Tensor:
    return torch.from_numpy(np.asarray(array))
