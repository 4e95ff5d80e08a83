"""ZenFlowAdamW: AdamW whose states live on the host, as a plain ``torch.optim.Optimizer``.

This room composes the others: who is offloaded and in which buckets (``registry``), what a step does in which order
(here), the way of the gradients and weights (``transfer``), gates, checkpoints.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import checkpoint
from ._core import Engine, Pool
from .accelerator import accelerator_for
from .config import Config, Hyper, check_group
from .cpu_adamw import Params, checked_params
from .dense_adamw import DenseAdamW, DenseGroup, DenseUpdate
from .errors import ArgumentError, ZenFlowError
from .gate import Gate, Gates
from .gradients import check_gradient, check_parameter, gradient_like, parameter_name, step_scale
from .parameters import Bucket, OffloadedParameter
from .registry import Registry, SmallParameter
from .schedule import closes, selects, steps_to_close, warming_up
from .selection import column_energy, selected_count, top_columns, update_importance
from .state import StateDict, load_through
from .stats import Stats
from .transfer import ABSENT, CLOSE, MOMENTS, Transfer

__all__ = ["ZenFlowAdamW"]

_Work = list[tuple["OffloadedParameter | SmallParameter", Tensor]]


class ZenFlowAdamW(Optimizer):
    r"""AdamW with fp32 masters and moments in host memory, updated behind the device's own work.

    Of a weight ``[out, in]`` the ``topk_ratio`` most important columns (input channels) move at every step, on the
    device. All others are *deferred*: every gradient enters their moments at its own step, on the host, and the
    weight moves every ``S = update_interval`` steps by all that is pending, a stripe of 1/S of the rows at a time:

    .. math::
        m &\leftarrow m + (1 - \beta_1)(c g - m), \quad v \leftarrow v + (1 - \beta_2)((c g)^2 - v)
            && \text{every step} \\
        L &\leftarrow L + lr, \quad P \leftarrow P (1 - lr \cdot weight\_decay) && \text{every step} \\
        w &\leftarrow P w - L \hat m / (\sqrt{\hat v} + eps), \quad L \leftarrow 0, P \leftarrow 1
            && \text{every S steps}

    with :math:`\hat m, \hat v` bias-corrected as in AdamW and ``c`` the clip coefficient. With ``update_interval=1``
    and ``staleness=0`` this is AdamW. What is visible when depends on the step number alone, never on timing.

    Parameters with fewer than two dimensions or than ``min_offload_numel`` elements stay on the device side and are
    plain AdamW. (After ZenFlow, Lan et al., arXiv 2505.12242, whose windows land late and whose moments lag.)

    Args:
        params: a module (then ``model`` too), parameters, ``(name, parameter)`` pairs, or groups of them with their
            own ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize``.
        lr: learning rate; a float or a one-element tensor, read at each step.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay rate.
        model: the module that owns the parameters. With it, new weights land just before the forward of the block
            that reads them; without it ``step()`` waits for them.
        topk_ratio: share of columns that move every step, in [0, 1].
        update_interval: steps between two moves of a deferred element, S.
        staleness: 0: a move is visible to the very next forward. 1: to the one after it, for hosts too slow for 0.
        select_interval: steps between two choices of a parameter's columns.
        full_warm_up_rounds: so many first steps are plain AdamW for all columns.
        max_grad_norm: clip the global l2 norm of all gradients to this, inside the step.
        skip_nonfinite: a step with any inf or NaN in its gradients changes nothing; see ``stats().skipped_steps``.
        min_offload_numel: parameters with fewer elements stay on the device side.
        bucket_numel: most elements that travel and are worked on together.
        max_staging_bytes: bound of the staging memory, both directions together. A step that finds it full waits.
        cores: logical CPUs of the host's worker; ``"auto"``: one thread on each physical core but one.
        maximize: ascend instead of descend.

    Raises:
        zenflow.ArgumentError: (a ``ValueError``) for anything out of range; nothing is changed.
        zenflow.HostMemoryError: (a ``MemoryError``) if host memory runs out; says how much was wanted for what.

    Example:
        >>> optimizer = ZenFlowAdamW(model, lr=2e-5, topk_ratio=0.1, update_interval=4)
        >>> loss = model(batch).loss
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: nn.Module | Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        model: nn.Module | None = None,
        topk_ratio: float = 0.1,
        update_interval: int = 4,
        staleness: int = 0,
        select_interval: int = 16,
        full_warm_up_rounds: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        min_offload_numel: int = 16_384,
        bucket_numel: int = 16 * 1024 * 1024,
        max_staging_bytes: int = 1 << 30,
        cores: Any = "auto",
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        config = Config.checked(
            topk_ratio=topk_ratio,
            update_interval=update_interval,
            staleness=staleness,
            select_interval=select_interval,
            full_warm_up_rounds=full_warm_up_rounds,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            min_offload_numel=min_offload_numel,
            bucket_numel=bucket_numel,
            max_staging_bytes=max_staging_bytes,
            cores=cores,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        _check_defaults(defaults)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ArgumentError("model is another module than params; accepted: the same, or None")
            model = params
            params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        if model is not None and not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}; accepted: a torch.nn.Module or None")
        entries = checked_params(params)
        self._registry: Registry | None = None
        super().__init__(entries, defaults)
        if model is not None:
            self._check_owned(model)
        self._start(config, model)

    def _start(self, config: Config, model: nn.Module | None) -> None:
        accelerator = accelerator_for("cpu")
        assert accelerator is not None
        cores = None if config.cores is None else list(config.cores)
        self._config = config
        self._lock = threading.RLock()
        self._accelerator = accelerator
        self._engine = Engine(cores)
        self._pool = Pool()
        self._dense = DenseAdamW(self._pool)
        self._transfer = Transfer(self._engine, accelerator, config)
        self._gates = None if model is None else Gates(self, model)
        self._registry = Registry(self._engine, self._transfer, self._gates, config)
        self._steps = self._skipped = 0
        self._wall: tuple[float, float] | None = None
        self._exchanged_bytes = [0, 0]
        self._fresh = False
        self._register([param for group in self.param_groups for param in group["params"] if param.requires_grad])

    # --- Parameters ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as ``torch.optim.Optimizer.add_param_group``: also later, as layers are unfrozen."""
        _check_defaults({**self.defaults, **param_group})
        params = param_group["params"]
        group = {**param_group, "params": [params] if isinstance(params, Tensor) else list(params)}
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        for index, param in enumerate(tensors):
            check_parameter(param, f"parameter {index} of group {len(self.param_groups)}", "ZenFlowAdamW")
        super().add_param_group(group)
        if self._registry is not None:
            self._register([param for param in tensors if param.requires_grad])

    def _check_owned(self, model: nn.Module) -> None:
        owned = {id(param) for param in model.parameters()}
        for param, name, _ in self._named():
            if id(param) not in owned:
                raise ArgumentError(f"model doesn't own {name}; accepted: the module whose parameters are optimized")

    def _named(self) -> list[tuple[Tensor, str, int]]:
        return [
            (param, parameter_name(group, group_index, index), group_index)
            for group_index, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]

    def _register(self, params: list[Tensor]) -> None:
        assert self._registry is not None
        wanted = {id(param) for param in params}
        self._registry.add([entry for entry in self._named() if id(entry[0]) in wanted])

    @property
    def _records(self) -> Registry:
        assert self._registry is not None
        return self._registry

    # --- The step --------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Deferred stripes that move in this step become visible just before their module's next forward, or here if
        the optimizer doesn't know the model.

        Args:
            closure: re-evaluates the model with gradients on and returns the loss.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock, torch.no_grad():
            self._engine.check()
            start = self._accelerator.clock()
            hypers = [check_group(group) for group in self.param_groups]
            work = self._sweep()
            grads = [grad for _, grad in work]
            scale = step_scale(self._pool, grads, self._config.max_grad_norm, self._config.skip_nonfinite)
            if scale.void:
                self._skip()
            else:
                try:
                    self._update(work, hypers, scale.scale)
                except BaseException as error:
                    # Half a step can't be taken back.
                    self._engine.poison(f"a step failed half way: {error}")
                    raise
            first = start if self._wall is None else self._wall[0]
            self._wall = first, self._accelerator.clock()
        return loss

    def _skip(self) -> None:
        self._skipped += 1
        if self._skipped == 1:
            warnings.warn("a step with inf or NaN gradients was skipped; see stats().skipped_steps", stacklevel=4)

    def _sweep(self) -> _Work:
        """The parameters that have a gradient, with it: checked, nothing changed."""
        found = []
        for param, name, _ in self._named():
            if param.grad is None:
                continue
            grad = check_gradient(param, name)
            assert grad is not None
            self._records.check_unmoved(param, name)
            found.append((param, grad))
        self._register([param for param, _ in found if param not in self._records])
        return [(self._records[param], grad) for param, grad in found]

    def _update(self, work: _Work, hypers: list[Hyper], scale: float) -> None:
        offloaded = {record: record.matrix.of(grad) for record, grad in work if isinstance(record, OffloadedParameter)}
        self._distrust_gates(offloaded)
        self._take_masters(work)
        self._transfer.land_all()
        for record in offloaded:
            self._exchange(record)
            self._weigh(record, offloaded[record], scale)
        self._update_device(work, offloaded, hypers, scale)
        self._defer(offloaded, hypers, scale)
        self._fresh = False
        self._steps += 1

    def _take_masters(self, work: _Work) -> None:
        """Takes weights for masters: at a parameter's first step, and where someone else wrote into it."""
        for record, _ in work:
            if isinstance(record, SmallParameter):
                record.adopt()
            elif not record.mastered or record.param._version != record.version:
                self._forget_pending(record)
                self._records.adopt(record)

    def _exchange(self, record: OffloadedParameter) -> None:
        if record.chosen is not None:
            self._transfer.finish(bucket.engine_id for bucket, _ in record.segments)
            down, up = self._records.exchange(record, record.chosen)
            self._exchanged_bytes[0] += down
            self._exchanged_bytes[1] += up
            record.chosen = None

    def _weigh(self, record: OffloadedParameter, grad: Tensor, scale: float) -> None:
        """Counts the gradient into the columns' importance; makes the first choice."""
        count = selected_count(record.matrix.cols, self._config.topk_ratio)
        if not count:
            return
        record.importance = update_importance(record.importance, column_energy(grad, scale))
        if record.columns is None:
            record.chosen = top_columns(record.importance, count)
            self._exchange(record)

    def _update_device(
        self, work: _Work, offloaded: dict[OffloadedParameter, Tensor], hypers: list[Hyper], scale: float
    ) -> None:
        """AdamW on the selected columns and the small parameters, in one parallel region."""
        updates = []
        for record, grad in work:
            if isinstance(record, SmallParameter):
                record.k += 1
                updates.append(DenseUpdate(record.state, gradient_like(record.state.weight, grad), record.k, record.group))
                continue
            record.k += 1
            if record.columns is not None:
                part = offloaded[record].index_select(1, record.columns.columns)
                updates.append(DenseUpdate(record.columns.state, part, record.k, record.group))
        groups: list[DenseGroup] = [(hyper, self._signed(i, scale), True) for i, hyper in enumerate(hypers)]
        self._dense.step(updates, groups)
        for record, _ in work:
            if isinstance(record, SmallParameter):
                record.written()
            elif record.columns is not None:
                record.matrix.write_columns(record.columns.columns, record.columns.state.weight)
                record.version = record.param._version

    def _signed(self, group: int, scale: float) -> float:
        return -scale if self.param_groups[group]["maximize"] else scale

    def _defer(self, offloaded: dict[OffloadedParameter, Tensor], hypers: list[Hyper], scale: float) -> None:
        """Sends all gradients down: closing buckets first, in forward order, then those that close soonest."""
        config = self._config
        whole = {record for record in offloaded if self._closes_whole(record)}
        urgent: list[tuple[Bucket, bytes]] = []
        background: list[tuple[int, Bucket, bytes]] = []
        for bucket in self._records.buckets:
            actions = bytearray()
            for segment in bucket.segments:
                record = segment.parameter
                if record not in offloaded:
                    actions.append(ABSENT)
                elif record in whole or closes(record.k, bucket.phase, config.update_interval):
                    actions.append(CLOSE)
                else:
                    actions.append(MOMENTS)
            if CLOSE in actions:
                urgent.append((bucket, bytes(actions)))
            elif any(actions):
                k = max(segment.parameter.k for segment in bucket.segments)
                wait = steps_to_close(k, bucket.phase, config.update_interval)
                background.append((wait, bucket, bytes(actions)))
        background.sort(key=lambda entry: entry[0])
        for bucket, actions in urgent + [(bucket, actions) for _, bucket, actions in background]:
            signed = self._signed(bucket.group, scale)
            self._transfer.submit(bucket, actions, offloaded, hypers[bucket.group], signed)
        for record in offloaded:
            if record.columns is not None and selects(record.k, record.index, config.select_interval):
                assert record.importance is not None
                record.chosen = top_columns(record.importance, record.columns.columns.numel())
        self._land_ungated(urgent)

    def _closes_whole(self, record: OffloadedParameter) -> bool:
        """True where every stripe of the parameter closes: in the warm-up, and before its columns change owner."""
        if warming_up(record.k, self._config.full_warm_up_rounds):
            return True
        changes = record.columns is not None and selects(record.k, record.index, self._config.select_interval)
        return changes and record.columns is not None and record.columns.columns.numel() < record.matrix.cols

    def _land_ungated(self, urgent: list[tuple[Bucket, bytes]]) -> None:
        """Lands here what no gate will land in time."""
        config = self._config
        for bucket, _ in urgent:
            warm = any(warming_up(s.parameter.k, config.full_warm_up_rounds) for s in bucket.segments)
            gated = self._gates is not None and any(self._gates.gates[i].trusted for i in bucket.gates)
            if warm or (config.staleness == 0 and not gated):
                self._transfer.land([bucket.engine_id])

    # --- Gates -----------------------------------------------------------------------------------------------

    def _distrust_gates(self, offloaded: dict[OffloadedParameter, Tensor]) -> None:
        """A parameter got a gradient, but no gate of it fired: its module was used without being called."""
        if self._gates is None:
            return
        gates = self._gates.gates
        for record in offloaded:
            if any(gates[i].fired for i in record.gates) or not any(gates[i].trusted for i in record.gates):
                continue
            first = gates[record.gates[0]]
            warnings.warn(
                f"{record.name} had a gradient, but {first.name} was not called since the last step; "
                "its new weights land in step() from now on, which then waits for them",
                stacklevel=5,
            )
            for i in record.gates:
                gates[i].trusted = False
        for gate in gates:
            gate.fired = False

    def pass_gate(self, gate: Gate) -> None:
        """Called by a gate before its module's forward: lands what the module is about to read."""
        if self._transfer.pending and self._config.staleness == 0:
            with self._lock, torch.no_grad():
                self._transfer.land(gate.buckets)

    def show_weights(self) -> None:
        """Lands everything whose time has come."""
        if self._transfer.pending and self._config.staleness == 0:
            with self._lock, torch.no_grad():
                self._transfer.land_all()

    def weights_loaded(self) -> None:
        """Called after a module's weights were loaded: they are the new masters, where they differ from the old."""
        with self._lock, torch.no_grad():
            for record in self._records.offloaded:
                if record.mastered and record.param._version != record.version:
                    self._forget_pending(record)
                    self._records.adopt(record)

    def _forget_pending(self, record: OffloadedParameter) -> None:
        # Just after a state dict, late stripes belong to the very weights that are being loaded.
        if not self._fresh:
            self._transfer.discard(record)

    # --- Upkeep ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for the host and lands every move whose time has come (with ``staleness=0``: every one).

        Call it before reading ``state`` or weights in ways that no module's forward shows: averaging models,
        ``p.data``, copies for an inference engine. ``state_dict()`` calls it by itself.
        """
        with self._lock, torch.no_grad():
            self._engine.check()
            self._transfer.finish()
            self.show_weights()

    def stats(self) -> Stats:
        """Counters since construction; costs microseconds and waits for nothing."""
        with self._lock:
            worker = self._engine.stats()
            registry, transfer, config = self._records, self._transfer, self._config
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
                host_bytes=12 * registry.offloaded_numel,
                staging_bytes=transfer.staging_bytes,
                host_seconds=worker["busy_seconds"],
                host_elements=int(worker["elements"]),
                isa=self._pool.isa,
                threads=int(worker["threads"]),
                accelerator=self._accelerator.name,
            )

    def close(self) -> None:
        """Lands what is computed, ends the worker and takes the gates off the model; idempotent.

        The weights stay as they are; a later ``step()`` raises :class:`zenflow.EngineClosedError`.
        """
        with self._lock, torch.no_grad():
            try:
                self._engine.check()
                self._transfer.finish()
                self._transfer.land_all()
            except ZenFlowError:
                pass  # closed already, or failed: there is nothing left to land
            finally:
                if self._gates is not None:
                    self._gates.remove()
                self._engine.close()

    def __enter__(self) -> ZenFlowAdamW:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- State -----------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """The state in the format of ``torch.optim.AdamW``, with what is needed to go on bit for bit.

        Tensors are views of the live state where they can be, as torch's are: save or copy them before the next
        step.
        """
        with self._lock, torch.no_grad():
            self.synchronize()
            self.state.clear()
            self.state.update(checkpoint.export(self._records, self._transfer, self._engine, self._config.update_interval))
            state_dict = super().state_dict()
            state_dict[checkpoint.KEY] = {
                "version": checkpoint.VERSION,
                "steps": self._steps,
                "skipped_steps": self._skipped,
                "update_interval": self._config.update_interval,
            }
            return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class or of ``torch.optim.AdamW`` (then masters are taken from the weights).

        Load the model's weights first.
        """
        with self._lock, torch.no_grad():
            self._engine.check()
            load_through(self, super().load_state_dict, state_dict, self._check_state, self._fill_state)

    def _check_state(self, given: StateDict) -> None:
        params, names = zip(*[(param, name) for param, name, _ in self._named()], strict=True)
        checkpoint.check(list(params), list(names), given)

    def _fill_state(self, given: StateDict) -> None:
        named = self._named()
        self._register([named[index][0] for index in given["state"] if named[index][0] not in self._records])
        interval = self._config.update_interval
        checkpoint.fill(self._records, self._transfer, self._engine, interval, named, given)
        header = given.get(checkpoint.KEY, {})
        self._steps = int(header.get("steps", 0))
        self._skipped = int(header.get("skipped_steps", 0))
        self._fresh = True

    def __getstate__(self) -> dict[str, Any]:
        base = super().__getstate__()
        return {**base, "state": {}, checkpoint.KEY: (self._config, self.state_dict())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop(checkpoint.KEY, None)
        super().__setstate__(state)
        if saved is not None:  # an unpickled or copied object; torch's load_state_dict comes here too
            config, state_dict = saved
            self._start(config, None)
            self.load_state_dict(state_dict)


def _check_defaults(group: dict[str, Any]) -> None:
    check_group(group)
    if not group.get("decoupled_weight_decay", True):
        raise ArgumentError(
            f"decoupled_weight_decay is {group['decoupled_weight_decay']!r}; accepted: True. L2 decay enters the "
            "gradient through the weight, which the host doesn't have for selected columns; CPUAdamW offers it"
        )
