"""From construction to the end of the process: copies, forks, failures, interrupts, exits. Nothing may hang.

Where a hang is the failure a watchdog ends the run with a traceback of every thread.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow.pipeline
from models import (
    SETTINGS,
    Tower,
    assert_same_trace,
    assert_same_weights,
    attached,
    batch,
    loss_of,
    pending,
    pipeline_of,
    seeded,
    slow_host,
    train,
    unattached,
)
from zenflow import (
    ArgumentError,
    EngineClosedError,
    EngineFailedError,
    ForkedProcessError,
    HostMemoryError,
    ZenFlowAdamW,
)
from zenflow._core import Engine

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(120, exit=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Python's own advice on forking with threads; that it works is what is tested.
        warnings.filterwarnings("ignore", ".*use of fork\\(\\) may lead to deadlocks.*", DeprecationWarning)
        yield
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(threads)


# --- copies of the optimizer ---------------------------------------------------------------------------


def both_copied(how: str, model: nn.Module, optimizer: ZenFlowAdamW) -> Any:
    if how == "deepcopy":
        return copy.deepcopy((model, optimizer))
    if how == "pickle":
        return pickle.loads(pickle.dumps((model, optimizer)))
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("build", [attached, unattached])
def test_a_copy_in_mid_window_steps_as_the_original(
    how: str, staleness: int, build: Callable[..., ZenFlowAdamW]
) -> None:
    model = seeded(Tower, torch.bfloat16)
    optimizer = build(model, staleness=staleness)
    train(model, optimizer, range(7))
    twin, copied = both_copied(how, model, optimizer)
    assert copied.param_groups[0]["params"][0] is next(iter(twin.parameters()))
    want = train(model, optimizer, range(7, 16))
    got = train(twin, copied, range(7, 16))
    assert_same_trace(got, want)
    assert copied.stats().steps == optimizer.stats().steps == 16


def test_a_copy_before_the_first_step() -> None:
    model = seeded(Tower)
    twin, copied = copy.deepcopy((model, attached(model)))
    assert_same_trace(train(twin, copied, range(6)), train(m := seeded(Tower), unattached(m), range(6)))


def test_a_copy_outlives_the_original() -> None:
    model = seeded(Tower)
    optimizer = attached(model)
    train(model, optimizer, range(5))
    twin, copied = copy.deepcopy((model, optimizer))
    optimizer.close()
    del optimizer
    gc.collect()
    train(twin, copied, range(5, 8))


# --- what stays behind ---------------------------------------------------------------------------------


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@linux
@pytest.mark.parametrize("how", ["closed", "collected", "dropped"])
def test_20_optimizers_leave_neither_memory_nor_threads(how: str) -> None:
    """12 MB of states each. Dropped: without a run of the cycle collector, which may be far away."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    model(torch.ones(1, 1024)).sum().backward()

    def life() -> None:
        optimizer = attached(model, bucket_numel=1 << 18)
        model(torch.ones(1, 1024))
        optimizer.step()
        if how == "closed":
            optimizer.close()

    life()
    gc.collect()
    threads, memory = native_threads(), resident()
    if how == "dropped":
        gc.disable()
    try:
        for _ in range(20 if how != "collected" else 8):  # a collection looks at all of torch
            life()
            if how == "collected":
                gc.collect()
        assert native_threads() == threads
        assert resident() - memory < 2 * 12 * 1024 * 1024
    finally:
        gc.enable()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_last_step_lands_when_the_optimizer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that builds an optimizer, trains and returns: the model has all of it."""
    model, plain = seeded(Tower), seeded(Tower)

    def fit() -> None:
        with slow_host(monkeypatch):
            optimizer = attached(model)
        train(model, optimizer, range(6))
        assert pending(optimizer)

    fit()
    gc.collect()
    other = unattached(plain)
    train(plain, other, range(6))
    assert_same_weights(model, plain)


# --- closing -------------------------------------------------------------------------------------------


def test_close_is_idempotent_and_final(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = seeded(Tower), seeded(Tower)
    with slow_host(monkeypatch):
        optimizer = attached(model)
    train(model, optimizer, range(6))
    assert pending(optimizer)
    optimizer.close()
    optimizer.close()
    train(plain, unattached(plain), range(6))
    assert_same_weights(model, plain)
    loss_of(model, 6).backward()
    for call in (optimizer.step, optimizer.synchronize, optimizer.state_dict):
        with pytest.raises(EngineClosedError):
            call()
    with pytest.raises(EngineClosedError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert_same_weights(model, plain)
    assert optimizer.stats().steps == 6
    optimizer.zero_grad()


def test_the_context_closes_also_on_an_exception() -> None:
    model = seeded(Tower)
    with attached(model) as optimizer:
        train(model, optimizer, range(3))
    with pytest.raises(EngineClosedError):
        optimizer.synchronize()
    with pytest.raises(KeyError, match="on purpose"), attached(model) as second:
        raise KeyError("on purpose")
    with pytest.raises(EngineClosedError):
        second.synchronize()


def test_closing_before_the_first_step() -> None:
    attached(seeded(Tower)).close()


class Proxy:
    """An engine with one method replaced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


