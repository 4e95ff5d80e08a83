"""The oracles and small tools of the tests.

The oracles know nothing of zenflow: float64 NumPy, written from the papers' equations, and ``torch.optim``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Float64 = NDArray[np.float64]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: ``Tensor.grad_dtype`` lets a gradient have another dtype than its parameter.
HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")

#: Makes an optimizer from parameters or groups and options.
Make = Callable[..., torch.optim.Optimizer]


def as64(tensor: Tensor) -> Float64:
    """A copy in float64."""
    return tensor.detach().double().numpy().copy()


class Adam64:
    """AdamW (or Adam with L2 decay) in float64, one parameter, one step at a time."""

    def __init__(self, weight: Tensor, *, decoupled: bool = True, maximize: bool = False) -> None:
        self.start = as64(weight)
        self.weight = self.start.copy()
        self.exp_avg = np.zeros_like(self.weight)
        self.exp_avg_sq = np.zeros_like(self.weight)
        self.decoupled = decoupled
        self.maximize = maximize
        self.k = 0

    def moments(self, grad: Tensor | Float64, betas: tuple[float, float], scale: float = 1.0) -> None:
        """Lets one gradient into the moments."""
        gradient = scale * (as64(grad) if isinstance(grad, Tensor) else grad)
        if self.maximize:
            gradient = -gradient
        self.k += 1
        self.exp_avg = betas[0] * self.exp_avg + (1 - betas[0]) * gradient
        self.exp_avg_sq = betas[1] * self.exp_avg_sq + (1 - betas[1]) * gradient**2

    def direction(self, betas: tuple[float, float], eps: float) -> Float64:
        """The bias-corrected step, without the learning rate."""
        # expm1 keeps 1 - beta^k exact to the last bits also for betas next to 1.
        first, second = (-math.expm1(self.k * math.log(beta)) if beta else 1.0 for beta in betas)
        return (self.exp_avg / first) / (np.sqrt(self.exp_avg_sq / second) + eps)

    def step(
        self,
        grad: Tensor,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        scale: float = 1.0,
    ) -> None:
        """One update."""
        gradient = scale * as64(grad)
        if not self.decoupled:
            sign = -1.0 if self.maximize else 1.0
            gradient = gradient + sign * weight_decay * self.weight
        else:
            self.weight = self.weight * (1 - lr * weight_decay)
        self.moments(gradient, betas)
        self.weight = self.weight - lr * self.direction(betas, eps)

    def error(self, weight: Tensor) -> float:
        """``||weight - oracle|| / ||oracle - start||``: what the update is wrong by, relative to itself."""
        moved = np.linalg.norm(self.weight - self.start)
        return float(np.linalg.norm(as64(weight) - self.weight) / moved) if moved else 0.0


class Deferred64(Adam64):
    """ZenFlow's rule in float64 with no column selected: row ``r`` of ``R`` lies in stripe ``j`` of ``S``."""

    def __init__(self, weight: Tensor, update_interval: int, **options: Any) -> None:
        super().__init__(weight, **options)
        self.interval = update_interval
        rows = self.weight.shape[0]
        # Stripe j ends where j/S of the rows end, rounded half up.
        cuts = [math.floor(j * rows / update_interval + 0.5) for j in range(update_interval + 1)]
        self.stripes = [slice(cuts[j], cuts[j + 1]) for j in range(update_interval)]
        self.lr_sum = [0.0] * update_interval
        self.kept = [1.0] * update_interval

    def step(
        self,
        grad: Tensor,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        scale: float = 1.0,
    ) -> None:
        """One update of the moments; the stripes whose turn it is move."""
        self.moments(grad, betas, scale)
        direction = self.direction(betas, eps)
        for phase, rows in enumerate(self.stripes):
            self.lr_sum[phase] += lr
            self.kept[phase] *= 1 - lr * weight_decay
            if (self.k + phase) % self.interval == 0:
                self.weight[rows] = (
                    self.kept[phase] * self.weight[rows] - self.lr_sum[phase] * direction[rows]
                )
                self.lr_sum[phase], self.kept[phase] = 0.0, 1.0


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, as contiguous integers in logical order."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().contiguous()
    if flat.ndim == 0:
        flat = flat.reshape(1)
    return flat.view(kinds[flat.element_size()])


