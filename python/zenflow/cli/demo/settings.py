"""What decides the numbers of a demo: two demos with equal settings end in the same bits.

The four runs differ in their optimizer only, and each of them is one :class:`Recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["FINE_TUNING", "PRETRAINING", "QUICK", "Recipe", "Settings"]


@dataclass(frozen=True)
class Recipe:
    """One training run.

    Attributes:
        name: key of the run in the JSON, and of its checkpoint.
        label: what the progress bar, the table and the plot call it.
        zenflow: arguments of ``ZenFlowAdamW`` beyond lr and weight_decay; None for ``torch.optim.AdamW``.

    """

    name: str
    label: str
    zenflow: dict[str, Any] | None = None


PRETRAINING = Recipe("pretraining", "pretraining")

FINE_TUNING = (
    Recipe("adamw", "torch AdamW"),
    Recipe("exact", "ZenFlow S=1", {"update_interval": 1, "staleness": 0}),
    Recipe("zenflow", "ZenFlow S=4", {"topk_ratio": 0.1, "update_interval": 4, "staleness": 0}),
    Recipe(
        "zenflow_late", "ZenFlow S=4, staleness 1", {"topk_ratio": 0.1, "update_interval": 4, "staleness": 1}
    ),
)


@dataclass(frozen=True)
class Settings:
    """All that the losses and weights of a demo depend on, besides the machine.

    Attributes:
        steps: steps of each fine-tuning run.
        pretrain_steps: steps of the pretraining.
        seed: of the initial weights and of the order of the data.
        threads: torch threads; another number adds up in another order.
        width, blocks, heads: of the model. At width 128 every matrix is large enough to be offloaded.
        context: bytes the model sees.
        batch: sequences a step.
        lr, pretrain_lr: peak learning rates, after the warm-up and before the cosine.
        weight_decay: of every parameter, decoupled.
        max_grad_norm: clipping, over the norm of all gradients.
        pretrain_bytes: at most so many bytes of source are read for pretraining.
        validation_batches: held-out batches of which the validation loss is the mean, the same for every run.
        versions: of torch and of zenflow: other versions may round otherwise.
        data: a description of the corpora, with their digests.

    """

    steps: int = 200
    pretrain_steps: int = 400
    seed: int = 0
    threads: int = 1
    width: int = 128
    blocks: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 16
    lr: float = 5e-4
    pretrain_lr: float = 2e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    pretrain_bytes: int = 4_000_000
    validation_batches: int = 24
    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)

    @property
    def model_arguments(self) -> dict[str, int]:
        """Arguments of the model."""
        return {
            "width": self.width,
            "blocks": self.blocks,
            "heads": self.heads,
            "context": self.context,
            "seed": self.seed,
        }


# Overrides for `--quick`: seconds in all, enough to see that everything works, too little to learn from.
QUICK: dict[str, int] = {
    "steps": 12,
    "pretrain_steps": 12,
    "blocks": 1,
    "batch": 4,
    "pretrain_bytes": 200_000,
    "validation_batches": 2,
}
