"""AdamW with lean states: a master split between the weight and 16 bits more, moments in bfloat16 or in 8-bit blocks.

A split master is ``y = bits(master) + 0x8000``: its upper half is the bfloat16 weight, its lower half an int16 of its
own. bfloat16 moments are rounded stochastically. 8-bit moments are codes, with two float32 scales a block of 256, those
of exp_avg and of exp_avg_sq; codes and scales of zero are moments of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zenflow import _core
from zenflow.cli.bench.adam_arrays import EXP_AVG, EXP_AVG_SQ, GRAD, GROUP, WEIGHT, AdamArrays
from zenflow.cli.bench.contest import OURS, Contest
from zenflow.cli.bench.dense import enter_offloading_peers
from zenflow.cli.bench.memory import Memory, tile
from zenflow.cli.bench.moments import Ticket, TorchMoments
from zenflow.cli.bench.oracle import (
    HYPER,
    K,
    WrongResultError,
    adamw64,
    check_close,
    check_rounded,
    moments64,
    sample,
)
from zenflow.cli.bench.setting import Setting

__all__ = ["moments_bf16", "moments_int8", "offload_pass_int8_state", "offload_pass_split_bf16"]

BLOCK = 256


class LeanArrays:
    """bfloat16 ``weight`` and ``grad``, int16 ``low``, moments in ``dtype``: bfloat16, or uint8 with ``scales``."""

    def __init__(self, memory: Memory, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.weight, self.low = memory.empty(numel, torch.bfloat16), memory.empty(numel, torch.int16)
        self.exp_avg, self.exp_avg_sq = (memory.empty(numel, dtype) for _ in range(2))
        self.grad = memory.filled(numel, torch.bfloat16, GRAD)
        self.scales = None
        if dtype == torch.uint8:
            self.scales = memory.empty(2 * -(-numel // BLOCK), torch.float32)
        arguments: list[Any] = [[self.weight], [self.low], [self.exp_avg], [self.exp_avg_sq]]
        if self.scales is not None:
            arguments.append([self.scales])
        self._tensors = _core.AdamTensors(*arguments)
        upper, self._low = _split(WEIGHT)
        self._upper = upper.view(torch.bfloat16)

    def reset(self) -> None:
        """Back to the start; 8-bit moments start from nothing, which is the same in any code."""
        tile(self.weight, self._upper)
        tile(self.low, self._low)
        tile(self.grad, GRAD)
        if self.scales is None:
            tile(self.exp_avg, EXP_AVG)
            tile(self.exp_avg_sq, EXP_AVG_SQ)
        else:
            for array in (self.exp_avg, self.exp_avg_sq, self.scales):
                array.zero_()

    def step(self, pool: _core.Pool) -> None:
        """Update ``K``."""
        self._tensors.step(pool, [0], [self.grad], [K], [GROUP], [0])

    def master(self, at: Tensor) -> Tensor:
        """Return elements of the float32 master, put together."""
        upper = self.weight[at].view(torch.int16).to(torch.int64) << 16
        whole = (upper | (self.low[at].to(torch.int64) & 0xFFFF)) - 0x8000
        return whole.to(torch.int32).view(torch.float32)

    def check(self, name: str, pool: _core.Pool) -> None:
        """All are what update ``K`` makes of the start."""
        at = sample(self.numel)
        block = at % WEIGHT.numel()
        m, v = (part[block].to(torch.bfloat16).double() for part in (EXP_AVG, EXP_AVG_SQ))
        if self.scales is not None:
            m, v = torch.zeros_like(m), torch.zeros_like(v)
        grad = GRAD[block].bfloat16().double()
        weight, exp_avg, exp_avg_sq = adamw64(WEIGHT[block].double(), m, v, grad, K)
        check_close(f"{name}: master", self.master(at), weight, moved=HYPER[0])
        if self.scales is None:
            check_rounded(f"{name}: exp_avg", self.exp_avg[at], exp_avg)
            check_rounded(f"{name}: exp_avg_sq", self.exp_avg_sq[at], exp_avg_sq)
        else:
            self._check_codes(name, pool, at, exp_avg, exp_avg_sq)

    def _check_codes(self, name: str, pool: _core.Pool, at: Tensor, m: Tensor, v: Tensor) -> None:
        """The moments show in what one more update without a gradient moves: by and large what float64 has it move."""
        start = self.master(at).double()
        self.grad.zero_()
        self.step(pool)
        decayed = start * (1 - HYPER[0] * HYPER[4])
        moved = self.master(at).double() - decayed
        expected = adamw64(start, m, v, torch.zeros_like(m), K)[0] - decayed
        cosine = float(torch.nn.functional.cosine_similarity(moved, expected, dim=0))
        length = float(moved.norm() / expected.norm())
        if not (cosine > 0.95 and 0.9 < length < 1.1):
            raise WrongResultError(
                f"{name}: from its 8-bit moments the weights move {length:.3f} times as far as float64's, "
                f"at a cosine of {cosine:.3f}"
            )

    def roofline(self, pool: _core.Pool) -> None:
        """A pass over the same arrays, without the scales."""
        _core.roofline(pool, self.grad, [self.weight, self.low, self.exp_avg, self.exp_avg_sq])


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower half, int16 both, of a split master."""
    whole = master.view(torch.int32).to(torch.int64) + 0x8000
    # Values of 16 bits, the upper bit of which is a sign in int16.
    upper, low = (whole >> 16) & 0xFFFF, whole & 0xFFFF
    return tuple(((half ^ 0x8000) - 0x8000).to(torch.int16) for half in (upper, low))  # type: ignore[return-value]