def assert_same_bits(got: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Every bit equal, the sign of zeros and the payload of NaNs included."""
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, not {tuple(expected.shape)}"
    differ = bits(got) != bits(expected)
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} elements differ"


def assert_same_state(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    keys: Sequence[str] = ("step", "exp_avg", "exp_avg_sq", "master_weight"),
) -> None:
    """Two state dicts have the same entries under ``keys``, bit for bit, where the expected one has them."""
    assert got["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        for key in keys:
            if key in entry:
                mine = got["state"][index][key].reshape(entry[key].shape)
                assert_same_bits(mine, entry[key], f"{key} of parameter {index}")


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """A copy of all that a void step or a refused call must leave alone: weights, states, counters, groups.

    Compare two with :func:`assert_unchanged`. What is pending in the engine is in the state dict, and once more as
    the engine itself has it.
    """
    weights = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group.pop("lr")  # tests change it on purpose
    return weights, state, progress(optimizer)


def progress(optimizer: Any) -> list[Any]:
    """``(k, L, 1 - P)`` of every segment, as the engine of a ZenFlowAdamW counts them; empty for others."""
    pipeline = getattr(optimizer, "_pipeline", None)
    if pipeline is None:
        return []
    return [pipeline.engine.progress(bucket.engine_id) for bucket in pipeline.registry.buckets]


def assert_unchanged(before: Any, optimizer: torch.optim.Optimizer) -> None:
    """Every byte of ``before`` (a :func:`snapshot`) is as it was."""
    _assert_equal(snapshot(optimizer), before, "snapshot")


def _assert_equal(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert_same_bits(got, expected, where)
    elif isinstance(expected, Mapping):
        counters = {"skipped_steps"}
        assert got.keys() == expected.keys(), where
        for key in expected.keys() - counters:
            _assert_equal(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            _assert_equal(mine, theirs, f"{where}[{i}]")
    else:
        assert got == expected or got is expected, f"{where}: {got!r}, not {expected!r}"


def parameters(
    shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 1, scale: float = 0.02
) -> list[nn.Parameter]:
    """Parameters of these shapes; the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter((scale * torch.randn(tuple(shape), generator=generator)).to(dtype)) for shape in shapes
    ]


def gradients(params: Sequence[Tensor], step: int, seed: int = 7, scale: float = 1e-2) -> list[Tensor]:
    """Gradients that depend on the step alone, never on the weights; some elements of each are exactly zero."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    grads = []
    for param in params:
        grad = scale * torch.randn(param.shape, generator=generator)
        grad = torch.where(torch.rand(param.shape, generator=generator) < 0.05, 0.0, grad)
        grads.append(grad.to(param.dtype))
    return grads


def set_gradients(params: Sequence[Tensor], step: int, **options: Any) -> None:
    """Puts :func:`gradients` into ``.grad``."""
    for param, grad in zip(params, gradients(params, step, **options), strict=True):
        param.grad = torch.empty_like(param).copy_(grad)


def backward(params: Sequence[Tensor], step: int, factor: float = 1.0, **options: Any) -> Tensor:
    """A real backward whose gradients are ``factor`` times :func:`gradients`; returns the loss."""
    grads = gradients(params, step, **options)
    loss = sum(
        ((param * grad).sum() for param, grad in zip(params, grads, strict=True)), start=torch.zeros(())
    )
    (factor * loss).backward()
    return loss.detach()


def run(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int], **options: Any
) -> None:
    """The plainest loop."""
    for step in steps:
        set_gradients(params, step, **options)
        optimizer.step()
        optimizer.zero_grad()


def update_error(got: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """``||got - expected|| / ||expected - start||`` over all parameters together."""
    wrong = sum(
        float((a.detach().double() - b.detach().double()).square().sum())
        for a, b in zip(got, expected, strict=True)
    )
    moved = sum(
        float((b.detach().double() - c.detach().double()).square().sum())
        for b, c in zip(expected, start, strict=True)
    )
    return math.sqrt(wrong / moved) if moved else math.sqrt(wrong)


def clones(params: Sequence[Tensor]) -> list[nn.Parameter]:
    """The same parameters once more, in memory of their own, strides kept."""
    return [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]


def layouts() -> dict[str, Callable[[torch.dtype], Tensor]]:
    """Tensors of every kind of shape and layout that a parameter may have."""

    def fresh(*shape: int) -> Callable[[torch.dtype], Tensor]:
        return lambda dtype: parameters([shape], dtype)[0].detach()

    return {
        "0-dim": fresh(),
        "0 elements": fresh(0),
        "0 rows": fresh(0, 5),
        "0 columns": fresh(5, 0),
        "1 element": fresh(1),
        "1-D": fresh(67),
        "odd": fresh(17, 13),
        "one row": fresh(1, 33),
        "one column": fresh(33, 1),
        "conv": fresh(6, 5, 3, 3),
        "experts": fresh(3, 10, 33),
        "5-D": fresh(2, 3, 2, 3, 2),
        "channels_last": lambda dtype: fresh(6, 5, 3, 3)(dtype).to(memory_format=torch.channels_last),
        "transposed": lambda dtype: fresh(12, 19)(dtype).t(),
        "permuted": lambda dtype: fresh(4, 5, 6)(dtype).permute(2, 0, 1),
        "sliced columns": lambda dtype: fresh(10, 24)(dtype)[:, 3:20],
        "every other": lambda dtype: fresh(10, 24)(dtype)[:, ::2],
        "sliced and transposed": lambda dtype: fresh(24, 10)(dtype)[1:20:2].t(),
        "a row of a matrix": lambda dtype: fresh(10, 24)(dtype)[4],
        "a column of a matrix": lambda dtype: fresh(10, 24)(dtype)[:, 4],
    }


GRADIENT_LAYOUTS = ("as the parameter", "contiguous", "transposed", "expanded")


def laid_out(grad: Tensor, param: Tensor, layout: str) -> Tensor:
    """A copy of ``grad`` in one of :data:`GRADIENT_LAYOUTS`; for "expanded" all its elements have to be equal."""
    if layout == "as the parameter":
        return torch.empty_like(param).copy_(grad)
    if layout == "transposed" and grad.ndim:
        back = list(reversed(range(grad.ndim)))
        return grad.permute(back).contiguous().permute(back)
    if layout == "expanded" and grad.numel():
        return grad.reshape(-1)[0].clone().expand(grad.shape)
    return grad.contiguous().clone()
