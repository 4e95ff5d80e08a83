"""``zenflow bench``: what it accepts, prints and draws, and that its checks can fail. No time is asserted."""

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("rich", reason='needs "torch-zenflow[cli]"')
pytest.importorskip("matplotlib", reason='needs "torch-zenflow[cli]"')

from zenflow import ZenFlowError, _core
from zenflow.cli import main
from zenflow.cli.bench import dense, doubts, machine, peers
from zenflow.cli.bench.arguments import format_size, size
from zenflow.cli.bench.contest import OURS, ROOFLINE, Contest, contest_rows, spread, time_rounds
from zenflow.cli.bench.memory import Memory
from zenflow.cli.bench.oracle import WrongResultError, check_close, check_rounded
from zenflow.cli.bench.session import Plan, Result, WorkerError, plan_jobs, run_all
from zenflow.cli.bench.setting import Setting
from zenflow.cli.bench.worker import PASSES, Job, Outcome
from zenflow.cli.bench.works import WORKS

ROW = [
    "work",
    "impl",
    "numel",
    "threads",
    "ms_median",
    "ms_p10",
    "ms_p90",
    "ns_per_element",
    "gb_per_s",
    "roofline_share",
    "ratio_to_zenflow",
    "ratio_p10",
    "ratio_p90",
    "cores_busy",
    "rounds",
    "note",
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where it isn't installed."""
    find_spec = peers.find_spec
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "deepspeed" else find_spec(name))


def bench(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``zenflow bench``."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["bench", *argv])
    return code, out.getvalue(), err.getvalue()


def plan(works: list[str], **changes: Any) -> Plan:
    """One tiny process of each of ``works`` on one thread."""
    options = {
        "numels": [4096],
        "threads": [1],
        "cpus": machine.cpus(),
        "cores": 1,
        "peers": [],
        "rounds": 2,
        "processes": 1,
    }
    return Plan(works, **(options | changes))


# --- what it accepts ---------------------------------------------------------------------------------


@given(st.integers(1, 1 << 48))
def test_every_size_is_read_as_it_is_written(numel: int) -> None:
    assert size(format_size(numel)) == numel
    assert size(str(numel)) == numel


@given(st.integers(1, 1023), st.sampled_from([("", 0), ("Ki", 10), ("Mi", 20), ("Gi", 30)]))
def test_suffixes_are_powers_of_1024(count: int, suffix: tuple[str, int]) -> None:
    text = f"{count}{suffix[0]}"
    assert size(text) == count << suffix[1]
    assert format_size(count << suffix[1]) == text


@given(st.text().filter(lambda text: not re.fullmatch("0*[1-9][0-9]*(Ki|Mi|Gi)?", text, re.ASCII)))
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(Exception, match="accepted: a number of elements, such as"):
        size(text)


BEYOND = len(machine.cpus()) + 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--work", "adam"], "argument --work: 'adam'; accepted: adamw_fp32, offload_pass, moments, "),
        (["--work", "moments,,accumulate"], "argument --work: ''; accepted: adamw_fp32, "),
        (["--peers", "torch,apex"], "argument --peers: 'apex'; accepted: torch, deepspeed, bitsandbytes, "),
        (["--numel", "128M"], "argument --numel: '128M'; accepted: a number of elements, such as "),
        (["--numel", "1Mi,0"], "argument --numel: '0'; accepted: a number of elements, "),
        (["--numel", "262144Gi"], "argument --numel: 262144Gi take "),
        (["--threads", "0"], "argument --threads: '0'; accepted: an integer of 1 or more"),
        (["--threads", f"1,{BEYOND}"], f"argument --threads: {BEYOND}; accepted: 1 to {BEYOND - 1}, "),
        (["--rounds", "none"], "argument --rounds: 'none'; accepted: an integer from 1 to 100000"),
        (["--processes", "-1"], "argument --processes: '-1'; accepted: an integer from 1 to 1000"),
        (["--out", __file__], f"argument --out: '{__file__}': File exists; accepted: a directory, "),
    ],
)
def test_bad_input_is_one_line(argv: list[str], message: str) -> None:
    code, out, err = bench(*argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"zenflow: error: {message}")
    assert err.count("\n") == 1