def _lean_pass(setting: Setting, dtype: torch.dtype) -> Contest:
    """Ours with lean states; peers with float32 ones, since none keeps fewer and gives the same weights."""
    ours = LeanArrays(setting.memory, setting.numel, dtype)
    theirs = AdamArrays(setting.memory, setting.numel, torch.bfloat16)

    def reset() -> None:
        ours.reset()
        theirs.reset()

    def check(name: str, _: Any) -> None:
        if name == OURS:
            ours.check(name, setting.pool)
            ours.reset()
        else:
            theirs.check(name)

    contest = Contest(setting.numel, reset, check, lambda: ours.roofline(setting.pool))
    contest.enter(OURS, lambda: ours.step(setting.pool))
    enter_offloading_peers(contest, setting, theirs)
    return contest


def offload_pass_split_bf16(setting: Setting) -> Contest:
    """Split master, bfloat16 moments."""
    return _lean_pass(setting, torch.bfloat16)


def offload_pass_int8_state(setting: Setting) -> Contest:
    """Split master, 8-bit moments."""
    return _lean_pass(setting, torch.uint8)


def moments_bf16(setting: Setting) -> Contest:
    """An engine's ticket for bfloat16 moments."""
    return _lean_moments(setting, "bfloat16", torch.bfloat16)


def moments_int8(setting: Setting) -> Contest:
    """An engine's ticket for 8-bit moments."""
    return _lean_moments(setting, "int8", torch.uint8)


def _lean_moments(setting: Setting, state_dtype: str, dtype: torch.dtype) -> Contest:
    """Ours in a lean format; torch's calls have float32 moments. The roofline goes over arrays of ours' widths."""
    ticket = Ticket(setting, state_dtype=state_dtype)
    theirs = TorchMoments(setting.memory, setting.numel)
    alike = [setting.memory.empty(setting.numel, dtype) for _ in range(2)]

    def reset() -> None:
        # The engine takes its start from them.
        theirs.reset()
        ticket.engine.write_moments(ticket.parameter, theirs.exp_avg, theirs.exp_avg_sq)

    def check(name: str, _: Any) -> None:
        if name != OURS:
            theirs.check(name)
            return
        ticket.engine.read_moments(ticket.parameter, theirs.exp_avg, theirs.exp_avg_sq)
        at = sample(setting.numel)
        block = at % GRAD.numel()
        m, v = (_rounded(part, dtype)[block].double() for part in (EXP_AVG, EXP_AVG_SQ))
        expected = moments64(m, v, GRAD[block].bfloat16().double())
        for key, start, value in zip(("exp_avg", "exp_avg_sq"), (m, v), expected, strict=True):
            got = getattr(theirs, key)[at]
            if dtype == torch.bfloat16:
                check_rounded(f"{name}: {key}", got.bfloat16(), value)
            else:
                _check_coarse(f"{name}: {key}", got, start, value)

    contest = Contest(
        setting.numel,
        reset,
        check,
        lambda: _core.roofline(setting.pool, theirs.grad, alike),
        close=ticket.engine.close,
    )
    contest.enter(OURS, ticket, "an engine's ticket")
    if "torch" in setting.peers:
        contest.enter_peer(
            "torch", lambda: theirs, "float32 moments: copy_ to float32, lerp_, mul_, addcmul_"
        )
    return contest


def _rounded(start: Tensor, dtype: torch.dtype) -> Tensor:
    """What a lean state makes of a start; of 8 bits only roughly, which is as much as is looked at."""
    return start.bfloat16() if dtype == torch.bfloat16 else start


def _check_coarse(name: str, got: Tensor, start: Tensor, expected: Tensor) -> None:
    """Within a step of 8-bit codes at the start and one at the end, of eight an octave; and a floor."""
    steps = start.abs() / 8 + expected.abs() / 8
    wrong = (got.double() - expected).abs() - steps - 2**-14 * expected.abs().max()
    worst = int(wrong.argmax())
    if not wrong[worst] <= 0:
        raise WrongResultError(
            f"{name}: {float(got[worst])!r} at sampled element {worst}, float64 says {float(expected[worst])!r}"
        )
