"""Parameters to buckets: how stripes are grouped for transfer and host work. Pure planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from .parameters import OffloadedParameter, Segment
from .schedule import stripe_bounds

__all__ = ["SEGMENT_ALIGNMENT", "plan_buckets"]

#: Elements at whose multiples segments begin in their bucket's slots: a cache line of 16-bit numbers. The engine lays
#: out its buckets by the same rule.
SEGMENT_ALIGNMENT = 32


def plan_buckets(
    parameters: Iterable[OffloadedParameter], update_interval: int, bucket_numel: int
) -> Iterator[list[Segment]]:
    """Lists of segments, a list a bucket, in the order of the parameters within each phase.

    Neighbours share a bucket if they share hyper-parameters, dtype and gate. A run of them is cut evenly, into
    as few buckets as ``bucket_numel`` elements allow, between rows where a stripe alone is larger. The gaps by which
    segments begin at multiples of ``SEGMENT_ALIGNMENT`` count as elements.
    """
    ordered = list(parameters)
    for phase in range(update_interval):
        for _, run in groupby(ordered, key=lambda p: (p.group, p.param.dtype, p.gates)):
            stripes = []
            for parameter in run:
                start, stop = stripe_bounds(parameter.matrix.rows, update_interval, parameter.grain)[phase]
                if start < stop and parameter.matrix.cols:
                    stripes.append(Segment(parameter, phase, start, stop))
            yield from _cut(stripes, bucket_numel)


def _cut(stripes: list[Segment], bucket_numel: int) -> Iterator[list[Segment]]:
    total = sum(_aligned(stripe.numel) for stripe in stripes)
    count = -(-total // bucket_numel)
    if not count:
        return
    # A bucket ends between two rows, or grains of them: without room for that and a gap each would end a little short,
    # and one too many be left over.
    row = max(stripe.parameter.matrix.cols * stripe.parameter.grain for stripe in stripes)
    limit = min(bucket_numel, -(-total // count) + row + SEGMENT_ALIGNMENT - 2)
    bucket: list[Segment] = []
    filled = 0
    for stripe in stripes:
        cols, grain, start = stripe.parameter.matrix.cols, stripe.parameter.grain, stripe.start
        while start < stripe.stop:
            offset = _aligned(filled)
            room = (limit - offset) // (cols * grain) * grain
            if room <= 0 and bucket:
                yield bucket
                bucket, filled = [], 0
                continue
            stop = min(stripe.stop, start + max(grain, room))
            bucket.append(Segment(stripe.parameter, stripe.phase, start, stop, offset))
            filled = offset + bucket[-1].numel
            start = stop
    if bucket:
        yield bucket


def _aligned(numel: int) -> int:
    return -(-numel // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
