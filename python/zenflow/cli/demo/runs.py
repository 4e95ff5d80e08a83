"""The training runs of a demo: one pretraining, then one fine-tuning for each recipe from its weights.

Every run is the same ordinary loop; only the optimizer differs. A run is a function of the settings and the
corpora: cut anywhere and taken up again from its checkpoint, it ends in the same bits.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_

from zenflow import ZenFlowAdamW
from zenflow.cli.demo.data import draw
from zenflow.cli.demo.model import ByteGPT
from zenflow.cli.demo.settings import FINE_TUNING, PRETRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from zenflow.cli.demo.checkpoint import Store
    from zenflow.cli.demo.data import Corpus
    from zenflow.cli.demo.settings import Recipe, Settings

__all__ = ["Record", "Reporter", "run_all"]


@dataclass
class Record:
    """What a run has measured so far.

    Attributes:
        losses: training loss of each step, in nats a byte.
        seconds: wall-clock seconds of each step, from the drawing of its batch to its end.
        stall_seconds: seconds in which forward or ``step()`` waited for the host.
        bytes_moved: to the host and from it.
        host_bytes: of the optimizer's states on the host.
        parameters: number of elements of the model.
        validation_loss: after the last step, in nats a byte; None until then.

    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stall_seconds: float = 0.0
    bytes_moved: int = 0
    host_bytes: int = 0
    parameters: int = 0
    validation_loss: float | None = None


class Reporter(Protocol):
    """Hears how far the runs are."""

    def begin(self, recipe: Recipe, steps: int, done: int) -> None:
        """A run starts, with ``done`` of its ``steps`` in its checkpoint."""

    def advance(self, loss: float) -> None:
        """One step was made."""

    def end(self, validation_loss: float) -> None:
        """The run is finished."""


def run_all(
    settings: Settings, source: Corpus, target: Corpus, reporter: Reporter, store: Store | None = None
) -> dict[str, Record]:
    """Pretrain on ``source``, then fine-tune on ``target`` once a recipe, and validate each on ``target``.

    Args:
        settings: all that decides the numbers.
        source: what every run's weights come from.
        target: what is learned, and held out.
        reporter: is told of every step, after it.
        store: keeps checkpoints, and has those to go on from; None keeps none.

    Returns:
        The finished record of each run by its name, the pretraining's first.

    """
    model = ByteGPT(**settings.model_arguments)
    pretraining = _Run(PRETRAINING, settings, settings.pretrain_steps, settings.pretrain_lr, settings.seed)
    records = {PRETRAINING.name: pretraining.train(model, source, target, reporter, store)}
    pretrained = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for recipe in FINE_TUNING:
        model = ByteGPT(**settings.model_arguments)
        model.load_state_dict(pretrained)
        run = _Run(recipe, settings, settings.steps, settings.lr, settings.seed + 1)
        records[recipe.name] = run.train(model, target, target, reporter, store)
    return records


@dataclass(frozen=True)
class _Run:
    """One run: its optimizer, its length in steps, its peak learning rate, the seed of its data's order."""

    recipe: Recipe
    settings: Settings
    steps: int
    lr: float
    seed: int

    def train(
        self, model: ByteGPT, corpus: Corpus, validation: Corpus, reporter: Reporter, store: Store | None
    ) -> Record:
        """Train ``model`` in place, from its checkpoint in ``store`` if there is one."""
        settings = self.settings
        saved = store.load(self.recipe.name) if store else None
        record = Record(parameters=sum(parameter.numel() for parameter in model.parameters()))
        if saved:
            record = Record(**saved["record"])
            model.load_state_dict(saved["model"])
        reporter.begin(self.recipe, self.steps, len(record.losses))
        if record.validation_loss is not None:
            reporter.end(record.validation_loss)
            return record

        generator = torch.Generator().manual_seed(self.seed)
        with self._optimizer(model) as optimizer:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
            if saved:
                optimizer.load_state_dict(saved["optimizer"])
                scheduler.load_state_dict(saved["scheduler"])
                generator.set_state(saved["generator"])
            meter = _Meter(optimizer, record)

            def save(store: Store) -> None:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "generator": generator.get_state(),
                }
                # Now that the weights have landed, what that took has been counted.
                meter.read()
                store.save(self.recipe.name, {"record": asdict(record), **state})

            while len(record.losses) < self.steps:
                began = time.perf_counter()
                inputs, targets = draw(corpus.training, generator, settings.batch, settings.context)
                loss = model(inputs, targets)
                loss.backward()
                clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                record.losses.append(loss.item())
                record.seconds.append(time.perf_counter() - began)
                if store and len(record.losses) % store.every == 0:
                    save(store)
                reporter.advance(record.losses[-1])
            record.validation_loss = _validate(model, validation.held_out, settings)
            meter.read()
            if store:
                save(store)
        reporter.end(record.validation_loss)
        return record

    @contextmanager
    def _optimizer(self, model: ByteGPT) -> Iterator[torch.optim.Optimizer]:
        """Open the recipe's optimizer for ``model``, and close it in the end."""
        rates: dict[str, Any] = {"lr": self.lr, "weight_decay": self.settings.weight_decay}
        if self.recipe.zenflow is None:
            yield torch.optim.AdamW(model.parameters(), **rates)
        else:
            with ZenFlowAdamW(model, **rates, **self.recipe.zenflow) as optimizer:
                yield optimizer

    def _rate(self, step: int) -> float:
        """Return the factor of the peak rate: linear up for a twentieth of the steps, a cosine to 0.1."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


class _Meter:
    """Adds what ``optimizer`` counts, which starts at 0 with each process, to what ``record`` has."""

    def __init__(self, optimizer: torch.optim.Optimizer, record: Record) -> None:
        self._optimizer = optimizer if isinstance(optimizer, ZenFlowAdamW) else None
        self._record = record
        self._stall_seconds = record.stall_seconds
        self._bytes_moved = record.bytes_moved

    def read(self) -> None:
        """Bring the record up to date."""
        if self._optimizer is not None:
            stats = self._optimizer.stats()
            self._record.stall_seconds = self._stall_seconds + stats.stall_seconds
            self._record.bytes_moved = self._bytes_moved + stats.bytes_down + stats.bytes_up
            self._record.host_bytes = stats.host_bytes


@torch.no_grad()
def _validate(model: ByteGPT, held_out: Tensor, settings: Settings) -> float:
    """Return the mean loss over the validation batches, in nats a byte."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    total = 0.0
    for _ in range(settings.validation_batches):
        total += model(*draw(held_out, generator, settings.batch, settings.context)).item()
    return total / settings.validation_batches