# --- the works ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> _core.Pool:
    return _core.Pool(_core.all_cores()[:1])


def build(work: str, pool: _core.Pool, names: list[str], numel: int = 70_001) -> Contest:
    return WORKS[work].build(Setting(numel, pool, _core.all_cores()[:1], names))


@pytest.mark.parametrize("work", list(WORKS))
def test_every_work_has_its_contenders_and_a_check_that_can_fail(work: str, pool: _core.Pool) -> None:
    contest = build(work, pool, ["torch", "torch foreach"])
    try:
        assert not contest.failed
        assert {OURS, ROOFLINE, "torch"} <= set(contest.calls)
        with pytest.raises(WrongResultError, match=r"^idle: "):
            contest.enter("idle", lambda: (0.0, False))
        for call in contest.calls.values():
            call()
    finally:
        contest.close()


def test_many_small_tensors_are_whole_ones(pool: _core.Pool) -> None:
    contest = build("many_small", pool, [], numel=3 * 4096 + 5)
    assert contest.numel == 3 * 4096
    assert list(contest.calls) == [ROOFLINE, OURS, "zenflow kernel"]


def test_bytes_an_element_are_those_of_the_designs_table() -> None:
    found = {work.name: round(work.bytes_per_element, 2) for work in WORKS.values()}
    assert found == {
        "adamw_fp32": 28,
        "offload_pass": 28,
        "moments": 18,
        "offload_pass_split_bf16": 18,
        "moments_bf16": 10,
        "offload_pass_int8_state": 14.06,
        "moments_int8": 6.06,
        "accumulate": 10,
        "accumulate_stats": 10,
        "many_small": 28,
    }


def test_a_peer_that_fails_is_named_and_the_others_compete(
    pool: _core.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no compiler\nwas found")

    _, count, moments = peers._OPTIMIZERS["deepspeed"]
    monkeypatch.setitem(peers._OPTIMIZERS, "deepspeed", (broken, count, moments))
    contest = build("adamw_fp32", pool, ["deepspeed", "torch"])
    assert contest.failed == {"deepspeed": "OSError: no compiler was found"}
    assert list(contest.calls) == [ROOFLINE, OURS, "torch"]


def test_a_peer_with_wrong_numbers_is_named(pool: _core.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense.Peer, "step", lambda _: None)
    contest = build("offload_pass", pool, ["torch"])
    assert contest.failed["torch"].startswith("WrongResultError: torch: exp_avg: ")
    assert "torch" not in contest.calls


def test_our_own_wrong_numbers_are_an_error(pool: _core.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "accumulate", lambda *_: (0.0, False))
    with pytest.raises(WrongResultError, match=r"^zenflow: total: "):
        build("accumulate", pool, ["torch"])


def test_rounded_numbers_have_to_be_neighbours_and_without_drift() -> None:
    exact = torch.rand(50_000, dtype=torch.float64).add_(1.0)
    low = (exact.float().view(torch.int32) & -0x10000).view(torch.float32)
    high = low + 2**-7
    chance = torch.rand(len(exact), dtype=torch.float64) < (exact - low) * 2**7
    check_rounded("random", torch.where(chance, high, low).bfloat16(), exact)
    with pytest.raises(WrongResultError, match=r"^down: rounded by "):
        check_rounded("down", low.bfloat16(), exact)
    far = exact.bfloat16()
    far[7] += 0.05
    with pytest.raises(WrongResultError, match=r"^far: .* at sampled element 7, "):
        check_rounded("far", far, exact)


def test_nan_is_never_close() -> None:
    with pytest.raises(WrongResultError, match=r"^lost: nan at "):
        check_close("lost", torch.tensor([1.0, math.nan]), torch.ones(2, dtype=torch.float64))


# --- roofline passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16, torch.uint8], ids=str
)
def test_a_pass_leaves_every_bit_and_copies_whole_lines(dtype: torch.dtype, pool: _core.Pool) -> None:
    memory, numel = Memory(), 64 * 100 + 63
    arrays = [memory.empty(numel, dtype) for _ in range(4)]
    for array in arrays:
        array.view(torch.uint8).random_(0, 256)
    before = [array.clone().view(torch.uint8) for array in arrays]
    written = memory.empty(numel, dtype)
    _core.roofline(pool, arrays[0], arrays[1:], written)
    for array, start in zip(arrays, before, strict=True):
        assert torch.equal(array.view(torch.uint8), start)
    whole = 64 * 100
    assert torch.equal(written[:whole].view(torch.uint8), arrays[0][:whole].view(torch.uint8))
    assert not written[whole:].view(torch.uint8).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(64, dtype=torch.float64), []), "read"),
        ((torch.zeros(64), [torch.zeros(65)]), "updates"),
        ((torch.zeros(64), [torch.zeros(64, dtype=torch.bool).expand(64), torch.zeros(63)]), "updates"),
        ((torch.zeros(64), [], torch.zeros(65)[1:]), "write"),
        ((torch.zeros(64), [], torch.zeros(63)), "write"),
        ((torch.zeros(64, 2)[:, 0], []), "read"),
    ],
)
def test_a_pass_refuses_what_it_cannot_go_over(
    arguments: tuple[Any, ...], message: str, pool: _core.Pool
) -> None:
    with pytest.raises(ZenFlowError, match=message):
        _core.roofline(pool, *arguments)


