"""CPUAdamW: AdamW (or Adam with L2 decay) for parameters in host memory, by one SIMD pass over all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._core import Pool
from .config import Hyper, boolean, check_group, clip_norm, cores_of
from .dense_adamw import DenseAdamW, DenseGroup, DenseState, DenseUpdate
from .errors import ArgumentError
from .gradients import (
    check_distinct,
    check_gradient,
    check_parameter,
    gradient_like,
    parameter_name,
    step_scale,
)
from .matrix import is_dense
from .state import StateDict, check_entry, load_through, step_tensor, update_count

__all__ = ["CPUAdamW"]

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class _Record:
    """A parameter's state, its exact update count, and the flat weight that the kernel writes."""

    __slots__ = ("k", "scratch", "state")

    def __init__(self, param: Tensor) -> None:
        # A weight with gaps in its memory is updated in a gapless copy.
        self.scratch = None if is_dense(param) else param.detach().contiguous()
        self.state = DenseState.new(param if self.scratch is None else self.scratch)
        self.k = 0


class CPUAdamW(Optimizer):
    r"""AdamW over fp32 states for CPU parameters in float32, bfloat16 or float16.

    With gradient :math:`g` (``float32``, ``bfloat16`` or ``float16``) and clip coefficient :math:`c`, at update
    ``k``:

    .. math::
        m &\leftarrow m + (1 - \beta_1)(c g - m) \\
        v &\leftarrow v + (1 - \beta_2)((c g)^2 - v) \\
        w &\leftarrow w - \left(\frac{lr}{1 - \beta_1^k} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^k} + eps} + lr \cdot weight\_decay \cdot w\right)

    in fp32 with fused multiply-adds and scalars rounded once from float64. The bits are the same on every
    instruction set and for any number of threads. A 16-bit parameter gets an fp32 ``master_weight``; its own value is
    the master rounded to nearest. (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101.)

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups of them with their own ``lr``, ``betas``, ``eps``,
            ``weight_decay``, ``maximize``, ``decoupled_weight_decay``.
        lr: learning rate; a float or a one-element tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decay rate.
        decoupled_weight_decay: True for AdamW; False adds the decay to the gradient (Adam with L2).
        maximize: ascend instead of descend.
        max_grad_norm: clip the global l2 norm of all gradients to this, inside the step.
        skip_nonfinite: a step with any inf or NaN in its gradients changes nothing; it is counted in
            ``skipped_steps``, and warned of once.
        cores: logical CPUs to run on; ``"auto"``: one thread on each physical core the process may use.

    Raises:
        zenflow.ArgumentError: (a ``ValueError``) for anything out of range; nothing is changed.

    Example:
        >>> optimizer = CPUAdamW(model.parameters(), lr=1e-3)
    """

    skipped_steps: int

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        cores: Any = "auto",
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
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
            "decoupled_weight_decay": boolean("decoupled_weight_decay", decoupled_weight_decay),
        }
        check_group(defaults)
        self._max_grad_norm = clip_norm(max_grad_norm)
        self._skip_nonfinite = boolean("skip_nonfinite", skip_nonfinite)
        self._cores = cores_of(cores)
        self._start()
        super().__init__(checked_params(params), defaults)

    def _start(self) -> None:
        self._pool = Pool(None if self._cores is None else list(self._cores))
        self._dense = DenseAdamW(self._pool)
        self._records: dict[Tensor, _Record] = {}
        self.skipped_steps = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as ``torch.optim.Optimizer.add_param_group``."""
        checked = {**self.defaults, **param_group}
        check_group(checked)
        params = param_group["params"]
        group = {**param_group, "params": [params] if isinstance(params, Tensor) else list(params)}
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        for index, param in enumerate(tensors):
            check_parameter(param, f"parameter {index} of group {len(self.param_groups)}", "CPUAdamW")
        super().add_param_group(group)

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: re-evaluates the model with gradients on and returns the loss.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [check_group(group) for group in self.param_groups]
        found = self._gradients()
        scale = step_scale(
            self._pool, [grad for _, grad, _ in found], self._max_grad_norm, self._skip_nonfinite
        )
        if scale.void:
            self.skipped_steps += 1
            if self.skipped_steps == 1:
                warnings.warn("a step with inf or NaN gradients was skipped; see skipped_steps", stacklevel=2)
            return loss
        self._update(found, [self._group(i, hyper, scale.scale) for i, hyper in enumerate(groups)])
        return loss

    def _gradients(self) -> list[tuple[Tensor, Tensor, int]]:
        """``(parameter, gradient, group index)`` of all that have one; checked, nothing changed."""
        found = []
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = parameter_name(group, group_index, index)
                grad = check_gradient(param, name)
                assert grad is not None
                record = self._records.get(param)
                if record is not None and changed(record.state.weight, param):
                    raise ArgumentError(
                        f"{name} was moved or changed to {tuple(param.shape)}, {param.dtype} after its first step; "
                        "accepted: the same tensor. Build the optimizer after model.to(...)"
                    )
                found.append((param, grad, group_index))
        return found

    def _group(self, index: int, hyper: Hyper, scale: float) -> DenseGroup:
        group = self.param_groups[index]
        return hyper, -scale if group["maximize"] else scale, group["decoupled_weight_decay"]

    def _update(self, found: list[tuple[Tensor, Tensor, int]], groups: list[DenseGroup]) -> None:
        updates = []
        for param, grad, group_index in found:
            record = self._record(param)
            if record.scratch is not None:
                record.scratch.copy_(param.detach())
            elif record.state.weight.data_ptr() != param.data_ptr():
                record.state.weight = param.detach()
                self._dense.forget()
            target = record.state.weight
            flat = gradient_like(target, grad)
            updates.append(DenseUpdate(record.state, flat, record.k + 1, group_index))
        self._dense.step(updates, groups)
        for param, _, _ in found:
            record = self._records[param]
            record.k += 1
            self.state[param]["step"] = step_tensor(record.k)
            if record.scratch is not None:
                param.detach().copy_(record.scratch)
        # The kernel wrote behind autograd's back: a backward that still needs the old values has to fail.
        torch.autograd.graph.increment_version([param for param, _, _ in found])

    def _record(self, param: Tensor) -> _Record:
        record = self._records.get(param)
        if record is None:
            record = self._records[param] = _Record(param)
            self._expose(param, record)
        return record

    def _expose(self, param: Tensor, record: _Record) -> None:
        entry = {
            "step": step_tensor(record.k),
            "exp_avg": record.state.exp_avg,
            "exp_avg_sq": record.state.exp_avg_sq,
        }
        if record.state.master_weight is not None:
            entry["master_weight"] = record.state.master_weight
        self.state[param] = entry

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class or of ``torch.optim.AdamW`` or ``Adam``, moments in fp32 as they are."""
        load_through(self, super().load_state_dict, state_dict, self._check_state, self._fill_state)

    def _check_state(self, state_dict: StateDict) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for index, entry in state_dict["state"].items():
            if isinstance(index, int) and index < len(params):
                check_entry(entry, params[index], f"parameter {index}")

    def _fill_state(self, state_dict: StateDict) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self._records.clear()
        self._dense.forget()
        for index, entry in state_dict["state"].items():
            param = params[index]
            record = self._records[param] = _Record(param)
            record.k = update_count(entry.get("step", 0), f"parameter {index}")
            for key in ("exp_avg", "exp_avg_sq", "master_weight"):
                target = getattr(record.state, key)
                if target is not None and key in entry:
                    target.copy_(entry[key].reshape(target.shape))
            self._expose(param, record)

    def __getstate__(self) -> dict[str, Any]:
        settings = {
            "_max_grad_norm": self._max_grad_norm,
            "_skip_nonfinite": self._skip_nonfinite,
            "_cores": self._cores,
        }
        counts = {param: record.k for param, record in self._records.items()}
        return {**super().__getstate__(), **settings, "_counts": counts, "_skipped": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        counts = state.pop("_counts", None)
        skipped = state.pop("_skipped", 0)
        super().__setstate__(state)
        if counts is None:  # torch's load_state_dict, not an unpickled or copied object
            return
        self._start()
        self.skipped_steps = skipped
        for param, k in counts.items():
            record = self._records[param] = _Record(param)
            record.k = k
            for key in ("exp_avg", "exp_avg_sq", "master_weight"):
                if key in self.state[param]:
                    setattr(record.state, key, self.state[param][key])


def changed(registered: Tensor, param: Tensor) -> bool:
    """True if ``param`` is no longer of the kind that was registered; other memory of the same kind is fine."""
    return (
        registered.dtype != param.dtype
        or registered.shape != param.shape
        or registered.device != param.device
    )


def checked_params(params: Any) -> Any:
    """``params`` as a list, refused where empty or with duplicates; torch checks the rest."""
    if isinstance(params, Tensor):
        raise ArgumentError(
            f"params is a {type(params).__name__}; accepted: an iterable of parameters or groups"
        )
    entries = list(params)
    if not entries:
        raise ArgumentError("params is empty; accepted: at least one parameter")
    tensors: list[Tensor] = []
    for entry in entries:
        given = entry["params"] if isinstance(entry, dict) else entry
        if isinstance(given, (Tensor, tuple)):
            given = [given]
        members = list(given) if not isinstance(given, list) else given
        if isinstance(entry, dict):
            entry["params"] = members
        tensors += [member[1] if isinstance(member, tuple) else member for member in members]
    places: dict[int, int] = {}
    for i, param in enumerate(tensors):
        places.setdefault(id(param), i)
    check_distinct(tensors, lambda param: f"parameter {places[id(param)]}")
    return entries
