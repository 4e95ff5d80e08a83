"""Other people's optimizers, each set up by its own means upon given arrays.

All of them are AdamW on CPU tensors in float32, and make the same update from the same numbers:

* torch: its own AdamW, ``fused`` and ``foreach``.
* DeepSpeed: ``DeepSpeedCPUAdam``, which DeepSpeed compiles at first use; that takes a C++ compiler, ninja and minutes.
* bitsandbytes: ``AdamW`` with 32-bit states. For CPU tensors it has no kernel; 0.50 uses operations of torch's.
* torchao: ``_AdamW``, the one of its low-bit optimizers whose states are not low-bit; torch.compile makes its kernel at
  first use. ``CPUOffloadOptimizer`` itself needs a GPU; on the CPU it runs torch's fused AdamW.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zenflow.cli.bench.oracle import HYPER, K

__all__ = ["NOTES", "PACKAGES", "UNFUSED", "Package", "Peer", "names", "names_of"]


@dataclass(frozen=True)
class Package:
    """A package with contenders.

    Attributes:
        name: as it is imported, and as ``--peers`` has it.
        install: the command that installs it.
        contenders: its optimizers.

    """

    name: str
    install: str
    contenders: tuple[str, ...]

    @property
    def version(self) -> str | None:
        """The version installed; None where it isn't, or can't be imported."""
        try:
            return version(self.name) if find_spec(self.name) else None
        except PackageNotFoundError:
            return None


PACKAGES = {
    package.name: package
    for package in (
        Package("torch", "pip install torch", ("torch", "torch foreach")),
        Package("deepspeed", "pip install deepspeed ninja", ("deepspeed",)),
        Package("bitsandbytes", "pip install bitsandbytes", ("bitsandbytes",)),
        Package("torchao", "pip install torchao", ("torchao",)),
    )
}


#: What is called.
NOTES = {
    "torch": "AdamW(fused=True)",
    "torch foreach": "AdamW(foreach=True)",
    "deepspeed": "DeepSpeedCPUAdam",
    "bitsandbytes": "AdamW with 32-bit states, on CPU tensors made of torch's operations",
    "torchao": "_AdamW, compiled by torch.compile; CPUOffloadOptimizer needs a GPU",
}

#: Contenders made of many operations over the whole arrays, ten and more times slower; not worth their time everywhere.
UNFUSED = frozenset({"torch foreach", "bitsandbytes"})


def names_of(packages: Sequence[str]) -> list[str]:
    """Return the contenders of those of ``packages`` that are installed."""
    return [
        name
        for package in map(PACKAGES.__getitem__, packages)
        if package.version
        for name in package.contenders
    ]


def names() -> list[str]:
    """Return all contenders that are installed."""
    return names_of(list(PACKAGES))


class Peer:
    """One optimizer over lists of parallel float32 arrays, whose next step is update ``K``."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        params = [torch.nn.Parameter(weight) for weight in weights]
        lr, beta1, beta2, eps, weight_decay = HYPER
        make, count, moments = _OPTIMIZERS[name]
        self._optimizer = make(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        for param, exp_avg, exp_avg_sq, grad in zip(params, exp_avgs, exp_avg_sqs, grads, strict=True):
            param.grad = grad
            state = dict(zip(moments, (exp_avg, exp_avg_sq), strict=True))
            self._optimizer.state[param] = {"step": count(K - 1), **state}

    def step(self) -> None:
        """One update."""
        self._optimizer.step()


def _torch(**how: Any) -> Callable[..., Any]:
    return lambda params, **options: torch.optim.AdamW(params, **options, **how)


def _deepspeed(params: list[torch.nn.Parameter], **options: Any) -> Any:
    # Its compilation finds ninja on the path, where that of an environment that isn't activated is missing.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + os.environ["PATH"]
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **options)


def _bitsandbytes(params: list[torch.nn.Parameter], **options: Any) -> Any:
    from bitsandbytes.optim import AdamW

    return AdamW(params, optim_bits=32, **options)


def _torchao(params: list[torch.nn.Parameter], **options: Any) -> Any:
    from torchao.optim import _AdamW

    return _AdamW(params, **options)


def _tensor(count: int) -> Tensor:
    return torch.tensor(float(count))


_MOMENTS = ("exp_avg", "exp_avg_sq")

#: How each is made, how it counts its updates, and what it calls the moments.
_OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], tuple[str, str]]] = {
    "torch": (_torch(fused=True), _tensor, _MOMENTS),
    "torch foreach": (_torch(foreach=True), _tensor, _MOMENTS),
    "deepspeed": (_deepspeed, int, _MOMENTS),
    "bitsandbytes": (_bitsandbytes, int, ("state1", "state2")),
    "torchao": (_torchao, _tensor, _MOMENTS),
}
