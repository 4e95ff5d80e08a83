"""CPUAdamW: AdamW (or Adam with L2 decay) for parameters in host memory, by one SIMD pass over all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._compiler import uncompiled
from ._core import Pool
from .config import Hyper, boolean, check_group, clip_norm, cores_of, state_dtype_of
from .dense_adamw import DenseGroup
from .errors import ArgumentError
from .gradients import check_parameter, step_scale
from .parameter_table import Parameters
from .state import StateDict, check_entry, load_through, update_count

__all__ = ["CPUAdamW"]

Params: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


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
        state_dtype: what the moments are kept in. ``"bfloat16"``: stochastically rounded, 4 bytes an element in place
            of 8; a bfloat16 parameter then has no fp32 master but what it lacks of one, 2 bytes. ``"int8"``: 2 bytes,
            in blocks of 256 elements with a scale each, stochastically rounded. Rounding depends on update count and
            position only. Tensors of fewer than 4,096 elements stay in fp32; ``state_dict()`` is in fp32 always.

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
        state_dtype: Literal["float32", "bfloat16", "int8"] = "float32",
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
        self._state_dtype = state_dtype_of(state_dtype)
        self._start()
        super().__init__(checked_params(params), defaults)

    def _start(self) -> None:
        self._pool = Pool(None if self._cores is None else list(self._cores))
        self._parameters = Parameters(self._pool, self._state_dtype)
        self.skipped_steps = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as ``torch.optim.Optimizer.add_param_group``."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(checked_members(param_group, self.param_groups, "CPUAdamW"))

    @uncompiled
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
        gradients = self._parameters.find(self.param_groups)
        scale = step_scale(gradients.stats, self._max_grad_norm, self._skip_nonfinite)
        if scale.void:
            self.skipped_steps += 1
            if self.skipped_steps == 1:
                warnings.warn("a step with inf or NaN gradients was skipped; see skipped_steps", stacklevel=2)
            return loss
        settings = [self._group(i, hyper, scale.scale) for i, hyper in enumerate(groups)]
        self._parameters.update(gradients, settings, self.state)
        return loss

    def _group(self, index: int, hyper: Hyper, scale: float) -> DenseGroup:
        group = self.param_groups[index]
        return hyper, -scale if group["maximize"] else scale, group["decoupled_weight_decay"]

    def state_dict(self) -> StateDict:
        """The state in the format of ``torch.optim.AdamW``; moments in fp32 whatever they are kept in.

        Where they are in fp32 its tensors are the live ones, as torch's are: save or copy them before the next step.
        """
        live = dict(self.state)
        self.state.update(self._parameters.export())
        try:
            return super().state_dict()
        finally:
            self.state.update(live)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class or of ``torch.optim.AdamW`` or ``Adam``, moments in fp32 as they are."""
        load_through(self, super().load_state_dict, state_dict, self._check_state, self._fill_state)

    def _check_state(self, state_dict: StateDict) -> None:
        for group in state_dict["param_groups"]:
            check_group(group)
        params = [param for group in self.param_groups for param in group["params"]]
        for index, entry in state_dict["state"].items():
            if not isinstance(index, int) or not 0 <= index < len(params):
                raise ArgumentError(
                    f"the state dict has an entry for {index!r}; accepted: indices of parameters"
                )
            check_entry(entry, params[index], f"parameter {index}")

    def _fill_state(self, state_dict: StateDict) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self._parameters.clear()
        for index, entry in state_dict["state"].items():
            k = update_count(entry["step"], f"parameter {index}")
            self.state[params[index]] = self._parameters.restore(params[index], entry, k)

    def __getstate__(self) -> dict[str, Any]:
        settings = {
            "_max_grad_norm": self._max_grad_norm,
            "_skip_nonfinite": self._skip_nonfinite,
            "_cores": self._cores,
            "_state_dtype": self._state_dtype,
            "state": {**self.state, **self._parameters.export()},
        }
        counts = self._parameters.counts
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
            # Copied, not kept: a copy of a weight may have another memory order than its moments.
            self.state[param] = self._parameters.restore(param, self.state[param], k)


def checked_members(
    param_group: dict[str, Any], groups: list[dict[str, Any]], optimizer: str
) -> dict[str, Any]:
    """A group that ``optimizer`` is about to add to ``groups``, its parameters as a list, each of them checked."""
    name = f"group {len(groups)}"
    if "params" not in param_group:
        raise ArgumentError(f"{name} has the keys {list(param_group)}; accepted: a dict with 'params'")
    params = param_group["params"]
    if isinstance(params, (set, frozenset)):
        raise ArgumentError(
            f"params of {name} is a {type(params).__name__}; accepted: a list, whose order stays"
        )
    members = [params] if isinstance(params, Tensor) else list(params)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in members]
    known = {id(param) for group in groups for param in group["params"]}
    for index, param in enumerate(tensors):
        check_parameter(param, f"parameter {index} of {name}", optimizer)
        if id(param) in known:
            raise ArgumentError(
                f"parameter {index} of {name} is given more than once; accepted: each parameter once"
            )
        known.add(id(param))
    return {**param_group, "params": members}


def checked_params(params: Any) -> Any:
    """``params`` as a list, refused where empty; :func:`checked_members` sees to the rest, group by group."""
    if isinstance(params, Tensor):
        raise ArgumentError(
            f"params is a {type(params).__name__}; accepted: an iterable of parameters or groups"
        )
    if isinstance(params, (set, frozenset)):
        raise ArgumentError(f"params is a {type(params).__name__}; accepted: a list, whose order stays")
    entries = list(params)
    if not entries:
        raise ArgumentError("params is empty; accepted: at least one parameter")
    return entries