def test_a_pass_takes_tensors_only(pool: _core.Pool) -> None:
    with pytest.raises(TypeError, match=r"accepted: a torch\.Tensor"):
        _core.roofline(pool, [0.0] * 64, [])


# --- timing ------------------------------------------------------------------------------------------


def test_rounds_call_each_once_in_rotating_order() -> None:
    called: list[str] = []
    done: list[int] = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = time_rounds(calls, 3, lambda: done.append(len(called)), pause=0.0)
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"
    assert done == [3, 6, 9, 12]
    for timed in times.values():
        assert len(timed.wall) == len(timed.cpu) == 3


def test_ratios_are_taken_within_rounds() -> None:
    # The machine slows down by ten in the middle: medians of each alone would compare unlike rounds.
    times = {
        "torch": ([2.0, 20.0, 30.0], [2.0, 20.0, 30.0]),
        ROOFLINE: ([0.5, 5.0, 9.0], [0.5, 5.0, 9.0]),
        OURS: ([1.0, 10.0, 10.0], [2.0, 20.0, 20.0]),
    }
    roofline, ours, torchs = contest_rows(times, numel=1000, bytes_per_element=28)
    assert [row.name for row in (roofline, ours, torchs)] == [ROOFLINE, OURS, "torch"]
    assert ours.ratio == (1.0, 1.0, 1.0)
    assert torchs.ratio == pytest.approx((2.0, 2.0, 2.8))
    assert roofline.ratio == pytest.approx((0.5, 0.5, 0.82))
    assert (roofline.roofline_share, ours.roofline_share, torchs.roofline_share) == (1.0, 0.5, 0.25)
    assert ours.ms == pytest.approx((10e3, 2.8e3, 10e3))
    assert ours.ns_per_element == pytest.approx(1e7)
    assert ours.gb_per_s == pytest.approx(1e-9 * 1000 * 28 / 10.0)
    assert (ours.cores, ours.rounds) == (2.0, 3)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_a_spread_is_in_order_and_within(values: list[float]) -> None:
    median, low, high = spread(values)
    assert min(values) <= low * (1 + 1e-9)
    assert low <= median * (1 + 1e-9)
    assert median <= high * (1 + 1e-9)
    assert high <= max(values) * (1 + 1e-9)


def test_memory_is_private_and_starts_nowhere_twice() -> None:
    memory = Memory()
    arrays = [memory.empty(1, torch.float32) for _ in range(16)]
    assert len({array.data_ptr() % (4 << 20) for array in arrays}) == 16
    address = f"{arrays[0].data_ptr():x}"
    maps = Path("/proc/self/maps")
    if maps.exists():
        rights = [
            line.split()[1]
            for line in maps.read_text().splitlines()
            if int(line.split("-")[0], 16) <= int(address, 16) < int(line.split("-")[1].split()[0], 16)
        ]
        assert rights == ["rw-p"]  # huge pages are for private memory


