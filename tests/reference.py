"""The algorithm in float64 NumPy, one element at a time in spirit: what ZenFlowAdamW must compute.

Written from the equations alone; shares no code with the package. Nothing overlaps: lateness is bookkeeping.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ReferenceParameter:
    """One 2-D weight under deferred, striped updates."""

    def __init__(
        self, weight: Array, index: int, *, S: int, D: int, topk: float, every: int, warm: int
    ) -> None:
        self.w = weight.astype(np.float64)
        self.shown = self.w.copy()
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.index, self.S, self.D, self.every, self.warm = index, S, D, every, warm
        rows, cols = weight.shape
        cuts = [math.floor(j * rows / S + 0.5) for j in range(S + 1)]
        self.stripes = [slice(a, b) for a, b in pairwise(cuts)]
        self.L = [0.0] * S
        self.P = [1.0] * S
        self.late: list[tuple[slice, Array, NDArray[np.bool_]]] = []
        self.count = math.ceil(topk * cols)
        self.selected: NDArray[np.bool_] | None = None
        self.importance: Array | None = None
        self.k = 0

    def _move(
        self, rows: slice, cols: NDArray[np.bool_], L: float, P: float, hyper: dict[str, float]
    ) -> None:
        mhat = self.m[rows] / (1 - hyper["beta1"] ** self.k)
        vhat = self.v[rows] / (1 - hyper["beta2"] ** self.k)
        moved = P * self.w[rows] - L * mhat / (np.sqrt(vhat) + hyper["eps"])
        self.w[rows] = np.where(cols, moved, self.w[rows])

    def _choose(self) -> NDArray[np.bool_]:
        chosen = np.zeros(self.w.shape[1], dtype=bool)
        if self.count:
            assert self.importance is not None
            chosen[np.argsort(-self.importance)[: self.count]] = True
        return chosen

    def step(self, grad: Array, scale: float, hyper: dict[str, float]) -> None:
        """One update: late stripes show, the moments follow, selected columns move, stripes that are due close."""
        for rows, values, kept in self.late:
            self.shown[rows] = np.where(kept, self.shown[rows], values)
        self.late = []
        self.k += 1
        g = scale * grad
        lr, wd = hyper["lr"], hyper["wd"]
        energy = np.square(g).sum(0)
        self.importance = energy if self.importance is None else 0.9 * self.importance + 0.1 * energy
        if self.selected is None:
            self.selected = self._choose()
        self.m += (1 - hyper["beta1"]) * (g - self.m)
        self.v += (1 - hyper["beta2"]) * (g * g - self.v)
        changes = 0 < self.count < self.w.shape[1] and (self.k + self.index) % self.every == 0
        everything = slice(None)
        self._move(everything, self.selected, lr, 1 - lr * wd, hyper)
        self.shown = np.where(self.selected, self.w, self.shown)
        for phase, rows in enumerate(self.stripes):
            self.L[phase] += lr
            self.P[phase] *= 1 - lr * wd
            if (self.k + phase) % self.S == 0 or changes or self.k <= self.warm:
                self._move(rows, ~self.selected, self.L[phase], self.P[phase], hyper)
                self.L[phase], self.P[phase] = 0.0, 1.0
                if self.D and self.k > self.warm:
                    self.late.append((rows, self.w[rows].copy(), self.selected.copy()))
                else:
                    self.shown[rows] = np.where(self.selected, self.shown[rows], self.w[rows])
        if changes:
            self.selected = self._choose()
