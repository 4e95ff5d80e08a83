"""Pure planning: which rows close when, who travels with whom, which columns are chosen, who owns them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zenflow.buckets import plan_buckets
from zenflow.dense_adamw import DenseState
from zenflow.matrix import ParameterMatrix
from zenflow.ownership import DeviceColumns, change_owner
from zenflow.parameters import OffloadedParameter, Segment
from zenflow.schedule import closes, selects, steps_to_close, stripe_bounds, warming_up
from zenflow.selection import column_energy, selected_count, top_columns, update_importance
from zenflow.staging import SlotPool

ROWS = st.integers(0, 5000)
INTERVAL = st.integers(1, 64)

# --- stripes and phases --------------------------------------------------------------------------------


@given(ROWS, INTERVAL)
def test_stripes_cut_the_rows_evenly(rows: int, interval: int) -> None:
    bounds = stripe_bounds(rows, interval)
    assert len(bounds) == interval
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
    sizes = {stop - start for start, stop in bounds}
    assert sizes <= {rows // interval, -(-rows // interval)}


@given(st.integers(1, 10**6), st.integers(0, 63), INTERVAL)
def test_a_stripe_closes_once_a_window_and_the_countdown_says_when(k: int, phase: int, interval: int) -> None:
    phase %= interval
    window = range(k, k + interval)
    closing = [t for t in window if closes(t, phase, interval)]
    assert len(closing) == 1
    assert steps_to_close(k, phase, interval) == closing[0] - k
    if interval == 1:
        assert closes(k, 0, 1)


@given(st.integers(1, 10**6), INTERVAL)
def test_one_stripe_closes_a_step(k: int, interval: int) -> None:
    assert sum(closes(k, phase, interval) for phase in range(interval)) == 1


@given(st.integers(1, 10**5), st.integers(1, 100), st.integers(1, 200))
def test_selection_is_periodic_and_staggered(k: int, interval: int, parameters: int) -> None:
    for index in (0, parameters // 2, parameters):
        assert sum(selects(t, index, interval) for t in range(k, k + interval)) == 1
    together = sum(selects(k, index, interval) for index in range(parameters))
    assert together <= -(-parameters // interval), "a burst"


@given(st.integers(0, 50), st.integers(1, 100))
def test_warm_up_is_the_first_rounds(rounds: int, k: int) -> None:
    assert warming_up(k, rounds) == (k in range(1, rounds + 1))


# --- buckets -------------------------------------------------------------------------------------------


def parameter(
    rows: int, cols: int, group: int = 0, dtype: torch.dtype = torch.float32, gates: tuple[int, ...] = ()
) -> OffloadedParameter:
    """A record without an engine behind it."""
    weight = torch.empty(rows, cols, dtype=dtype)
    nothing = torch.empty(0)
    return OffloadedParameter(
        param=weight,
        name="p",
        index=0,
        group=group,
        matrix=ParameterMatrix(weight),
        engine_id=0,
        master_weight=nothing,
        moments=None,
        gates=gates,
    )


SHAPES = st.lists(
    st.tuples(
        st.integers(1, 60),
        st.integers(1, 60),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([(), (0,), (0, 3)]),
    ),
    max_size=12,
)


@given(SHAPES, st.integers(1, 9), st.integers(1, 4000))
def test_buckets_hold_every_row_once_and_mix_nothing(shapes: Any, interval: int, bucket_numel: int) -> None:
    parameters = [parameter(*shape) for shape in shapes]
    buckets = list(plan_buckets(parameters, interval, bucket_numel))
    rows: Counter[tuple[int, int]] = Counter()
    for segments in buckets:
        assert segments
        first = segments[0]
        offset = 0
        for segment in segments:
            record = segment.parameter
            start, stop = stripe_bounds(record.matrix.rows, interval)[segment.phase]
            assert start <= segment.start < segment.stop <= stop, "inside its stripe"
            assert segment.offset % 32 == 0, "at a cache line of 16-bit numbers"
            assert 0 <= segment.offset - offset < 32, "no overlap in the slot, no larger gap than that takes"
            offset = segment.offset + segment.numel
            assert segment.phase == first.phase
            assert record.param.dtype == first.parameter.param.dtype
            assert (record.group, record.gates) == (first.parameter.group, first.parameter.gates)
            rows.update((id(record), row) for row in range(segment.start, segment.stop))
        # Never larger than asked but for one row that is.
        assert offset <= bucket_numel or len(segments) == 1
        if offset > bucket_numel:
            assert first.stop - first.start == 1
    expected = {(id(record), row) for record in parameters for row in range(record.matrix.rows)}
    assert rows == Counter(dict.fromkeys(expected, 1))


@given(SHAPES, st.integers(1, 9), st.integers(1, 4000))
def test_buckets_keep_the_order_of_the_parameters(shapes: Any, interval: int, bucket_numel: int) -> None:
    parameters = [parameter(*shape) for shape in shapes]
    place = {id(record): i for i, record in enumerate(parameters)}
    order: dict[int, list[tuple[int, int]]] = {}
    for segments in plan_buckets(parameters, interval, bucket_numel):
        for segment in segments:
            order.setdefault(segment.phase, []).append((place[id(segment.parameter)], segment.start))
    for places in order.values():
        assert places == sorted(places)


def test_a_run_is_cut_into_as_few_even_buckets_as_fit() -> None:
    parameters = [parameter(100, 10) for _ in range(10)]
    sizes = [sum(s.numel for s in segments) for segments in plan_buckets(parameters, 1, 4000)]
    assert len(sizes) == 3
    # The last is short by what the others have beyond an even part: a row and a gap each, and gaps count there only.
    assert max(sizes) - min(sizes) <= 3 * (10 + 32 + 24)


def test_growth_is_linear_in_parameters() -> None:
    count = {n: len(list(plan_buckets([parameter(8, 8)] * n, 4, 1024))) for n in (128, 256)}
    assert count[256] == 2 * count[128]


# --- selection -----------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_selected_count(columns: int, ratio: float) -> None:
    count = selected_count(columns, ratio)
    assert 0 <= count <= columns
    assert (count == 0) == (ratio == 0)
    assert count >= ratio * columns * (1 - 1e-12)
    assert count <= ratio * columns + 1
    assert selected_count(columns, 1.0) == columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_energy_is_the_squared_column_norm_in_fp32(dtype: torch.dtype) -> None:
    grad = (torch.randn(70, 33) * 30).to(dtype)
    expected = ((0.25 * grad.double()) ** 2).sum(0)
    energy = column_energy(grad, 0.25)
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy.double(), expected, rtol=1e-5, atol=0)


def test_energy_of_16_bit_gradients_neither_overflows_nor_vanishes() -> None:
    energy = column_energy(torch.full((64, 2), 60_000.0).half(), 1.0)
    torch.testing.assert_close(energy, torch.full((2,), 64 * 59_996.8**2), rtol=1e-2, atol=0)
    assert bool((column_energy(torch.full((64, 2), 2.0**-24).half(), 1.0) > 0).all())


@given(st.lists(st.lists(st.floats(0, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=30))
def test_importance_is_an_average_that_forgets_by_a_tenth(energies: list[list[float]]) -> None:
    importance = None
    for energy in energies:
        importance = update_importance(importance, torch.tensor(energy))
    expected = torch.tensor(energies[0], dtype=torch.float64)
    for energy in energies[1:]:
        expected = 0.9 * expected + 0.1 * torch.tensor(energy, dtype=torch.float64)
    torch.testing.assert_close(cast(Tensor, importance).double(), expected, rtol=1e-4, atol=1e-3)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.data())
def test_top_columns_are_the_largest_in_order(values: list[int], data: Any) -> None:
    importance = torch.tensor(values, dtype=torch.float32)
    count = data.draw(st.integers(0, len(values)))
    columns = top_columns(importance, count)
    assert columns.dtype == torch.int64
    chosen = columns.tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert sorted(importance[columns].tolist()) == sorted(sorted(importance.tolist())[len(values) - count :])


def test_top_columns_with_infinite_energy() -> None:
    importance = torch.tensor([1.0, math.inf, 3.0, 2.0])
    assert top_columns(importance, 2).tolist() == [1, 2]


# --- ownership -----------------------------------------------------------------------------------------


class Store:
    """The host's side in plain torch."""

    def __init__(self, rows: int, cols: int) -> None:
        self.master = torch.randn(rows, cols)
        self.exp_avg = torch.randn(rows, cols)
        self.exp_avg_sq = torch.rand(rows, cols)

    def gather_columns(
        self, parameter: int, cols: int, columns: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        assert (parameter, cols) == (0, self.master.shape[1])
        master.copy_(self.master[:, columns])
        exp_avg.copy_(self.exp_avg[:, columns])
        exp_avg_sq.copy_(self.exp_avg_sq[:, columns])

    def scatter_columns(self, parameter: int, cols: int, columns: Tensor, master: Tensor) -> None:
        assert (parameter, cols) == (0, self.master.shape[1])
        self.master[:, columns] = master


@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_50_changes_of_owner_are_the_identity(rows: int, cols: int, dtype: torch.dtype, data: Any) -> None:
    store = Store(rows, cols)
    before = {name: value.clone() for name, value in vars(store).items()}
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    device: DeviceColumns | None = None
    for _ in range(50):
        count = int(torch.randint(0, cols + 1, (), generator=generator))
        columns = torch.randperm(cols, generator=generator)[:count].sort().values
        device = change_owner(store, 0, (rows, cols), dtype, device, columns)
        assert device.columns is columns
        assert torch.equal(device.state.master, before["master"][:, columns])
        # What the host has of owned columns is dead: spoil it, nobody may read it.
        store.master[:, columns] = math.nan
    change_owner(store, 0, (rows, cols), dtype, device, torch.empty(0, dtype=torch.int64))
    for name, value in vars(store).items():
        assert torch.equal(value, before[name]), name


def test_what_the_device_did_comes_back() -> None:
    store = Store(3, 6)
    exp_avg = store.exp_avg.clone()
    device = change_owner(store, 0, (3, 6), torch.bfloat16, None, torch.tensor([1, 4]))
    device.state.master.add_(1.0)
    device.state.exp_avg.zero_()
    expected = store.master.clone()
    expected[:, [1, 4]] += 1.0
    change_owner(store, 0, (3, 6), torch.bfloat16, device, torch.tensor([4]))
    assert torch.equal(store.master, expected)
    assert torch.equal(store.exp_avg, exp_avg), "the host's moments are complete; the device's are a copy"


def test_a_16_bit_weight_has_a_master_beside_it_and_an_fp32_weight_is_one() -> None:
    store = Store(3, 6)
    columns = torch.tensor([0, 5])
    wide = change_owner(store, 0, (3, 6), torch.float32, None, columns).state
    narrow = change_owner(store, 0, (3, 6), torch.bfloat16, None, columns).state
    assert wide.master is wide.weight
    assert narrow.master_weight is narrow.master
    assert isinstance(narrow, DenseState)
    assert (narrow.weight.dtype, narrow.master.dtype) == (torch.bfloat16, torch.float32)


# --- staging -------------------------------------------------------------------------------------------


class Memory:
    """Counts what a pool allocates."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, memory: Tensor) -> int:
        assert memory.numel() == self.sizes[-1]
        return len(self.sizes) - 1


@given(st.integers(0, 500), st.integers(0, 200), st.lists(st.integers(1, 200), max_size=60), st.randoms())
def test_slots_stay_in_their_budget_and_are_never_shared(
    budget: int, expected: int, requests: list[int], random: Any
) -> None:
    memory = Memory()
    pool = SlotPool(memory.allocate, memory.register, budget, 0)
    pool.expect(expected)
    held: list[Any] = []
    for nbytes in requests:
        slot = pool.acquire(nbytes)
        if slot is None:
            assert any(other.nbytes >= nbytes for other in held), "nobody could ever free one"
            held.sort(key=lambda other: other.nbytes)
            pool.release(held.pop())
            slot = pool.acquire(nbytes)
            assert slot is not None, "the largest was just released"
        assert slot.nbytes >= nbytes
        assert all(slot is not other for other in held)
        assert all(slot.engine_id != other.engine_id for other in held)
        held.append(slot)
        if random.random() < 0.3:
            pool.release(held.pop(random.randrange(len(held))))
    assert pool.nbytes == sum(memory.sizes)
    # Beyond the budget only for a request larger than every slot before it.
    over = [i for i in range(len(memory.sizes)) if sum(memory.sizes[: i + 1]) > budget]
    assert all(memory.sizes[i] > max(memory.sizes[:i], default=0) for i in over)


def test_beyond_the_budget_only_when_asked() -> None:
    memory = Memory()
    pool = SlotPool(memory.allocate, memory.register, 100, 0)
    assert pool.acquire(60) is not None
    assert pool.acquire(60) is None
    assert pool.acquire(60, beyond_budget=True) is not None
    assert pool.nbytes == 120


def test_segments_count_their_elements() -> None:
    assert Segment(parameter(10, 7), 0, 3, 8).numel == 35
