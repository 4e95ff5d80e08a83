"""What the work has to give, in float64 from the papers' equations, on a sample of the elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "HYPER",
    "K",
    "WrongResultError",
    "adamw64",
    "check_bits",
    "check_close",
    "check_rounded",
    "check_stats",
    "moments64",
    "sample",
]

#: lr, beta1, beta2, eps, weight_decay
HYPER = (1e-3, 0.9, 0.999, 1e-8, 1e-2)
#: The update that is timed, the eleventh: bias corrections that are neither 1 nor nothing.
K = 11

_SAMPLED = 100_000


class WrongResultError(AssertionError):
    """A contender's numbers aren't those of its work. The message is one line: whose, which, where."""


def sample(numel: int) -> Tensor:
    """Elements to look at: all of a small array; of a large one both ends and 100,000 in between."""
    if numel <= _SAMPLED:
        return torch.arange(numel)
    ends = torch.arange(1000)
    between = torch.randint(numel, (_SAMPLED,), generator=torch.Generator().manual_seed(5))
    return torch.cat([ends, numel - 1 - ends, between])


def moments64(m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The moments after gradient ``g``; everything float64."""
    _, beta1, beta2, _, _ = HYPER
    return beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g


def adamw64(w: Tensor, m: Tensor, v: Tensor, g: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and moments after update ``k`` of AdamW (Loshchilov and Hutter, arXiv 1711.05101); all float64."""
    lr, beta1, beta2, eps, weight_decay = HYPER
    m, v = moments64(m, v, g)
    direction = (m / (1 - beta1**k)) / ((v / (1 - beta2**k)).sqrt() + eps)
    return w * (1 - lr * weight_decay) - lr * direction, m, v


def check_close(name: str, got: Tensor, expected: Tensor, moved: float = 0.0) -> None:
    """Within a few roundings to fp32 of float64; of what ``moved``, within 1e-5 of that."""
    wrong = (got.double() - expected).abs()
    allowed = 2**-22 * expected.abs() + 1e-5 * moved + 1e-12
    worst = int((wrong - allowed).argmax())
    if not wrong[worst] <= allowed[worst]:
        raise WrongResultError(
            f"{name}: {float(got[worst])!r} at sampled element {worst}, float64 says {float(expected[worst])!r}"
        )


def check_rounded(name: str, got: Tensor, expected: Tensor) -> None:
    """``got``, in bfloat16, is a neighbour of the float64 ``expected``, and on the average neither above nor below."""
    wrong = got.double() - expected
    # 8 bits of significand: neighbours are at most 2^-7 of a number apart. And what float32 has left of terms that
    # all but cancel.
    allowed = 2**-7 * expected.abs() + 2**-22 * expected.abs().mean()
    worst = int((wrong.abs() - allowed).argmax())
    if not wrong.abs()[worst] <= allowed[worst]:
        raise WrongResultError(
            f"{name}: {float(got[worst])!r} at sampled element {worst}, float64 says {float(expected[worst])!r}"
        )
    drift = float((wrong * expected.sign()).sum() / expected.abs().sum())
    # Rounding towards zero would have it at -2^-8.5; rounding at random, within a few times 2^-8.5 / sqrt(elements).
    if not abs(drift) <= 2**-8.5 * max(2**-3, 6 / len(wrong) ** 0.5):
        raise WrongResultError(f"{name}: rounded by {drift:.1e} of its size on the average")


def check_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Equal, bit for bit, and of one dtype."""
    if got.dtype != expected.dtype:
        raise WrongResultError(f"{name}: {got.dtype}, not {expected.dtype}")
    differ = int((got.view(torch.uint8) != expected.view(torch.uint8)).sum())
    if differ:
        raise WrongResultError(f"{name}: {differ} bytes differ, of {got.numel()} elements looked at")


def check_stats(name: str, found: tuple[float, bool], array: Tensor, within: float) -> None:
    """``found`` is the squared norm of ``array`` up to the share ``within``, and whether some element isn't finite."""
    squares = sum(float(part.double().square().sum()) for part in array.split(1 << 22))
    if not math.isclose(found[0], squares, rel_tol=within):
        raise WrongResultError(f"{name}: squared norm {found[0]!r}, float64 says {squares!r}")
    nonfinite = not bool(array.isfinite().all())
    if found[1] is not nonfinite:
        raise WrongResultError(f"{name}: says non-finite is {found[1]}, it is {nonfinite}")
