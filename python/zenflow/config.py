"""The optimizer's settings: one frozen, validated record, made once and read everywhere.

Every check names the argument, the value it got and what is accepted, and runs before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from .errors import ArgumentError

__all__ = [
    "STATE_BYTES",
    "Config",
    "Hyper",
    "boolean",
    "check_group",
    "clip_norm",
    "cores_of",
    "integer",
    "number",
    "state_dtype_of",
]

# (lr, beta1, beta2, eps, weight_decay), as the core takes them.
Hyper = tuple[float, float, float, float, float]

#: Bytes of both moments of one element, by ``state_dtype``; int8 has two fp32 scales a block of 256.
STATE_BYTES = {"float32": 8.0, "bfloat16": 4.0, "int8": 2.0 + 8 / 256}

# Group keys of torch.optim.AdamW that name other ways to run the same algorithm, or another algorithm.
_REFUSED = {
    "amsgrad": "the running maximum of exp_avg_sq is not kept",
    "foreach": "the kernels already take all tensors together",
    "fused": "the kernels are already fused",
    "capturable": "the step runs partly on the host and can't be captured in a graph",
    "differentiable": "the kernels record no autograd graph",
}


def _refuse(name: str, value: object, accepted: str) -> ArgumentError:
    return ArgumentError(f"{name} is {value!r}; accepted: {accepted}")


def number(name: str, value: Any, accepted: str, low: float = 0.0, high: float = math.inf) -> float:
    """``value`` as a float within ``[low, high]``, finite; one-element tensors are taken, as torch takes them."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise _refuse(name, tuple(value.shape), accepted)
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, value, accepted)
    result = float(value)
    if not math.isfinite(result) or not low <= result <= high:
        raise _refuse(name, value, accepted)
    return result


def integer(name: str, value: Any, low: int, accepted: str) -> int:
    """``value`` as an int of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
        raise _refuse(name, value, accepted)
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def cores_of(value: Any) -> tuple[int, ...] | None:
    """Logical CPUs from ``"auto"`` (None), a number of cores, or a sequence of CPU indices."""
    accepted = 'distinct CPU indices such as (1, 2, 3), or "auto"'
    if isinstance(value, str):
        if value != "auto":
            raise _refuse("cores", value, accepted)
        return None
    if not isinstance(value, Sequence) or not value:
        raise _refuse("cores", value, accepted)
    cores = tuple(integer("cores", core, 0, accepted) for core in value)
    if len(set(cores)) != len(cores):
        raise _refuse("cores", value, accepted)
    return cores


def check_group(group: Mapping[str, Any]) -> Hyper:
    """The hyper-parameters of a parameter group; raises :class:`ArgumentError` where one is out of range."""
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise _refuse("betas", betas, "two numbers in [0, 1)")
    below_one = math.nextafter(1.0, 0.0)
    for key, why in _REFUSED.items():
        if group.get(key):
            raise _refuse(key, group[key], f"False or None ({why})")
    for key, usual in (("maximize", False), ("decoupled_weight_decay", True)):
        boolean(key, group.get(key, usual))
    return (
        number("lr", group["lr"], "a finite number of 0 or more"),
        number("betas[0]", betas[0], "a number in [0, 1)", high=below_one),
        number("betas[1]", betas[1], "a number in [0, 1)", high=below_one),
        number("eps", group["eps"], "a finite number of 0 or more"),
        number("weight_decay", group["weight_decay"], "a finite number of 0 or more"),
    )


def clip_norm(value: Any) -> float | None:
    """``max_grad_norm`` as a positive float, or None."""
    accepted = "a finite number above 0, or None"
    if value is None:
        return None
    result = number("max_grad_norm", value, accepted)
    if result == 0.0:
        raise _refuse("max_grad_norm", value, accepted)
    return result


def state_dtype_of(value: Any) -> str:
    """``state_dtype`` as the core takes it: a name, or the torch dtype of that name."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if name not in STATE_BYTES:
        raise _refuse("state_dtype", value, '"float32", "bfloat16" or "int8"')
    return str(name)


@dataclass(frozen=True)
class Config:
    """Settings of :class:`zenflow.ZenFlowAdamW`; its docstring explains each."""

    topk_ratio: float = 0.1
    update_interval: int = 4
    staleness: int = 0
    select_interval: int = 16
    full_warm_up_rounds: int = 0
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    min_offload_numel: int = 16_384
    bucket_numel: int = 16 * 1024 * 1024
    max_staging_bytes: int = 1 << 30
    cores: tuple[int, ...] | None = None
    state_dtype: str = "float32"

    @classmethod
    def checked(cls, **settings: Any) -> Config:
        """A configuration from arguments as a user gives them."""
        staleness = settings["staleness"]
        if isinstance(staleness, bool) or staleness not in (0, 1):
            raise _refuse("staleness", staleness, "0 or 1")
        return cls(
            topk_ratio=number("topk_ratio", settings["topk_ratio"], "a number in [0, 1]", high=1.0),
            update_interval=integer(
                "update_interval", settings["update_interval"], 1, "an integer of 1 or more (steps)"
            ),
            staleness=int(staleness),
            select_interval=integer(
                "select_interval", settings["select_interval"], 1, "an integer of 1 or more (steps)"
            ),
            full_warm_up_rounds=integer(
                "full_warm_up_rounds", settings["full_warm_up_rounds"], 0, "an integer of 0 or more (steps)"
            ),
            max_grad_norm=clip_norm(settings["max_grad_norm"]),
            skip_nonfinite=boolean("skip_nonfinite", settings["skip_nonfinite"]),
            min_offload_numel=integer(
                "min_offload_numel", settings["min_offload_numel"], 0, "an integer of 0 or more (elements)"
            ),
            bucket_numel=integer(
                "bucket_numel", settings["bucket_numel"], 1024, "an integer of 1024 or more (elements)"
            ),
            max_staging_bytes=integer(
                "max_staging_bytes", settings["max_staging_bytes"], 1, "an integer of 1 or more (bytes)"
            ),
            cores=cores_of(settings["cores"]),
            state_dtype=state_dtype_of(settings["state_dtype"]),
        )