# --- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [attached, unattached])
def test_a_failed_engine_says_why_at_every_call(
    build: Callable[..., ZenFlowAdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(Tower)
    with slow_host(monkeypatch):
        optimizer = build(model)
    train(model, optimizer, range(6))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(6, 8))
    pipeline_of(optimizer).engine.poison("the reason")
    assert (pending(optimizer) > 0) == (build is attached)
    if build is attached:
        with pytest.raises(EngineFailedError, match="the reason"):
            model(batch(0))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    calls: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.synchronize,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
    ]
    for call in calls * 2:
        with pytest.raises(EngineFailedError, match="the reason"):
            call()
    optimizer.close()
    model(batch(0))
    # What the message advises works.
    train(model, again := build(model), range(1))
    again.load_state_dict(saved)
    train(model, again, range(2))


def test_memory_that_there_is_not() -> None:
    engine = Engine()
    with pytest.raises(HostMemoryError, match=r"\d{6,} bytes.*master weight") as caught:
        engine.add_parameter(1 << 45)
    assert isinstance(caught.value, MemoryError)
    # The engine is as it was.
    assert engine.add_parameter(10) == 0
    engine.close()


def test_a_model_too_large_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor fails, and leaves nothing on the model."""

    class Small(Proxy):
        def add_parameter(self, numel: int, state_dtype: str) -> int:
            return self._engine.add_parameter(numel << 40, state_dtype)

    model = seeded(Tower)
    with monkeypatch.context() as patch:
        patch.setattr(zenflow.pipeline, "Engine", lambda cores: Small(Engine(cores)))
        with pytest.raises(HostMemoryError, match="bytes"):
            attached(model)
    gc.collect()
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())
    train(model, attached(model), range(2))


def test_an_error_before_a_step_changes_nothing() -> None:
    """A gradient that can't be used, and a rate that can't: refused, then all goes on as if never asked."""
    model, plain = seeded(Tower), seeded(Tower)
    optimizer, other = attached(model), unattached(plain)
    train(model, optimizer, range(5))
    train(plain, other, range(5))
    for spoil in ("grad", "lr"):
        loss_of(model, 5).backward()
        if spoil == "grad":
            model.embed.weight.grad = torch.zeros_like(model.embed.weight).to_sparse()
        else:
            optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ArgumentError):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = SETTINGS["lr"]
        optimizer.zero_grad()
    assert_same_trace(train(model, optimizer, range(5, 12)), train(plain, other, range(5, 12)))


class Interrupting(Proxy):
    """An engine whose next wait that yields anything is cut short by Ctrl-C, the completions lost with it."""

    armed = False

    def wait(self, timeout: float) -> Any:
        done = self._engine.wait(timeout)
        if self.armed and done:
            self.armed = False
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize("where", ["step", "forward", "synchronize", "state_dict", "save", "close"])
def test_an_interrupt_in_a_wait_ends_in_an_error_not_in_a_hang(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Interrupting] = []

    def factory(cores: list[int] | None = None) -> Any:
        engines.append(Interrupting(Engine(cores, delay=0.005, chunk=1024)))
        return engines[-1]

    with monkeypatch.context() as patch:
        patch.setattr(zenflow.pipeline, "Engine", factory)
        model = seeded(Tower)
        optimizer = (unattached if where == "step" else attached)(model)
    train(model, optimizer, range(5))
    if where == "step":
        loss_of(model, 5).backward()
    engines[0].armed = True
    calls: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "forward": lambda: model(batch(5)),
        "synchronize": optimizer.synchronize,
        "state_dict": optimizer.state_dict,
        "save": model.state_dict,
        "close": optimizer.close,
    }
    with pytest.raises(KeyboardInterrupt):
        calls[where]()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises((EngineFailedError, EngineClosedError)):
        optimizer.step()
    with pytest.raises((EngineFailedError, EngineClosedError)):
        optimizer.synchronize()
    optimizer.close()
    model(batch(0))


# --- forks ---------------------------------------------------------------------------------------------


def in_a_fork(task: Callable[[], None], seconds: float = 60) -> None:
    """Runs ``task`` in a forked child; its exception is this one's failure, and so is a hang."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        # The watchdog's thread stayed in the parent; to ask it to stop would hang.
        message = ""
        try:
            task()
        except BaseException as error:  # noqa: BLE001
            message = repr(error)
        os.write(writer, message.encode()[:4000])
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    assert not message


