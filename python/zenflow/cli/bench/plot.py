"""The picture of a benchmark: each contender's share of its roofline, and what memory gives to how many threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zenflow.cli.bench.arguments import format_size
from zenflow.cli.bench.contest import OURS, ROOFLINE
from zenflow.cli.bench.streams import Streams
from zenflow.cli.bench.works import streams_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from zenflow.cli.bench.report import Line

__all__ = ["draw_figure"]

# Okabe and Ito's colours, told apart by colour-blind eyes.
_COLOURS = {
    OURS: "#0072B2",
    f"{OURS} kernel": "#56B4E9",
    "torch": "#D55E00",
    "torch foreach": "#E69F00",
    "torch cast": "#F0B070",
    "deepspeed": "#009E73",
    "bitsandbytes": "#CC79A7",
    "torchao": "#7F7F7F",
}
_LINES = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")

#: Where bars end that are longer: what fits the caches can be beyond any roofline of memory.
_WIDEST = 1.12


def draw_figure(path: Path, lines: list[Line]) -> None:
    """Write the two panels to ``path``, a PNG: of the largest size, the bars with the most threads."""
    numel = max(line.numel for line in lines)
    contests = [line for line in lines if line.row.ratio is not None]
    threads = max(line.threads for line in contests)
    shown = [line for line in contests if line.threads == threads and line.row.name != ROOFLINE]
    largest: dict[str, int] = {}
    for line in shown:
        largest[line.work] = max(largest.get(line.work, 0), line.numel)
    bars = [line for line in shown if line.numel == largest[line.work]]
    passes = [
        line for line in lines if line.row.name == ROOFLINE and line.numel in {numel, *largest.values()}
    ]
    height = 1.6 + 0.27 * len(bars) + 0.25 * len(largest)
    figure = Figure(figsize=(13, max(4.8, height)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    shares, speeds = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_shares(shares, bars, f"{format_size(numel)} elements, {threads} thread{'s' * (threads > 1)}")
    _draw_speeds(speeds, passes)
    figure.savefig(path, format="png")


def _draw_shares(axes: Axes, bars: list[Line], where: str) -> None:
    y, ticks, names = 0.0, [], []
    for work in dict.fromkeys(line.work for line in bars):
        group = [line for line in bars if line.work == work]
        for line in group:
            share, ratio = line.row.roofline_share or 0.0, line.row.ratio
            axes.barh(y, min(share, _WIDEST), height=0.85, color=_COLOURS.get(line.row.name, "#BBBBBB"))
            times = f", {ratio[0]:.2f}x the time" if ratio and line.row.name != OURS else ""
            axes.text(
                min(share, _WIDEST) + 0.015,
                y,
                f"{line.row.name}: {share:.2f}{times}",
                va="center",
                fontsize=8,
                fontweight="bold" if line.row.name == OURS else "normal",
                # So that the line at 1 doesn't cross it.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
            y += 1
        ticks.append(y - len(group) / 2 - 0.5)
        names.append(work)
        y += 0.8
    axes.axvline(1.0, color="#000000", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.5)
    axes.set_yticks(ticks, names)
    axes.set_ylim(y - 1.1, -0.9)
    axes.set_xlim(0, 1.6)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set_title(f"Share of the roofline's speed: {where}", loc="left")
    axes.set_xlabel("1: as fast as a pass with the same streams and no arithmetic", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_speeds(axes: Axes, passes: list[Line]) -> None:
    # Works with the same streams are one curve, under the name of the first.
    curves: dict[Streams, dict[int, float]] = {}
    names: dict[Streams, str] = {}
    for line in passes:
        streams = streams_of(line.work)
        names.setdefault(streams, line.work)
        curves.setdefault(streams, {}).setdefault(line.threads, line.row.gb_per_s)
    counts = sorted({count for curve in curves.values() for count in curve})
    width = 0.8 / len(curves)
    for index, (streams, curve) in enumerate(curves.items()):
        places = [counts.index(count) + (index + 0.5) * width - 0.4 for count in curve]
        colour = _LINES[index % len(_LINES)]
        axes.bar(places, list(curve.values()), width=0.9 * width, color=colour, label=names[streams])
        for place, speed in zip(places, curve.values(), strict=True):
            text = f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
            axes.text(place, speed, text, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("threads")
    axes.set_ylabel("GB/s")
    axes.set_title("Bare passes over memory", loc="left")
    axes.set_ylim(0, 1.3 * max(speed for curve in curves.values() for speed in curve.values()))
    axes.legend(title="streams of", frameon=False, ncols=2, alignment="left", loc="upper left", fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
