"""The works that are timed: what each streams through memory, and who competes in it.

A work is one entry of :data:`WORKS`. Its ``build`` makes the arrays and a :class:`~zenflow.cli.bench.contest.Contest`
in which all contenders are checked already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zenflow.cli.bench.contest import Contest
from zenflow.cli.bench.dense import adamw_fp32, many_small, offload_pass
from zenflow.cli.bench.gradients import accumulate, accumulate_stats
from zenflow.cli.bench.lean import (
    moments_bf16,
    moments_int8,
    offload_pass_int8_state,
    offload_pass_split_bf16,
)
from zenflow.cli.bench.moments import moments
from zenflow.cli.bench.setting import Setting
from zenflow.cli.bench.streams import BARE, Streams

__all__ = ["WORKS", "Work", "streams_of"]


@dataclass(frozen=True)
class Work:
    """One work.

    Attributes:
        name: as ``--work`` has it.
        text: what it does, in a line.
        streams: what it moves.
        memory: bytes an element that all contenders' arrays take.
        build: sets it up.
        blocks: bytes an element, read and written, that are no stream of their own: scales of blocks.

    """

    name: str
    text: str
    streams: Streams
    memory: float
    build: Callable[[Setting], Contest]
    blocks: float = 0.0

    @property
    def bytes_per_element(self) -> float:
        """Bytes that it can't but move, whoever does it: each array read or written once."""
        return self.streams.bytes_per_element + self.blocks


_F32, _BF16, _I16, _U8 = torch.float32, torch.bfloat16, torch.int16, torch.uint8

#: Bytes an element of two float32 scales a block of 256, read and written.
_SCALES = 2 * 2 * 4 / 256

WORKS = {
    work.name: work
    for work in (
        Work("adamw_fp32", "AdamW in place, all in float32", Streams(_F32, (_F32,) * 3), 16, adamw_fp32),
        Work(
            "offload_pass",
            "bfloat16 gradient in; float32 master and moments; bfloat16 weight out",
            Streams(_BF16, (_F32,) * 3, _BF16),
            20,
            offload_pass,
        ),
        Work(
            "moments",
            "moments only: a bfloat16 gradient into float32 moments, as an engine's ticket",
            Streams(_BF16, (_F32,) * 2),
            28,
            moments,
        ),
        Work(
            "offload_pass_split_bf16",
            "the offload pass with a master split into weight and int16, and bfloat16 moments",
            Streams(_BF16, (_BF16, _I16, _BF16, _BF16)),
            30,
            offload_pass_split_bf16,
        ),
        Work(
            "moments_bf16",
            "moments only: a bfloat16 gradient into bfloat16 moments, as an engine's ticket",
            Streams(_BF16, (_BF16,) * 2),
            24,
            moments_bf16,
        ),
        Work(
            "offload_pass_int8_state",
            "the offload pass with a master split into weight and int16, and 8-bit moments",
            Streams(_BF16, (_BF16, _I16, _U8, _U8)),
            29,
            offload_pass_int8_state,
            blocks=_SCALES,
        ),
        Work(
            "moments_int8",
            "moments only: a bfloat16 gradient into 8-bit moments, as an engine's ticket",
            Streams(_BF16, (_U8,) * 2),
            32,
            moments_int8,
            blocks=_SCALES,
        ),
        Work(
            "accumulate",
            "a bfloat16 gradient added to a float32 sum",
            Streams(_BF16, (_F32,)),
            10,
            accumulate,
        ),
        Work(
            "accumulate_stats",
            "the same, with the squared norm of the sum and whether it is finite",
            Streams(_BF16, (_F32,)),
            10,
            accumulate_stats,
        ),
        Work(
            "many_small",
            "AdamW in place on tensors of 4,096 elements, all in float32",
            Streams(_F32, (_F32,) * 3),
            32,
            many_small,
        ),
    )
}


def streams_of(name: str) -> Streams:
    """Return the streams of a work, or of the pass ``read`` or ``copy``."""
    return BARE[name] if name in BARE else WORKS[name].streams
