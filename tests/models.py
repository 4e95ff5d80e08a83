"""Small models and the loop that trains them: what the tests of gates, resume and life cycle share.

A *trace* is what a user can see of a training: for each step the loss, every gradient and every weight as the forward
left it. A weight that came late, early or torn changes the loss and the gradients that are computed from it, so two
equal traces mean that each forward read equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zenflow.pipeline
from zenflow import ZenFlowAdamW
from zenflow._core import Engine
from zenflow.pipeline import Pipeline

VOCABULARY = 24
WIDTH = 32

#: Small enough that every matrix is offloaded and spans several buckets; reselects while it runs.
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "topk_ratio": 0.2,
    "update_interval": 4,
    "select_interval": 3,
    "min_offload_numel": 64,
    "bucket_numel": 1024,
}


class Block(nn.Module):
    """A feed-forward block around a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Tower(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        blocks: how many.
        order: which block runs when; a block may run twice, or never.
        tied: whether the head's weight is the embedding's.
        checkpointing: ``use_reentrant`` of activation checkpointing around each block; None for none.
    """

    def __init__(
        self,
        blocks: int = 2,
        *,
        order: Sequence[int] | None = None,
        tied: bool = False,
        checkpointing: bool | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.order = list(range(blocks)) if order is None else list(order)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens) @ self.mix
        for index in self.order:
            block = self.blocks[index]
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing)
        logits: Tensor = self.head(self.norm(x))
        return logits


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Any:
    """``build()`` with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        return build().to(dtype)


def batch(step: int) -> Tensor:
    """Tokens of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (4, 6), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Cross entropy of a fixed permutation of the tokens: something to learn."""
    tokens = batch(step)
    logits = model(tokens)
    return functional.cross_entropy(logits.float().flatten(0, -2), (tokens * 5 + 1).flatten() % VOCABULARY)


@dataclass
class Seen:
    """What one step showed."""

    loss: Tensor
    weights: list[Tensor]
    grads: list[Tensor | None]


Trace = list[Seen]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    *,
    call: Callable[[Tensor], Tensor] | None = None,
    scheduler: Any = None,
    before: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> Trace:
    """The ordinary loop; ``call`` runs the model in its own way."""
    trace = []
    for step in steps:
        if before is not None:
            before(step)
        loss = loss_of(model if call is None else call, step)
        weights = [param.detach().clone() for param in model.parameters()]
        loss.backward()
        grads = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
        trace.append(Seen(loss.detach(), weights, grads))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(step)
    return trace


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bits; NaN equals itself."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))


def assert_same_trace(got: Trace, want: Trace) -> None:
    """Every loss, gradient and weight equal to the bit."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for j, (left, right) in enumerate(zip(a.weights, b.weights, strict=True)):
            assert same(left, right), f"weight {j} after forward {i}"
        assert same(a.loss, b.loss), f"loss of forward {i}"
        for j, (left, right) in enumerate(zip(a.grads, b.grads, strict=True)):
            assert same(left, right), f"gradient {j} of backward {i}"


def assert_learns(trace: Trace) -> None:
    """A trace in which nothing moves would equal anything: every weight moves but those that are never used."""
    used = [any(seen.grads[i] is not None for seen in trace) for i in range(len(trace[0].weights))]
    moved = [not same(a, b) for a, b in zip(trace[0].weights, trace[-1].weights, strict=True)]
    assert moved == used
    assert any(used)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    """Every parameter equal to the bit."""
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert same(a.detach(), b.detach()), name


def unattached(model: nn.Module, **settings: Any) -> ZenFlowAdamW:
    """An optimizer that doesn't know the model: every landing is in ``step()``."""
    return ZenFlowAdamW(model.parameters(), **{**SETTINGS, **settings})


def attached(model: nn.Module, **settings: Any) -> ZenFlowAdamW:
    """An optimizer with gates on the model."""
    return ZenFlowAdamW(model, **{**SETTINGS, **settings})


def pipeline_of(optimizer: ZenFlowAdamW) -> Pipeline:
    """The room behind the optimizer."""
    assert optimizer._pipeline is not None
    return optimizer._pipeline


def pending(optimizer: ZenFlowAdamW) -> int:
    """Buckets whose new weights have not landed."""
    return len(pipeline_of(optimizer).transfer.pending)


def gated(optimizer: ZenFlowAdamW) -> list[str]:
    """Names of the modules with a gate, in the order of the gates."""
    gates = pipeline_of(optimizer).gates
    return [] if gates is None else [gate.name for gate in gates.gates]


@contextmanager
def slow_host(monkeypatch: pytest.MonkeyPatch, delay: float = 0.001) -> Iterator[None]:
    """Optimizers built inside have a worker that sleeps ``delay`` seconds after each 1024 elements."""

    def factory(cores: list[int] | None = None) -> Engine:
        return Engine(cores, delay=delay, chunk=1024)

    with monkeypatch.context() as patch:
        patch.setattr(zenflow.pipeline, "Engine", factory)
        yield
