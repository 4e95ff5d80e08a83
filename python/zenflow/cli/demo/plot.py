"""The picture of a demo: how the runs learned, and where the time of a step went."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zenflow.cli.demo.settings import FINE_TUNING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from zenflow.cli.demo.report import Summary
    from zenflow.cli.demo.runs import Record

__all__ = ["draw_figure"]

# Okabe and Ito's colours, told apart by colour-blind eyes; AdamW is drawn broad, below the others.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#BBBBBB", "linewidth": 6.0},
    {"color": "#000000", "linewidth": 1.2},
    {"color": "#0072B2", "linewidth": 1.8},
    {"color": "#D55E00", "linewidth": 1.8},
)


def draw_figure(path: Path, records: dict[str, Record], summaries: list[Summary]) -> None:
    """Write the two panels to ``path``, a PNG."""
    figure = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    losses, steps = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_losses(losses, records, summaries)
    _draw_steps(steps, summaries)
    figure.savefig(path, format="png")


def _smoothed(values: list[float], window: int) -> list[float]:
    """Return the running mean over ``window`` values, without the ends that lack some."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + window] - sums[i]) / window for i in range(len(values) - window + 1)]


def _draw_losses(axes: Axes, records: dict[str, Record], summaries: list[Summary]) -> None:
    for recipe, summary, style in zip(FINE_TUNING, summaries, _STYLES, strict=True):
        losses = records[recipe.name].losses
        window = max(1, len(losses) // 12)
        curve = _smoothed(losses, window)
        # A mean over steps t+1 .. t+window stands in their middle.
        middles = [step + (window + 1) / 2 for step in range(len(curve))]
        axes.plot(middles, curve, label=f"{recipe.label}: {summary.val_loss:.4f}", **style)
    axes.set_title(f"Training loss, mean of {window} steps", loc="left")
    axes.set_xlabel("step of fine-tuning")
    axes.set_ylabel("nats a byte")
    axes.legend(title="validation loss at the end", frameon=False, alignment="left")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Axes, summaries: list[Summary]) -> None:
    rows = range(len(summaries))
    totals = [1e3 * summary.step_seconds for summary in summaries]
    stalls = [total * summary.stall_share for total, summary in zip(totals, summaries, strict=True)]
    computing = [total - stall for total, stall in zip(totals, stalls, strict=True)]
    axes.barh(rows, computing, height=0.6, color="#56B4E9", label="computing")
    axes.barh(rows, stalls, left=computing, height=0.6, color="#D55E00", label="stalled by the host")
    for row, total, summary in zip(rows, totals, summaries, strict=True):
        axes.text(total, row, f" {total:.0f} ms, {summary.stall_share:.1%} stalled", va="center")
    axes.set_yticks(rows, [recipe.label for recipe in FINE_TUNING])
    # The first run on top, and room for the legend below the last.
    axes.set_ylim(len(summaries) + 0.1, -0.6)
    axes.set_xlim(0, 1.75 * max(totals))
    axes.set_title("Time of a step (median)", loc="left")
    axes.set_xlabel("milliseconds")
    axes.legend(frameon=False, loc="lower left", ncols=2)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
