"""ZenFlowAdamW: AdamW whose states live on the host, as a plain ``torch.optim.Optimizer``.

This room is the torch side: arguments, groups, closures, state dicts. What a step does is the pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from . import checkpoint
from ._compiler import uncompiled
from .config import Config, check_group
from .cpu_adamw import Params, checked_members, checked_params
from .errors import ArgumentError
from .gradients import check_gradient, parameter_name
from .pipeline import Named, Pipeline
from .state import StateDict, load_through, step_tensor
from .stats import Stats

__all__ = ["ZenFlowAdamW"]


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
        state_dtype: what the host keeps the two moments in, beside the fp32 master: ``"float32"``, 12 bytes of host
            memory a parameter; ``"bfloat16"``, stochastically rounded, 8 bytes; ``"int8"``, in blocks of 256 with a
            scale each, stochastically rounded, 6 bytes. Those of the selected columns are in float32 on the device.
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
        state_dtype: Literal["float32", "bfloat16", "int8"] = "float32",
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
            state_dtype=state_dtype,
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
        self._pipeline: Pipeline | None = None
        super().__init__(entries, defaults)
        if model is not None:
            self._check_owned(model)
        self._pipeline = Pipeline(config, model)
        self._register()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as ``torch.optim.Optimizer.add_param_group``: also later, as layers are unfrozen."""
        _check_defaults({**self.defaults, **param_group})
        super().add_param_group(checked_members(param_group, self.param_groups, "ZenFlowAdamW"))
        if self._pipeline is not None:
            self._register()

    def _register(self) -> None:
        self._engine_room.registry.add([entry for entry in self._named() if entry[0].requires_grad])

    def _check_owned(self, model: nn.Module) -> None:
        owned = {id(param) for param in model.parameters()}
        for param, name, _ in self._named():
            if id(param) not in owned:
                raise ArgumentError(
                    f"model doesn't own {name}; accepted: the module whose parameters are optimized"
                )

    def _named(self) -> list[Named]:
        return [
            (param, parameter_name(group, group_index, index), group_index)
            for group_index, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]

    @property
    def _engine_room(self) -> Pipeline:
        assert self._pipeline is not None
        return self._pipeline

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
        pipeline = self._engine_room
        pipeline.engine.check()
        hypers = [check_group(group) for group in self.param_groups]
        found: list[tuple[Named, Tensor]] = []
        for entry in self._named():
            grad = check_gradient(entry[0], entry[1])
            if grad is not None:
                pipeline.registry.check_unmoved(entry[0], entry[1])
                found.append((entry, grad))
        pipeline.step(found, hypers, [-1.0 if group["maximize"] else 1.0 for group in self.param_groups])
        for (param, _, _), _ in found:
            # Frameworks take an empty `state` for an optimizer that never stepped.
            self.state[param].setdefault("step", step_tensor(1))
        return loss

    def synchronize(self) -> None:
        """Waits for the host and lands every move whose time has come (with ``staleness=0``: every one).

        Call it before reading ``state`` or weights in ways that no module's forward shows: averaging models,
        ``p.data``, copies for an inference engine. ``state_dict()`` calls it by itself.
        """
        self._engine_room.synchronize()

    def stats(self) -> Stats:
        """Counters since construction; costs microseconds and waits for nothing."""
        return self._engine_room.stats()

    def close(self) -> None:
        """Lands what is computed, ends the worker and takes the gates off the model; idempotent.

        The weights stay as they are; a later ``step()`` raises :class:`zenflow.EngineClosedError`.
        """
        self._engine_room.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> StateDict:
        """The state in the format of ``torch.optim.AdamW``, with what is needed to go on bit for bit.

        Tensors are views of the live state where they can be, as torch's are: save or copy them before the next
        step.
        """
        self.state.clear()
        self.state.update(self._engine_room.export())
        state_dict = {**super().state_dict(), checkpoint.KEY: self._engine_room.header()}
        # Between steps `state` says only that there is one: views would let a forked child reach what it doesn't have.
        for param, entry in self.state.items():
            self.state[param] = {"step": entry["step"]}
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class or of ``torch.optim.AdamW`` (then masters are taken from the weights).

        Load the model's weights first.
        """
        pipeline = self._engine_room
        pipeline.engine.check()
        load_through(
            self,
            super().load_state_dict,
            state_dict,
            self._check_state,
            lambda given: pipeline.fill(self._named(), given),
        )

    def _check_state(self, given: StateDict) -> None:
        for group in given["param_groups"]:
            _check_defaults(group)
        checkpoint.check(self._named(), given)

    def __getstate__(self) -> dict[str, Any]:
        saved = self.state_dict()
        return {**super().__getstate__(), "state": {}, checkpoint.KEY: (self._engine_room.config, saved)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop(checkpoint.KEY, None)
        super().__setstate__(state)
        if saved is not None:  # an unpickled or copied object; torch's load_state_dict comes here too
            config, state_dict = saved
            self._pipeline = Pipeline(config, None)
            self._register()
            self.load_state_dict(state_dict)


def _check_defaults(group: dict[str, Any]) -> None:
    check_group(group)
    if not group.get("decoupled_weight_decay", True):
        raise ArgumentError(
            f"decoupled_weight_decay is {group['decoupled_weight_decay']!r}; accepted: True. L2 decay enters the "
            "gradient through the weight, which the host doesn't have for selected columns; CPUAdamW offers it"
        )
