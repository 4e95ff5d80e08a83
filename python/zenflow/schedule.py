"""When what happens, as a pure function of step counts. No torch here.

``k`` counts a parameter's own updates, from 1: steps in which it had no gradient don't count, so a parameter that is
used now and then keeps its own rhythm. With gradients at every step ``k`` is the step number.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd

__all__ = ["closes", "row_grain", "selects", "steps_to_close", "stripe_bounds", "warming_up"]

#: Elements of a parameter that share the scales of their 8-bit moments.
STATE_BLOCK = 256


def stripe_bounds(rows: int, update_interval: int, grain: int = 1) -> list[tuple[int, int]]:
    """The rows ``[start, stop)`` of each stripe, even to within ``grain`` rows; they start at multiples of that.

    Stripe j has phase j; some may be empty.

    >>> stripe_bounds(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    grains = -(-rows // grain)
    cuts = [(2 * j * grains + update_interval) // (2 * update_interval) for j in range(update_interval + 1)]
    return list(pairwise(min(cut * grain, rows) for cut in cuts))


def row_grain(cols: int, state_dtype: str) -> int:
    """Rows after which a row starts a block of moments again: stripes start there.

    >>> row_grain(768, "int8"), row_grain(100, "int8"), row_grain(100, "bfloat16")
    (1, 64, 1)
    """
    return STATE_BLOCK // gcd(cols, STATE_BLOCK) if state_dtype == "int8" and cols else 1


def warming_up(k: int, full_warm_up_rounds: int) -> bool:
    """True while every stripe closes at every step."""
    return k <= full_warm_up_rounds


def closes(k: int, phase: int, update_interval: int) -> bool:
    """True if a stripe of this phase moves at update ``k``."""
    return (k + phase) % update_interval == 0


def steps_to_close(k: int, phase: int, update_interval: int) -> int:
    """Updates after ``k`` until the stripe next moves; 0 if it moves at ``k``."""
    return -(k + phase) % update_interval


def selects(k: int, index: int, select_interval: int) -> bool:
    """True if the parameter with this index chooses its columns anew at update ``k``; staggered over parameters."""
    return (k + index) % select_interval == 0
