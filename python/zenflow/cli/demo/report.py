"""The results of a demo: one summary a run, as JSON and as a table."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from zenflow import __version__
from zenflow.cli.demo.settings import FINE_TUNING, PRETRAINING

if TYPE_CHECKING:
    from zenflow.cli.demo.runs import Record
    from zenflow.cli.demo.settings import Recipe, Settings

__all__ = ["Summary", "as_json", "as_table", "summarize"]

# torch's AdamW keeps two fp32 moments a parameter beside the model, which here is in host memory too.
_ADAMW_STATE_BYTES = 8.0


@dataclass(frozen=True)
class Summary:
    """The numbers of one run.

    Attributes:
        name: the recipe's.
        val_loss: validation loss, in nats a byte.
        step_seconds: median seconds a step.
        stall_share: share of the training loop's time that was spent waiting for the host.
        host_bytes_per_param: bytes of optimizer state in host memory.
        pcie_bytes_per_param_step: bytes moved between device and host, both ways.

    """

    name: str
    val_loss: float
    step_seconds: float
    stall_share: float
    host_bytes_per_param: float
    pcie_bytes_per_param_step: float


def summarize(records: dict[str, Record]) -> list[Summary]:
    """Return the summary of every fine-tuning run."""
    return [_summary(recipe, records[recipe.name]) for recipe in FINE_TUNING]


def _summary(recipe: Recipe, record: Record) -> Summary:
    if record.validation_loss is None:
        raise ValueError(f"the run {recipe.name} is not finished")
    host_bytes = record.host_bytes / record.parameters
    return Summary(
        name=recipe.name,
        val_loss=record.validation_loss,
        step_seconds=median(record.seconds),
        stall_share=record.stall_seconds / sum(record.seconds),
        host_bytes_per_param=host_bytes if recipe.zenflow is not None else _ADAMW_STATE_BYTES,
        pcie_bytes_per_param_step=record.bytes_moved / (record.parameters * len(record.seconds)),
    )


def as_json(settings: Settings, summaries: list[Summary]) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "machine": _machine(),
        "config": asdict(settings),
        "runs": [asdict(summary) for summary in summaries],
    }


def _machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "platform": platform.platform(),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "zenflow": __version__,
    }


def as_table(settings: Settings, records: dict[str, Record], summaries: list[Summary]) -> Table:
    """Return the table that is printed without ``--json``."""
    before = records[PRETRAINING.name].validation_loss
    text = settings.data["fine_tuning"].partition(", sha256")[0]
    table = Table(
        title=f"{settings.steps} steps of fine-tuning on: {text}",
        caption=f"Validation loss before fine-tuning: {before:.4f}. "
        "Every run starts from the same weights and sees the same data in the same order. "
        "S: update_interval. s/step: median. host B: bytes of optimizer state in host memory, a parameter. "
        "moved B: bytes between device and host, a parameter and step.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("run", no_wrap=True)
    for header in ("val loss", "vs AdamW", "s/step", "stalled", "host B", "moved B"):
        table.add_column(header, justify="right", no_wrap=True)
    for recipe, summary in zip(FINE_TUNING, summaries, strict=True):
        difference = summary.val_loss - summaries[0].val_loss
        table.add_row(
            recipe.label,
            f"{summary.val_loss:.4f}",
            f"{round(difference, 4) + 0.0:+.4f}" if recipe is not FINE_TUNING[0] else "",
            f"{summary.step_seconds:.3f}",
            f"{summary.stall_share:.1%}",
            f"{summary.host_bytes_per_param:.1f}",
            f"{summary.pcie_bytes_per_param_step:.2f}",
        )
    return table