@forks
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_forked_child_gets_an_error_and_the_parent_notices_nothing(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = seeded(Tower), seeded(Tower)
    with slow_host(monkeypatch):
        optimizer = attached(model, staleness=staleness)
    other = unattached(plain, staleness=staleness)

    groups = other.state_dict()["param_groups"]

    def task() -> None:
        assert pending(optimizer)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        saved = {"state": {}, "param_groups": groups}
        calls: list[Callable[[], Any]] = [
            optimizer.step,
            optimizer.synchronize,
            optimizer.state_dict,
            lambda: pickle.dumps(optimizer),
            lambda: optimizer.load_state_dict(saved),
        ]
        if staleness == 0:
            calls += [lambda: model(batch(0)), model.state_dict]
        for call in calls:
            with pytest.raises(ForkedProcessError):
                call()
        # One of its own works: worker and pool are new.
        twin = seeded(Tower)
        train(twin, attached(twin), range(3))

    for first in (0, 4, 8):
        got, want = (
            train(net, opt, range(first, first + 4)) for net, opt in ((model, optimizer), (plain, other))
        )
        assert_same_trace(got, want)
        in_a_fork(task)


@forks
def test_a_forked_child_may_drop_what_it_inherited() -> None:
    model = seeded(Tower)
    kept = [attached(model)]
    train(model, kept[0], range(5))

    def task() -> None:
        kept.clear()
        gc.collect()
        model(batch(0))
        copy.deepcopy(model)

    in_a_fork(task)
    train(model, kept[0], range(5, 7))


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Loads in a worker process, which has inherited a model and an optimizer by fork."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)


@forks
def test_dataloader_workers_by_fork_during_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = seeded(Tower), seeded(Tower)
    with slow_host(monkeypatch):
        optimizer = attached(model)
    other = unattached(plain)
    train(model, optimizer, range(3))
    train(plain, other, range(3))
    got, want = [], []
    assert pending(optimizer)
    loader = torch.utils.data.DataLoader(
        Tokens(), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    for step, tokens in enumerate(loader):
        assert torch.equal(tokens, batch(step))
        got += train(model, optimizer, [step])
        want += train(plain, other, [step])
    assert len(got) == 9
    assert_same_trace(got, want)


# --- speed and number of threads change no bit ---------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("update_interval", [1, 4])
def test_a_slow_host_changes_no_bit(
    staleness: int, update_interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"staleness": staleness, "update_interval": update_interval}
    plain = seeded(Tower, torch.bfloat16)
    want = train(plain, unattached(plain, **options), range(12))
    for delay, build in ((0.0005, attached), (0.003, unattached)):
        model = seeded(Tower, torch.bfloat16)
        with slow_host(monkeypatch, delay):
            optimizer = build(model, **options)
        assert_same_trace(train(model, optimizer, range(12)), want)
        assert optimizer.stats().stall_seconds > 0


def test_neither_cores_nor_torchs_threads_change_a_bit() -> None:
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for cores in ("auto", available[:1], available):
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert digest(cores=cores) == digest()


def digest(**options: Any) -> str:
    """Of weights after steps with gradients by hand: torch computes nothing."""
    model = seeded(Tower, torch.bfloat16)
    optimizer = unattached(model, **options)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        optimizer.step()
    optimizer.synchronize()
    sums = hashlib.sha256()
    for param in model.parameters():
        sums.update(param.detach().view(torch.int16).numpy().tobytes())
    optimizer.close()
    return sums.hexdigest()


# --- ends of processes ---------------------------------------------------------------------------------

ENDS = """
    import os, signal, sys, time
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    import pytest
    from models import *
    from zenflow import EngineFailedError
    import test_lifecycle

    def training(build, **options):
        patch = pytest.MonkeyPatch()
        with slow_host(patch, 0.01):
            model = seeded(Tower)
            optimizer = build(model, **options)
        train(model, optimizer, range(2))
        return model, optimizer

    def end(case):
        global model, optimizer, keep
        if case == "mid-window":
            model, optimizer = training(attached)
            assert pending(optimizer)
        elif case == "late":
            model, optimizer = training(attached, staleness=1)
            assert pending(optimizer)
        elif case == "closed":
            model, optimizer = training(attached)
            optimizer.close()
        elif case == "cycle":
            model, optimizer = training(attached)
            keep = [model, optimizer]
            keep.append(keep)
        elif case == "error":
            model, optimizer = training(attached)
            sys.stderr = open(os.devnull, "w")
            raise SystemExit(3)
        elif case == "interrupt":
            model, optimizer = training(attached, max_staging_bytes=20_000)
            parent = os.getppid()
            count = 0
            print("ready", flush=True)
            try:
                while True:
                    train(model, optimizer, [count])
                    count += 1
            except KeyboardInterrupt:
                pass
            try:
                train(model, optimizer, range(2))
            except EngineFailedError:
                pass

    cases = ["mid-window", "late", "closed", "cycle", "error", "interrupt"]
    failed = []
    for case in cases:
        sys.stdout.flush()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writer, 1)
            os.close(writer)
            end(case)
            sys.exit(0)
        os.close(writer)
        if case == "interrupt":
            os.read(reader, 5)
            time.sleep(0.2)
            os.kill(child, signal.SIGINT)
        deadline = time.monotonic() + 60
        done = (0, 0)
        while done == (0, 0) and time.monotonic() < deadline:
            done = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        os.close(reader)
        if done == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            failed.append(case + " hangs")
        elif os.waitstatus_to_exitcode(done[1]) != (3 if case == "error" else 0):
            failed.append(f"{case} ends with {os.waitstatus_to_exitcode(done[1])}")
    assert not failed, failed
    print(test_lifecycle.digest(), flush=True)
    model, optimizer = training(attached)
    print("training", flush=True)
    while True:
        train(model, optimizer, range(100))
"""


@linux
@forks
def test_ends_of_processes() -> None:
    """Exits in mid-window, by an error, by Ctrl-C in a wait, by a kill: all end, and nothing stays behind.

    One process is the parent of them all (torch takes seconds to import) and is killed last, in the middle of
    training. It runs under OMP_NUM_THREADS=1, and computes the same bits.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENDS), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    guard = threading.Timer(110, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        found = process.stdout.readline().strip()
        assert found == digest(), process.stderr.read()
        assert process.stdout.readline().strip() == "training", process.stderr.read()
        tasks = Path(f"/proc/{process.pid}/task")
        assert len(list(tasks.iterdir())) > 1, "it has a worker"
        children = [task.joinpath("children").read_text(encoding="ascii") for task in tasks.iterdir()]
        assert not any(children), "the worker is a thread, not a process"
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


# --- counters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("update_interval", [1, 2, 4, 8])
def test_bytes_are_what_the_design_counts(dtype: torch.dtype, update_interval: int) -> None:
    """A gradient down each step, a weight up each window; for an exchange masters down, the whole state up."""
    rows, cols, windows = 64, 128, 3
    numel, size = rows * cols, dtype.itemsize
    weight = nn.Parameter(torch.randn(rows, cols).to(dtype))
    bias = nn.Parameter(torch.zeros(10, dtype=dtype))
    for ratio in (0.0, 0.25):
        optimizer = ZenFlowAdamW(
            [weight, bias],
            topk_ratio=ratio,
            update_interval=update_interval,
            select_interval=1000,
            min_offload_numel=1,
            bucket_numel=1024,
        )
        for _ in range(windows * update_interval):
            weight.grad = torch.randn(rows, cols).to(dtype)
            bias.grad = torch.ones(10, dtype=dtype)
            optimizer.step()
        stats = optimizer.stats()
        assert stats.bytes_down == size * numel * windows * update_interval
        assert stats.bytes_up == size * numel * windows + 12 * ratio * numel
        assert stats.host_bytes == 12 * numel
        assert (stats.offloaded_numel, stats.device_numel) == (numel, 10)
        assert stats.selected_share == ratio
        assert stats.steps == windows * update_interval
        optimizer.synchronize()
        assert optimizer.stats().host_elements == numel * stats.steps
        optimizer.close()


def test_an_exchange_is_counted() -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = ZenFlowAdamW([weight], topk_ratio=0.25, select_interval=2, min_offload_numel=1)
    for step in range(2):
        # The first half of the columns matters, then the other, and far more.
        grad = torch.ones(64, 128)
        grad[:, 64 * step :][:, :64] *= 100.0**step * 10
        weight.grad = grad
        optimizer.step()
        # Chosen at the second step, exchanged at the third.
    before = optimizer.stats()
    weight.grad = torch.ones(64, 128)
    optimizer.step()
    after = optimizer.stats()
    owned = 64 * 32
    assert after.bytes_down - before.bytes_down == 4 * 64 * 128 + 4 * owned
    # A stripe closes and the exchange brings three arrays.
    assert after.bytes_up - before.bytes_up == 4 * 64 * 128 // 4 + 12 * owned


def test_counters_of_time_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Tower)
    with slow_host(monkeypatch, 0.002):
        optimizer = attached(model, skip_nonfinite=True)
    fresh = optimizer.stats()
    assert (fresh.steps, fresh.skipped_steps, fresh.stall_seconds, fresh.wall_seconds) == (0, 0, 0.0, 0.0)
    assert fresh.stall_share == 0.0
    train(model, optimizer, range(4))
    loss_of(model, 4).backward()
    model.mix.grad[0, 0] = float("inf")
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    optimizer.step()  # counted again, warned of once
    stats = optimizer.stats()
    assert (stats.steps, stats.skipped_steps) == (4, 2)
    assert stats.stall_seconds > 0
    assert stats.wall_seconds > 0
    assert 0 < stats.stall_share <= 1
    assert stats.host_seconds > 0
    assert 0 < stats.staging_bytes <= 1 << 30
    assert stats.accelerator == "host"
    assert stats.threads >= 1
    optimizer.close()
    assert optimizer.stats().steps == 4


def test_staging_stays_in_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in (20_000, 60_000):
        model = seeded(Tower)
        with slow_host(monkeypatch, 0.0005):
            optimizer = attached(model, max_staging_bytes=bound)
        train(model, optimizer, range(8))
        assert optimizer.stats().staging_bytes <= bound
