"""Draws docs/timeline.svg: one training step and the next forward, lane by lane. Run: python docs/timeline.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

INK, SOFT = "#1f2933", "#d9e2ec"
COLORS = {
    "forward": "#7fb3d5",
    "backward": "#5d8aa8",
    "device": "#f5b041",
    "rest": "#cdd7e1",
    "closing": "#e07a5f",
}
LANES = ["device", "gradients down", "host worker", "weights up"]
LAYERS = 4


class Chart:
    """Boxes on named lanes; time runs to the right."""

    def __init__(self) -> None:
        mpl.rcParams.update({"svg.hashsalt": "zenflow", "font.family": "sans-serif", "font.size": 9})
        self.figure, self.axes = plt.subplots(figsize=(9.2, 3.5), layout="constrained")

    def box(self, lane: str, start: float, width: float, kind: str, text: str = "") -> float:
        """Draws work on a lane and returns when it ends."""
        y = -LANES.index(lane)
        self.axes.add_patch(Rectangle((start, y - 0.32), width, 0.64, fc=COLORS[kind], ec="white", lw=1))
        self.axes.text(start + width / 2, y, text, ha="center", va="center", color=INK, fontsize=8)
        return start + width

    def arrow(self, start: tuple[float, str], stop: tuple[float, str]) -> None:
        """Draws what one lane's work waits for on another."""
        (x0, a), (x1, b) = start, stop
        y0, y1 = -LANES.index(a), -LANES.index(b)
        lift = 0.34 if y1 > y0 else -0.34
        style = {"arrowstyle": "->", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", (x1, y1 - lift), (x0, y0 + lift), arrowprops=style)


def draw() -> Chart:
    """The picture."""
    chart = Chart()
    step = chart.box("device", 0.0, 3.2, "backward", "backward")
    begin = chart.box("device", step, 1.0, "device", "selected\ncolumns")
    down = host = up = step + 0.1
    arrivals = []
    for layer in range(LAYERS):
        down = chart.box("gradients down", down, 0.4, "closing", str(layer + 1))
        host = chart.box("host worker", max(host, down), 0.6, "closing", str(layer + 1))
        up = chart.box("weights up", max(up, host), 0.4, "closing", str(layer + 1))
        arrivals.append(up)
    chart.box("gradients down", down, 4.6, "rest", "all other gradients")
    chart.box("host worker", host, 8.3, "rest", "their moments, behind the device's own work")
    now = begin + 0.2
    for layer in range(LAYERS):
        now = max(now, arrivals[layer])
        chart.arrow((arrivals[layer] - 0.2, "weights up"), (now + 0.05, "device"))
        now = chart.box("device", now, 1.5, "forward", f"layer {layer + 1}")
    end = chart.box("device", now, 3.2, "backward", "backward")
    for lane in LANES:
        y = -LANES.index(lane)
        chart.axes.text(-0.2, y, lane, ha="right", va="center", color=INK)
        chart.axes.plot([0, end], [y, y], color=SOFT, lw=5, zorder=0, solid_capstyle="butt")
    chart.axes.plot([step, step], [-3.4, 0.5], color=INK, lw=0.8, ls=":")
    chart.axes.text(step, 0.58, "optimizer.step()", ha="center", color=INK)
    note = "1 to 4: the stripe of each layer that closes in this step, in the order of the forward"
    chart.axes.text(step + 0.1, -3.75, note, color=COLORS["closing"], ha="left")
    chart.axes.set(xlim=(-2.2, end + 0.1), ylim=(-3.95, 0.9))
    chart.axes.axis("off")
    return chart


if __name__ == "__main__":
    draw().figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
