"""Gradients as a step finds them: checked before anything is changed, measured where the step asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError
from .matrix import is_dense

__all__ = [
    "DTYPES",
    "StepScale",
    "check_gradient",
    "check_parameter",
    "dense",
    "gradient_like",
    "parameter_name",
    "step_scale",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACCEPTED = "float32, bfloat16 or float16"


def check_parameter(param: object, name: str, optimizer: str) -> Tensor:
    """``param`` if the optimizer can hold it; raises :class:`ArgumentError` naming it otherwise."""
    if not isinstance(param, Tensor):
        raise ArgumentError(f"{name} is a {type(param).__name__}; accepted: a torch.Tensor")
    if param.is_complex():
        raise ArgumentError(
            f"{name} has dtype {param.dtype}; accepted: {_ACCEPTED}. Optimize torch.view_as_real of it instead"
        )
    if param.dtype not in DTYPES:
        raise ArgumentError(f"{name} has dtype {param.dtype}; accepted: {_ACCEPTED}")
    if param.layout != torch.strided:
        raise ArgumentError(f"{name} has layout {param.layout}; accepted: dense parameters (torch.strided)")
    if hasattr(param, "device_mesh"):
        raise ArgumentError(f"{name} is sharded (a DTensor); accepted by {optimizer}: whole tensors")
    if param.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on device {param.device}; accepted by {optimizer}: parameters on the CPU"
        )
    if 0 in param.stride() and any(
        s == 0 and n > 1 for s, n in zip(param.stride(), param.shape, strict=True)
    ):
        raise ArgumentError(
            f"{name} is expanded (shape {tuple(param.shape)}, strides {param.stride()}: elements share memory); "
            "accepted: parameters with memory of their own. Clone it first"
        )
    if not param.is_leaf:
        raise ArgumentError(
            f"{name} is not a leaf tensor; accepted: leaf tensors (torch can't optimize others)"
        )
    return param


def check_gradient(param: Tensor, name: str) -> Tensor | None:
    """The parameter's gradient, None where it has none; raises :class:`ArgumentError` where it can't be used."""
    grad = param.grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise ArgumentError(
            f"the gradient of {name} is sparse (layout {grad.layout}); accepted: dense gradients. "
            "Build the embedding with sparse=False"
        )
    if grad.is_complex() or grad.dtype not in DTYPES:
        raise ArgumentError(f"the gradient of {name} has dtype {grad.dtype}; accepted: {_ACCEPTED}")
    if grad.shape != param.shape:
        raise ArgumentError(
            f"the gradient of {name} has shape {tuple(grad.shape)}; accepted: the parameter's, {tuple(param.shape)}"
        )
    if grad.device != param.device:
        raise ArgumentError(
            f"the gradient of {name} is on device {grad.device}; accepted: the parameter's, {param.device}"
        )
    return grad.resolve_neg()


class StepScale:
    """What a step multiplies its gradients by, and whether it is void."""

    __slots__ = ("scale", "void")

    def __init__(self, scale: float = 1.0, void: bool = False) -> None:
        self.scale = scale
        self.void = void


def step_scale(
    stats: Callable[[], tuple[float, bool]], max_grad_norm: float | None, skip_nonfinite: bool
) -> StepScale:
    """Clip coefficient over the global norm, as ``torch.nn.utils.clip_grad_norm_`` has it, and the void flag.

    ``stats`` gives the squared norm of all gradients and whether any element is inf or NaN; it is called where one of
    the two is asked for. With ``max_grad_norm`` alone, non-finite gradients go through, as they do in torch.
    """
    if max_grad_norm is None and not skip_nonfinite:
        return StepScale()
    sum_of_squares, non_finite = stats()
    if non_finite and skip_nonfinite:
        return StepScale(void=True)
    if max_grad_norm is None:
        return StepScale()
    norm = math.nan if non_finite and math.isfinite(sum_of_squares) else math.sqrt(sum_of_squares)
    coefficient = max_grad_norm / (norm + 1e-6)
    return StepScale(scale=coefficient if not coefficient >= 1.0 else 1.0)


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` without gaps, so that its elements can be read as one run of memory."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def gradient_like(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the memory order of a dense ``param``, so that both can be walked as flat arrays."""
    if grad.stride() == param.stride() or (grad.is_contiguous() and param.is_contiguous()):
        return grad.detach()
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad.detach())


def parameter_name(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """What errors call a parameter: its name where the group has names, else its place."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index} of group {group_index}"