# --- processes ---------------------------------------------------------------------------------------


def test_passes_are_made_on_one_thread_on_all_and_as_the_works_are() -> None:
    jobs = plan_jobs(
        plan(["moments", "accumulate"], numels=[64, 128], threads=[2, 4], cpus=list(range(8)), cores=8)
    )
    assert [(job.work, job.numel, len(job.cores)) for job in jobs] == [
        (kind, numel, threads)
        for numel in (64, 128)
        for kind, threads in [
            (PASSES, 8),
            ("moments", 2),
            ("moments", 4),
            ("accumulate", 2),
            ("accumulate", 4),
        ]
    ]
    # Those of a work's own number of threads are in its contest.
    every, elsewhere = [1, 2, 4, 8], [1, 8]
    assert jobs[0].passes == {"read": every, "copy": every, "moments": elsewhere, "accumulate": elsewhere}


def test_a_job_survives_its_way_to_a_worker() -> None:
    for job in plan_jobs(plan(list(WORKS), peers=["torch"])):
        assert Job.from_json(job.to_json()) == job


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(
        WorkerError, match="process of nothing with 4096 elements ended with code 1: KeyError: 'noth"
    ):
        run_all(plan(["nothing"], rounds=1, threads=[1]), lambda *_: None, lambda: None)


def test_a_worker_that_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenflow.cli.bench.session.sys.executable", "/bin/sh")
    monkeypatch.setattr(Job, "to_json", lambda _: "")
    real = __import__("subprocess").Popen
    monkeypatch.setattr(
        "zenflow.cli.bench.session.subprocess.Popen",
        lambda command, **options: real([command[0], "-c", "echo out of memory >&2; kill -9 $$"], **options),
    )
    with pytest.raises(WorkerError, match="was killed by signal 9: out of memory"):
        run_all(plan(["accumulate"]), lambda *_: None, lambda: None)


# --- what is doubtful --------------------------------------------------------------------------------


def outcome(**changes: Any) -> Outcome:
    options = {"numel": 64 << 20, "times": {}, "notes": {}, "failed": {}, "huge_share": 1.0, "isa": "avx2"}
    return Outcome(**(options | changes))


def test_siblings_and_caches_are_read_from_sysfs(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert machine.sharing_cpus([0, 1], tmp_path) == []
    assert machine.sharing_cpus([0, 1, 3], tmp_path) == [[1, 3]]
    assert machine.sharing_cpus([7, 8], tmp_path) == []
    for index, text in enumerate(["48K", "2048K", "32M"]):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{text}\n")
    assert machine.last_level_cache(tmp_path) == 32 << 20
    assert machine.last_level_cache(tmp_path / "none") is None


def test_doubts_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "transparent_huge_pages", lambda: "madvise")
    monkeypatch.setattr(doubts, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(doubts, "sharing_cpus", lambda _: [])
    large, small = plan(["accumulate", "moments"], numels=[1 << 20]), plan(["accumulate", "moments"])
    assert doubts.doubts_before(large) == []
    (few,) = doubts.doubts_before(small)
    assert "4Ki elements are few: the arrays of accumulate, moments are less than 4 times" in few

    monkeypatch.setattr(doubts, "sharing_cpus", lambda cpus: [[0, 2]] if len(cpus) == 3 else [])
    (shared,) = doubts.doubts_before(
        plan(["moments"], numels=[1 << 20], threads=[2, 3], cpus=[0, 1, 2, 3], cores=2)
    )
    assert shared == "3 threads share physical cores (CPUs 0+2), of which there are 2"

    monkeypatch.setattr(doubts, "transparent_huge_pages", lambda: "never")
    (pages,) = doubts.doubts_before(large)
    assert "pages of 4 KiB" in pages


def test_doubts_come_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "transparent_huge_pages", lambda: "madvise")
    job = plan_jobs(plan(["moments"]))[1]
    assert doubts.doubts_after([Result(job, [outcome(), outcome()], others=0.1)]) == []
    (portable,) = doubts.doubts_after([Result(job, [outcome(isa="portable")])])
    assert "portable" in portable
    (pages,) = doubts.doubts_after([Result(job, [outcome(), outcome(huge_share=0.25)])])
    assert "only 25% of the memory lay in huge pages" in pages
    # A small process is mostly Python.
    assert doubts.doubts_after([Result(job, [outcome(numel=4096, huge_share=0.0)])]) == []
    (loaded,) = doubts.doubts_after(
        [Result(job, [outcome()], others=0.2), Result(job, [outcome()], others=1.5)]
    )
    assert loaded.startswith("other processes were using up to 1.5 CPUs (during moments)")


