"""Other people's optimizers, set upon given arrays: torch's own, and DeepSpeed's where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from oracle import HYPER, K

Step = Callable[[], Any]

TORCH = {"torch fused": {"fused": True}, "torch foreach": {"foreach": True}}
DEEPSPEED = "DeepSpeedCPUAdam"


class Peer:
    """One optimizer over lists of arrays; ``rewind`` makes its next step update ``K`` again."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        self.name = name
        params = [torch.nn.Parameter(weight) for weight in weights]
        self._optimizer = _optimizer(name, params)
        for param, exp_avg, exp_avg_sq, grad in zip(params, exp_avgs, exp_avg_sqs, grads, strict=True):
            param.grad = grad
            self._optimizer.state[param] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.rewind()

    def rewind(self) -> None:
        """Sets the update counts."""
        for state in self._optimizer.state.values():
            state["step"] = K - 1 if self.name == DEEPSPEED else torch.tensor(float(K - 1))

    def step(self) -> None:
        """One update."""
        self._optimizer.step()


def _optimizer(name: str, params: list[torch.nn.Parameter]) -> Any:
    lr, beta1, beta2, eps, weight_decay = HYPER
    options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    if name == DEEPSPEED:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, **options)
    return torch.optim.AdamW(params, **options, **TORCH[name])


def names() -> list[str]:
    """The peers that are installed."""
    return [*TORCH, *([DEEPSPEED] if find_spec("deepspeed") else [])]
