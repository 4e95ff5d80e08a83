"""The pipeline behind ZenFlowAdamW: what a step does with gradients, in which order, and what gates ask of it.

It knows parameters by their records and hyper-parameters by their group's number; groups, closures and state dicts are
the optimizer's. Every public method may be called from any thread: gates fire where the forward runs.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch
from torch import Tensor, nn

from . import checkpoint
from ._core import Engine, Pool, grad_stats
from .accelerator import accelerator_for
from .config import STATE_BYTES, Config, Hyper
from .dense_adamw import DenseAdamW, DenseGroup, DenseUpdate
from .errors import ZenFlowError
from .gate import Gate, Gates
from .gradients import dense, gradient_like, step_scale
from .parameters import Bucket, OffloadedParameter
from .registry import Registry, SmallParameter
from .schedule import closes, selects, steps_to_close, warming_up
from .selection import column_energy, selected_count, top_columns, update_importance
from .state import StateDict
from .stats import Stats
from .transfer import ABSENT, CLOSE, MOMENTS, Transfer

__all__ = ["Named", "Pipeline"]

# A parameter, what errors call it, and the number of its group.
Named: TypeAlias = tuple[Tensor, str, int]

_Work: TypeAlias = "list[tuple[OffloadedParameter | SmallParameter, Tensor]]"
_Offloaded: TypeAlias = dict[OffloadedParameter, Tensor]


class Pipeline:
    """Records, engine, transfer and gates of one optimizer."""

    def __init__(self, config: Config, model: nn.Module | None) -> None:
        accelerator = accelerator_for("cpu")
        assert accelerator is not None
        self.config = config
        self.engine = Engine(None if config.cores is None else list(config.cores))
        self._lock = threading.RLock()
        self._accelerator = accelerator
        self._pool = Pool()
        self._dense = DenseAdamW(self._pool)
        self.transfer = Transfer(self.engine, accelerator, config)
        self.gates = None if model is None else Gates(self, model)
        self.registry = Registry(self.engine, self.transfer, self.gates, config)
        self._steps = self._skipped = 0
        self._wall: tuple[float, float] | None = None
        self._exchanged_bytes = [0, 0]
        # True in a first step before which no gate fired.
        self._unproven = False
        # True between loading a state dict and the next step.
        self._fresh = False

    def step(
        self, named: Sequence[tuple[Named, Tensor]], hypers: Sequence[Hyper], signs: Sequence[float]
    ) -> None:
        """One update of parameters with their checked gradients; ``signs`` are -1 for groups that maximize."""
        with self._lock, torch.no_grad():
            start = self._accelerator.clock()
            grads = [grad for _, grad in named]
            scale = step_scale(
                lambda: grad_stats(self._pool, [dense(grad) for grad in grads]),
                self.config.max_grad_norm,
                self.config.skip_nonfinite,
            )
            if scale.void:
                self._skip()
            else:
                self.registry.add([entry for entry, _ in named])
                work = [(self.registry[param], grad) for (param, _, _), grad in named]
                self._distrust_gates(work)
                groups: list[DenseGroup] = [
                    (hyper, sign * scale.scale, True) for hyper, sign in zip(hypers, signs, strict=True)
                ]
                try:
                    self._update(work, groups, scale.scale)
                except BaseException as error:
                    # Half a step can't be taken back.
                    self.engine.poison(f"a step failed half way: {error!r}")
                    raise
            first = start if self._wall is None else self._wall[0]
            self._wall = first, self._accelerator.clock()

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped == 1:
            warnings.warn(
                "a step with inf or NaN gradients was skipped; see stats().skipped_steps", stacklevel=5
            )

    def _update(self, work: _Work, groups: list[DenseGroup], scale: float) -> None:
        offloaded: _Offloaded = {
            record: record.matrix.of(grad) for record, grad in work if isinstance(record, OffloadedParameter)
        }
        self._take_masters([record for record, _ in work])
        self.transfer.land_all()
        for record, grad in offloaded.items():
            self._exchange(record)
            self._weigh(record, grad, scale)
        self._update_device(work, offloaded, groups)
        self._defer(offloaded, groups)
        self._fresh = False
        self._steps += 1

    def _take_masters(self, records: Iterable[OffloadedParameter | SmallParameter]) -> None:
        """Takes weights for masters: at first, where someone else wrote into them, and once after a load."""
        foreign = []
        for record in records:
            if isinstance(record, SmallParameter):
                if record.adopt():
                    self._dense.forget()
            elif not record.mastered or record.overwritten or self._fresh:
                foreign.append(record)
        if foreign and not self._fresh:
            # Just after a state dict, late stripes belong to the very weights that are being loaded.
            self.transfer.discard(foreign)
        for record in foreign:
            self.registry.adopt(record)

    def _exchange(self, record: OffloadedParameter) -> None:
        if record.chosen is not None:
            self.transfer.finish(bucket.engine_id for bucket, _ in record.segments)
            down, up = self.registry.exchange(record, record.chosen)
            self._dense.forget()
            self._exchanged_bytes[0] += down
            self._exchanged_bytes[1] += up
            record.chosen = None

    def _weigh(self, record: OffloadedParameter, grad: Tensor, scale: float) -> None:
        """Counts the gradient into the columns' importance; makes the first choice."""
        count = selected_count(record.matrix.cols, self.config.topk_ratio)
        if not count:
            return
        record.importance = update_importance(record.importance, column_energy(grad, scale))
        if record.columns is None:
            record.chosen = top_columns(record.importance, count)
            self._exchange(record)

    def _update_device(self, work: _Work, offloaded: _Offloaded, groups: list[DenseGroup]) -> None:
        """AdamW on the selected columns and the small parameters, in one parallel region."""
        updates = []
        for record, grad in work:
            if isinstance(record, SmallParameter):
                record.k += 1
                updates.append(
                    DenseUpdate(
                        record.state, gradient_like(record.state.weight, grad), record.k, record.group
                    )
                )
                continue
            record.k += 1
            if record.columns is not None:
                part = offloaded[record].index_select(1, record.columns.columns)
                updates.append(DenseUpdate(record.columns.state, part, record.k, record.group))
        self._dense.step(updates, groups)
        for record, _ in work:
            if isinstance(record, SmallParameter):
                record.written()
            elif record.columns is not None:
                record.matrix.write_columns(record.columns.columns, record.columns.state.weight)
                record.stamp_now()

    def _defer(self, offloaded: _Offloaded, groups: list[DenseGroup]) -> None:
        """Sends all gradients down: closing buckets first, in forward order, then those that close soonest."""
        config = self.config
        whole = {record for record in offloaded if self._closes_whole(record)}
        urgent: list[tuple[Bucket, bytes]] = []
        background: list[tuple[int, Bucket, bytes]] = []
        for bucket in self.registry.buckets:
            wanted = bytearray()
            for segment in bucket.segments:
                record = segment.parameter
                if record not in offloaded:
                    wanted.append(ABSENT)
                elif record in whole or closes(record.k, bucket.phase, config.update_interval):
                    wanted.append(CLOSE)
                else:
                    wanted.append(MOMENTS)
            actions = bytes(wanted)
            if CLOSE in actions:
                urgent.append((bucket, actions))
            elif any(actions):
                k = max(segment.parameter.k for segment in bucket.segments)
                wait = steps_to_close(k, bucket.phase, config.update_interval)
                background.append((wait, bucket, actions))
        background.sort(key=lambda entry: entry[0])
        for bucket, actions in urgent + [entry[1:] for entry in background]:
            hyper, scale, _ = groups[bucket.group]
            self.transfer.submit(bucket, actions, offloaded, hyper, scale)
        for record in offloaded:
            if record.columns is not None and selects(record.k, record.index, config.select_interval):
                assert record.importance is not None
                record.chosen = top_columns(record.importance, record.columns.columns.numel())
        self._land_ungated(urgent)

    def _closes_whole(self, record: OffloadedParameter) -> bool:
        """True where every stripe of the parameter closes: in the warm-up, and before its columns change owner."""
        if warming_up(record.k, self.config.full_warm_up_rounds):
            return True
        changes = record.columns is not None and selects(record.k, record.index, self.config.select_interval)
        return changes and record.columns is not None and record.columns.columns.numel() < record.matrix.cols

    def _land_ungated(self, urgent: list[tuple[Bucket, bytes]]) -> None:
        """Lands here what no gate will land in time."""
        config = self.config
        for bucket, _ in urgent:
            if config.staleness == 0:
                trusted = self.gates is not None and any(self.gates.gates[i].trusted for i in bucket.gates)
                if not trusted or self._unproven:
                    self.transfer.land([bucket.engine_id])
                continue
            parameters = {segment.parameter for segment in bucket.segments}
            warm = {p for p in parameters if p.k and warming_up(p.k, config.full_warm_up_rounds)}
            if warm:  # Never late; but its neighbours in the bucket are.
                self.transfer.land_parameters(bucket.engine_id, warm)

    # --- Gates -----------------------------------------------------------------------------------

    def _distrust_gates(self, work: _Work) -> None:
        """A parameter got a gradient, but no gate of it fired: its module was used without being called."""
        if self.gates is None:
            return
        gates = self.gates.gates
        # Without any forward there is nothing to learn: before it restores a checkpoint, a framework takes a step
        # with gradients of its own.
        self._unproven = not self._steps and not any(gate.fired for gate in gates)
        if self._unproven:
            return
        uncalled = []
        for record, _ in work:
            if isinstance(record, SmallParameter) or any(gates[i].fired for i in record.gates):
                continue
            if any(gates[i].trusted for i in record.gates):
                uncalled.append((record.name, gates[record.gates[0]].name))
                for i in record.gates:
                    gates[i].trusted = False
        for gate in gates:
            gate.fired = False
        for name, module in uncalled:
            warnings.warn(
                f"{name} had a gradient, but {module} was not called since the last step; "
                "its new weights land in step() from now on, which then waits for them",
                stacklevel=5,
            )

    def pass_gate(self, gate: Gate) -> None:
        """Called by a gate before its module's forward: lands what the module is about to read."""
        if self.transfer.pending and self.config.staleness == 0:
            with self._guarded():
                self.transfer.land(gate.buckets)
                # An autocast context that is open keeps casts of the old weights.
                torch.clear_autocast_cache()

    def show_weights(self) -> None:
        """Lands everything whose time has come."""
        if self.transfer.pending and self.config.staleness == 0:
            with self._guarded():
                self.transfer.land_all()

    def weights_loaded(self) -> None:
        """Called after a module's weights were loaded: they are the new masters, where they differ from the old."""
        with self._guarded():
            self._take_masters(self._overwritten())

    def _overwritten(self) -> list[OffloadedParameter]:
        return [record for record in self.registry.offloaded if record.mastered and record.overwritten]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time, without autograd; what is cut short half way poisons the engine.

        Ctrl-C in a wait may lose completions, and later waits for them would never end.
        """
        with self._lock, torch.no_grad():
            try:
                yield
            except (ZenFlowError, Warning):
                raise
            except BaseException as error:
                self.engine.poison(f"a transfer was cut short: {error!r}")
                raise

    # --- Upkeep ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for the worker and lands every move whose time has come."""
        with self._guarded():
            self.engine.check()
            self.transfer.finish()
            self.show_weights()

    def close(self) -> None:
        """Lands what is computed, takes the gates away and ends the worker."""
        with self._lock, torch.no_grad():
            try:
                self.engine.check()
                self.transfer.finish()
                self.transfer.land_all()
            except ZenFlowError:
                pass  # closed already, or failed: there is nothing left to land
            finally:
                if self.gates is not None:
                    self.gates.remove()
                self.engine.close()
                self.transfer.pending.clear()
                self.registry.release()

    def __del__(self) -> None:
        # Nobody will step any more, but the model may go on: what the last step computed has to land.
        with suppress(Exception):  # half built, or a forked child
            if not sys.is_finalizing():  # torch aborts the process if it is used then
                self.close()

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        with self._lock:
            worker = self.engine.stats()
            registry, transfer, config = self.registry, self.transfer, self.config
            wall = 0.0 if self._wall is None else self._wall[1] - self._wall[0]
            return Stats(
                steps=self._steps,
                skipped_steps=self._skipped,
                update_interval=config.update_interval,
                staleness=config.staleness,
                selected_share=registry.selected_numel / max(1, registry.offloaded_numel),
                offloaded_numel=registry.offloaded_numel,
                device_numel=registry.device_numel,
                stall_seconds=transfer.stall_seconds,
                wall_seconds=wall,
                bytes_down=transfer.bytes_down + self._exchanged_bytes[0],
                bytes_up=transfer.bytes_up + self._exchanged_bytes[1],
                host_bytes=round((4 + STATE_BYTES[config.state_dtype]) * registry.offloaded_numel),
                staging_bytes=transfer.staging_bytes,
                host_seconds=worker["busy_seconds"],
                host_elements=int(worker["elements"]),
                isa=self._pool.isa,
                threads=int(worker["threads"]),
                accelerator=self._accelerator.name,
            )

    # --- State -----------------------------------------------------------------------------------------------

    def export(self) -> dict[Tensor, StateDict]:
        """State entries by parameter; see :mod:`zenflow.checkpoint`."""
        with self._guarded():
            self._take_masters([*self.registry.small, *self._overwritten()])
            self.synchronize()
            return checkpoint.export(self.registry, self.transfer, self.engine, self.config.update_interval)

    def header(self) -> StateDict:
        """Counters that belong to no parameter."""
        return {
            "version": checkpoint.VERSION,
            "steps": self._steps,
            "skipped_steps": self._skipped,
            "update_interval": self.config.update_interval,
        }

    def fill(self, named: Sequence[Named], given: StateDict) -> None:
        """Makes the live state what a checked state dict says."""
        with self._guarded():
            self.registry.add([named[index] for index in given["state"]])
            checkpoint.fill(self.registry, self.transfer, self.engine, self.config, list(named), given)
            header = given.get(checkpoint.KEY, {})
            self._steps = int(header.get("steps", 0))
            self._skipped = int(header.get("skipped_steps", 0))
            self._dense.forget()
            self._fresh = True
