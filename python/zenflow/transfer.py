"""The way of a bucket through one step: gradients down, a ticket to the worker, new weights up and into place.

A bucket in which something closes is *pending* from its submission until its new weights have landed in the
parameters. Nothing here waits by itself but for three reasons, each counted as a stall: no staging slot is free, the
rings are full, or the caller asked for a landing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ._core import Engine
from .accelerator import Accelerator
from .config import Config, Hyper
from .parameters import Bucket, OffloadedParameter, Segment
from .staging import Slot, SlotPool

__all__ = ["ABSENT", "CLOSE", "MOMENTS", "PendingClose", "Transfer"]

# What a ticket asks of a segment, as the core numbers it.
ABSENT, MOMENTS, CLOSE = 0, 1, 2

# Bytes in front of a gradient slot's payload: the doorbell, on a cache line of its own.
_SLOT_HEADER = 64

# A wait is looked after again at least this often (seconds): the engine reports a failed worker then.
_WAIT = 1.0

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(eq=False)
class PendingClose:
    """New weights on their way: which segments they are for, and the columns that stay as the device has them."""

    bucket: Bucket
    upload: Slot
    segments: list[tuple[Segment, Tensor | None]]
    ready: bool = False


class Transfer:
    """Moves buckets between the accelerator and the engine."""

    def __init__(self, engine: Engine, accelerator: Accelerator, config: Config) -> None:
        self._engine = engine
        self._accelerator = accelerator
        self._late = config.staleness > 0
        self._down_stream = accelerator.new_stream()
        self._up_stream = accelerator.new_stream()
        budget = config.max_staging_bytes // 2
        self._down = SlotPool(accelerator.allocate_staging, engine.add_slot, budget, 0)
        self._up = SlotPool(accelerator.allocate_staging, engine.add_upload, budget, 0)
        self._slots: dict[int, Slot] = {}
        self._in_flight: dict[int, int] = {}
        self.pending: dict[int, PendingClose] = {}
        self.stall_seconds = 0.0
        self.bytes_down = 0
        self.bytes_up = 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory in both directions."""
        return self._down.nbytes + self._up.nbytes

    def expect(self, bucket: Bucket) -> None:
        """Sizes the slots for one more bucket."""
        nbytes = bucket.numel * bucket.dtype.itemsize
        self._down.expect(_SLOT_HEADER + nbytes)
        self._up.expect(nbytes)

    def submit(
        self,
        bucket: Bucket,
        actions: bytes,
        gradients: Mapping[OffloadedParameter, Tensor],
        hyper: Hyper,
        scale: float,
    ) -> None:
        """Sends one bucket's gradients (``[rows, cols]`` a parameter) down and its ticket to the worker."""
        active = [
            (segment, action) for segment, action in zip(bucket.segments, actions, strict=True) if action
        ]
        dtypes = {gradients[segment.parameter].dtype for segment, _ in active}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        nbytes = bucket.numel * dtype.itemsize
        slot = self._acquire(lambda: self._down.acquire(_SLOT_HEADER + nbytes))
        upload = None
        if CLOSE in actions:
            size = bucket.numel * bucket.dtype.itemsize
            # What is late can't land to make room, so its slots may go beyond the budget; there is one a bucket.
            upload = self._acquire(lambda: self._up.acquire(size, beyond_budget=self._late))
        payload = slot.memory[_SLOT_HEADER : _SLOT_HEADER + nbytes].view(dtype)
        accelerator, stream = self._accelerator, self._down_stream
        accelerator.wait(stream, accelerator.record(accelerator.current_stream()))
        for segment, _ in active:
            target = payload[segment.offset : segment.offset + segment.numel]
            source = gradients[segment.parameter][segment.start : segment.stop]
            accelerator.copy(stream, target.view(source.shape), source)
            self.bytes_down += segment.numel * dtype.itemsize
        accelerator.ring(
            stream, lambda s, void: self._engine.ring(slot.engine_id, s, void=void), scale, False
        )
        names = _NAMES[dtype], _NAMES[bucket.dtype]
        number = None if upload is None else upload.engine_id
        while not self._engine.submit(bucket.engine_id, slot.engine_id, number, actions, *names, hyper):
            self._relieve()
        self._slots[slot.engine_id] = slot
        self._in_flight[bucket.engine_id] = self._in_flight.get(bucket.engine_id, 0) + 1
        if upload is not None:
            closed = [(segment, _device_columns(segment)) for segment, action in active if action == CLOSE]
            self.pending[bucket.engine_id] = PendingClose(bucket, upload, closed)

    def restore(self, bucket: Bucket, segments: Iterable[Segment]) -> None:
        """Makes a close pending again whose weights a checkpoint didn't show yet: they are the rounded masters."""
        pending = self.pending.get(bucket.engine_id)
        size = bucket.numel * bucket.dtype.itemsize
        if pending is None:
            upload = self._acquire(lambda: self._up.acquire(size, beyond_budget=True))
            pending = self.pending[bucket.engine_id] = PendingClose(bucket, upload, [], ready=True)
        weights = pending.upload.memory[:size].view(bucket.dtype)
        for segment in segments:
            start = segment.start * segment.parameter.matrix.cols
            master = segment.parameter.master_weight[start : start + segment.numel]
            weights[segment.offset : segment.offset + segment.numel].copy_(master)
            pending.segments.append((segment, _device_columns(segment)))

    def land(self, buckets: Iterable[int]) -> None:
        """Lands these buckets' new weights (those that are pending), waiting for the worker where it must.

        After a wait everything that is ready lands, where that isn't too early: it frees slots.
        """
        wanted = [number for number in buckets if number in self.pending]
        self._collect()
        while not all(self.pending[number].ready for number in wanted if number in self.pending):
            self._relieve()
        for number in wanted:
            if number in self.pending:
                self._place(number)

    def land_all(self) -> None:
        """Lands everything that is pending, late or not."""
        self.land(list(self.pending))

    def finish(self, buckets: Iterable[int] | None = None) -> None:
        """Waits until the worker has finished every ticket, of ``buckets`` or at all."""
        numbers = None if buckets is None else list(buckets)
        self._collect()
        while self._in_flight if numbers is None else any(number in self._in_flight for number in numbers):
            self._relieve()

    def land_parameters(self, bucket: int, parameters: Collection[OffloadedParameter]) -> None:
        """Lands what a bucket has for these parameters; what it has for others stays pending."""
        self._collect()
        while bucket in self.pending and not self.pending[bucket].ready:
            self._relieve()
        if bucket in self.pending:
            pending = self.pending[bucket]
            now = [entry for entry in pending.segments if entry[0].parameter in parameters]
            pending.segments = [entry for entry in pending.segments if entry[0].parameter not in parameters]
            self._write(pending, now)
            self._release_empty(bucket)

    def discard(self, parameters: Collection[OffloadedParameter]) -> None:
        """Forgets the new weights of these parameters: others were written over them."""
        numbers = {bucket.engine_id for parameter in parameters for bucket, _ in parameter.segments}
        for number in numbers & self.pending.keys():
            pending = self.pending[number]
            pending.segments = [entry for entry in pending.segments if entry[0].parameter not in parameters]
        self.finish(numbers)
        for number in numbers:
            self._release_empty(number)

    def _release_empty(self, number: int) -> None:
        pending = self.pending.get(number)
        if pending is not None and not pending.segments:
            self._up.release(self.pending.pop(number).upload)

    def _acquire(self, attempt: Callable[[], Slot | None]) -> Slot:
        slot = attempt()
        if slot is None:
            self._collect()
            slot = attempt()
        while slot is None:
            self._relieve()
            slot = attempt()
        return slot

    def _relieve(self) -> None:
        """Waits for the worker and lands what is ready and not early: the wait is a stall."""
        start = self._accelerator.clock()
        self._handle(self._engine.wait(_WAIT))
        if not self._late:
            for number in [number for number, pending in self.pending.items() if pending.ready]:
                self._place(number)
        self.stall_seconds += self._accelerator.clock() - start

    def _collect(self) -> None:
        self._handle(self._engine.poll())

    def _handle(self, completions: list[tuple[int, int, int | None, bool]]) -> None:
        for bucket, slot, upload, _ in completions:
            self._down.release(self._slots.pop(slot))
            left = self._in_flight.pop(bucket) - 1
            if left:
                self._in_flight[bucket] = left
            if upload is not None:
                self.pending[bucket].ready = True

    def _place(self, number: int) -> None:
        """Lands the whole of a bucket. It is pending until then: a gate in another thread has to wait."""
        pending = self.pending[number]
        overwritten = self._write(pending, pending.segments)
        del self.pending[number]
        self._up.release(pending.upload)
        for name in overwritten:
            _warn_overwritten(name)

    def _write(self, pending: PendingClose, segments: list[tuple[Segment, Tensor | None]]) -> list[str]:
        """Writes new weights into the parameters, but for the columns that the device owns.

        Returns the names of those that someone else wrote into meanwhile; the next step takes them for the masters.
        """
        overwritten = []
        size = pending.bucket.numel * pending.bucket.dtype.itemsize
        staged = pending.upload.memory[:size].view(pending.bucket.dtype)
        for segment, columns in segments:
            parameter = segment.parameter
            if parameter.overwritten:
                overwritten.append(parameter.name)
                continue
            rows = segment.stop - segment.start
            values = staged[segment.offset : segment.offset + segment.numel].view(rows, parameter.matrix.cols)
            if columns is not None:
                kept = parameter.matrix.of(parameter.param)[segment.start : segment.stop]
                values.index_copy_(1, columns, kept.index_select(1, columns))
            parameter.matrix.write_rows(segment.start, segment.stop, values)
            parameter.stamp_now()
            self.bytes_up += segment.numel * pending.bucket.dtype.itemsize
        return overwritten


def _warn_overwritten(name: str) -> None:
    warnings.warn(
        f"{name} was written to while new weights were on their way to it; what was written stays. "
        "Call synchronize() before writing to parameters",
        stacklevel=2,
    )


def _device_columns(segment: Segment) -> Tensor | None:
    owned = segment.parameter.columns
    return None if owned is None or not owned.columns.numel() else owned.columns