# --- the whole command -------------------------------------------------------------------------------

TINY = ("--processes", "2", "--rounds", "2", "--threads", "1", "--peers", "torch,deepspeed")


@pytest.mark.usefixtures("without_deepspeed")
def test_one_work_in_two_processes(tmp_path: Path) -> None:
    code, out, err = bench(
        "--work", "accumulate", "--numel", "4Ki,10000", *TINY, "--json", "--out", str(tmp_path / "new")
    )
    assert code == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == ["machine", "peers", "warnings", "rows"]
    assert result["machine"]["isa"] == _core.isas()[0]
    assert any("elements are few" in warning for warning in result["warnings"])
    torchs, deepspeed = result["peers"]
    assert (torchs["name"], torchs["timed"], torchs["note"]) == ("torch", True, "")
    assert (deepspeed["name"], deepspeed["version"], deepspeed["timed"]) == ("deepspeed", None, False)
    assert deepspeed["note"] == "not installed: pip install deepspeed ninja"

    rows = result["rows"]
    contest = [
        row for row in rows if (row["work"], row["numel"]) == ("accumulate", 10000) and row["threads"] == 1
    ]
    assert [row["impl"] for row in contest] == [ROOFLINE, OURS, "torch", "torch cast"]
    for row in rows:
        assert list(row) == ROW
        assert row["rounds"] == 4  # of both processes
        assert 0.0 < row["ms_p10"] <= row["ms_median"] <= row["ms_p90"]
        assert row["ns_per_element"] == pytest.approx(1e6 * row["ms_median"] / row["numel"])
        assert row["gb_per_s"] > 0.0
    ours = contest[1]
    assert (ours["ratio_to_zenflow"], ours["ratio_p10"], ours["ratio_p90"]) == (1.0, 1.0, 1.0)
    assert contest[0]["roofline_share"] == 1.0
    assert ours["gb_per_s"] == pytest.approx(10 / ours["ns_per_element"])

    every = sorted({1, len(_core.all_cores())})
    for numel in (4096, 10000):
        for name in ("read", "copy", "accumulate"):
            threads = [
                row["threads"]
                for row in rows
                if (row["work"], row["impl"], row["numel"]) == (name, ROOFLINE, numel)
            ]
            assert sorted(threads) == every

    picture = tmp_path / "new" / "bench.png"
    assert f"plot: {picture}" in err.splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.usefixtures("without_deepspeed")
def test_works_in_tables(tmp_path: Path) -> None:
    works = ["many_small", "moments_int8"]
    code, out, err = bench(
        "--work", ",".join(works), "--numel", "8Ki", *TINY, "--processes", "1", "--out", str(tmp_path)
    )
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    for work in works:
        assert any(line.startswith(f"{work}: ") for line in lines)
        assert f"process 1 of 1: {work}, 8Ki, 1 thread" in err.splitlines()
    assert len([line for line in lines if re.match(rf"{OURS} +\d", line)]) == len(works)
    assert "deepspeed: not installed: pip install deepspeed ninja" in lines
    assert lines[-1] == f"plot: {tmp_path / 'bench.png'}"


def test_a_failed_process_ends_the_command_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WorkerError("the process of moments was killed by signal 9: out of memory")

    monkeypatch.setattr("zenflow.cli.bench.session.run_all", fail)
    code, out, err = bench("--work", "moments", "--numel", "4Ki", "--out", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "zenflow: the process of moments was killed by signal 9: out of memory"
