"""``zenflow demo``: what it prints and draws, and that an interrupted one ends in the same bits."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason='needs "torch-zenflow[cli]"')
pytest.importorskip("matplotlib", reason='needs "torch-zenflow[cli]"')

from zenflow.cli import main
from zenflow.cli.common import UsageError
from zenflow.cli.demo.checkpoint import Store
from zenflow.cli.demo.data import Corpus, draw, language_reference, standard_library
from zenflow.cli.demo.model import ByteGPT
from zenflow.cli.demo.runs import Record, run_all
from zenflow.cli.demo.settings import FINE_TUNING, PRETRAINING, Recipe, Settings

NAMES = ["adamw", "exact", "zenflow", "zenflow_late"]

# Windows of 4 and a new selection after 16 steps lie within 18.
TINY = Settings(
    steps=18, pretrain_steps=5, width=128, blocks=1, heads=2, context=16, batch=2, validation_batches=2
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def demo(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``zenflow demo --quick --threads 1``."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["demo", "--quick", "--threads", "1", *argv])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Folder, stdout and stderr of one whole demo, its plot in ``plot`` and its checkpoints in ``kept``."""
    folder = tmp_path_factory.mktemp("demo")
    code, out, err = demo("--json", "--out", str(folder / "plot"), "--resume", str(folder / "kept"))
    assert code == 0
    return folder, out, err


# --- what it prints ----------------------------------------------------------------------------------


def test_json_is_one_object_of_the_promised_shape(quick: tuple[Path, str, str]) -> None:
    result = json.loads(quick[1])
    assert list(result) == ["machine", "config", "runs"]
    assert result["machine"]["torch_threads"] == 1
    assert result["machine"]["cores"] >= 1
    assert (result["config"]["steps"], result["config"]["seed"]) == (12, 0)
    assert [run["name"] for run in result["runs"]] == NAMES
    for run in result["runs"]:
        assert list(run) == [
            "name",
            "val_loss",
            "step_seconds",
            "stall_share",
            "host_bytes_per_param",
            "pcie_bytes_per_param_step",
        ]
        assert 2.0 < run["val_loss"] < 5.0
        assert run["step_seconds"] > 0.0
        assert 0.0 <= run["stall_share"] < 1.0


def test_the_runs_differ_as_their_recipes_do(quick: tuple[Path, str, str]) -> None:
    adamw, exact, zenflow, late = json.loads(quick[1])["runs"]
    assert (adamw["stall_share"], adamw["host_bytes_per_param"]) == (0.0, 8.0)
    assert adamw["pcie_bytes_per_param_step"] == 0.0
    # Exact is AdamW but for rounding; a window is not, and one step of lateness costs more than it.
    assert exact["val_loss"] == pytest.approx(adamw["val_loss"], abs=1e-4)
    assert 1e-4 < abs(zenflow["val_loss"] - adamw["val_loss"]) < abs(late["val_loss"] - adamw["val_loss"])
    for run in (exact, zenflow, late):
        assert 11.0 < run["host_bytes_per_param"] <= 12.0
    # fp32: 4 bytes down, 4 bytes up in each window, somewhat more where the selection changes.
    assert 7.0 < exact["pcie_bytes_per_param_step"] < 9.0
    assert 4.5 < zenflow["pcie_bytes_per_param_step"] < 6.0
    assert 4.5 < late["pcie_bytes_per_param_step"] < 6.0


def test_plot_is_a_picture(quick: tuple[Path, str, str]) -> None:
    folder, _, err = quick
    picture = folder / "plot" / "demo.png"
    assert f"plot: {picture}" in err.splitlines()
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 20_000


def test_progress_goes_to_stderr_with_no_warning(quick: tuple[Path, str, str]) -> None:
    lines = quick[2].splitlines()
    labels = [recipe.label for recipe in (PRETRAINING, *FINE_TUNING)]
    assert [line.partition(": validation loss ")[0] for line in lines[:-1]] == labels


def test_a_finished_demo_is_told_again_from_its_checkpoints(quick: tuple[Path, str, str]) -> None:
    folder, out, _ = quick
    kept = ("--resume", str(folder / "kept"), "--out", str(folder / "again"))
    assert demo("--json", *kept)[1] == out

    code, table, _ = demo(*kept)
    assert code == 0
    for run, recipe in zip(json.loads(out)["runs"], FINE_TUNING, strict=True):
        row = next(line for line in table.splitlines() if line.startswith(f"{recipe.label} "))
        assert f"{run['val_loss']:.4f}" in row
    assert table.splitlines()[-1] == f"plot: {folder / 'again' / 'demo.png'}"


def test_checkpoints_of_other_settings_are_refused(quick: tuple[Path, str, str]) -> None:
    folder = quick[0]
    code, out, err = demo("--seed", "1", "--resume", str(folder / "kept"), "--out", str(folder / "other"))
    assert (code, out) == (2, "")
    assert err.startswith("zenflow: error: argument --resume: ")
    assert "was made with seed=0, this demo has seed=1; accepted: the same settings" in err
    assert err.count("\n") == 1


def test_data_files_replace_the_reference(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    code, out, _ = demo(
        "--json", "--steps", "1", "--pretrain-steps", "0", "--out", str(tmp_path), "--data", *files
    )
    assert code == 0
    assert json.loads(out)["config"]["data"]["fine_tuning"].startswith("a.txt, b.txt, 10000 bytes")


# --- interrupted and resumed -------------------------------------------------------------------------


class Cut:
    """A reporter that interrupts at the first event ``kind`` once ``after`` steps were made."""

    def __init__(self, kind: str = "never", after: int = 0) -> None:
        self.kind = kind
        self.after = after
        self.steps = 0

    def event(self, kind: str) -> None:
        if kind == self.kind and self.steps >= self.after:
            raise KeyboardInterrupt

    def begin(self, _recipe: Recipe, _steps: int, _done: int) -> None:
        self.event("begin")

    def advance(self, _loss: float) -> None:
        self.steps += 1
        self.event("advance")

    def end(self, _validation_loss: float) -> None:
        self.event("end")


@pytest.fixture(scope="module")
def corpora() -> tuple[Corpus, Corpus]:
    return standard_library(100_000), language_reference()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All final weights that the checkpoints in ``folder`` hold."""
    result = {}
    for name in [PRETRAINING.name, *NAMES]:
        state: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)["state"]
        result |= {f"{name}.{key}": tensor for key, tensor in state["model"].items()}
    return result


def outcome(records: dict[str, Record]) -> dict[str, tuple[list[float], float | None, int, int]]:
    """What must not depend on interruptions: all of a record but its times."""
    return {
        name: (record.losses, record.validation_loss, record.host_bytes, record.parameters)
        for name, record in records.items()
    }


@pytest.fixture(scope="module")
def whole(
    corpora: tuple[Corpus, Corpus], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Record], dict[str, torch.Tensor]]:
    """Records and weights of a demo that is not interrupted, and saves only at the end of each run."""
    folder = tmp_path_factory.mktemp("whole")
    records = run_all(TINY, *corpora, Cut(), Store(folder, TINY, every=1000))
    return records, weights(folder)


def test_every_run_starts_from_the_pretrained_weights_and_the_same_batch(
    whole: tuple[dict[str, Record], dict[str, torch.Tensor]], corpora: tuple[Corpus, Corpus]
) -> None:
    records, tensors = whole
    model = ByteGPT(**TINY.model_arguments)
    prefix = f"{PRETRAINING.name}."
    model.load_state_dict(
        {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    )
    generator = torch.Generator().manual_seed(TINY.seed + 1)
    first = model(*draw(corpora[1].training, generator, TINY.batch, TINY.context)).item()
    assert [records[name].losses[0] for name in NAMES] == [first] * len(NAMES)


@pytest.mark.parametrize(("kind", "after"), [("advance", 5), ("advance", 7), ("begin", 1), ("end", 1)])
def test_an_interrupted_demo_ends_in_the_same_bits(
    kind: str,
    after: int,
    whole: tuple[dict[str, Record], dict[str, torch.Tensor]],
    corpora: tuple[Corpus, Corpus],
    tmp_path: Path,
) -> None:
    interruptions = 0
    while True:
        try:
            records = run_all(TINY, *corpora, Cut(kind, after), Store(tmp_path, TINY, every=3))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= len(NAMES)
    assert outcome(records) == outcome(whole[0])
    got = weights(tmp_path)
    assert list(got) == list(whole[1])
    for name, tensor in whole[1].items():
        assert torch.equal(got[name], tensor), name
    for name in NAMES:
        assert records[name].bytes_moved == whole[0][name].bytes_moved


def test_interrupted_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zenflow.cli.demo.progress.Bars.advance", interrupt)
    code, out, err = demo("--out", str(tmp_path), "--resume", str(tmp_path / "kept"))
    assert (code, out) == (130, "")
    assert err == "zenflow: interrupted; the same command goes on from there\n"


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, TINY, every=1)
    assert store.load("adamw") is None
    store.save("adamw", {"weight": torch.zeros(1000)})
    saved = store.load("adamw")
    assert saved is not None
    assert torch.equal(saved["weight"], torch.zeros(1000))
    path = tmp_path / "adamw.pt"
    whole = path.read_bytes()
    for broken in (b"", b"garbage", whole[: len(whole) // 2]):
        path.write_bytes(broken)
        with pytest.raises(UsageError, match=r"argument --resume: .*adamw\.pt' can't be read"):
            store.load("adamw")


# --- the parts ---------------------------------------------------------------------------------------


def test_targets_are_one_byte_ahead_and_nothing_held_out_is_trained_on() -> None:
    corpus = Corpus.split("counting", bytes(range(200)))
    assert corpus.training.tolist() == list(range(180))
    assert corpus.held_out.tolist() == list(range(180, 200))
    inputs, targets = draw(corpus.training, torch.Generator().manual_seed(0), batch=500, context=16)
    assert torch.equal(inputs + 1, targets)
    assert inputs.min() == 0
    assert targets.max() == 179


def test_every_matrix_is_large_enough_to_be_offloaded() -> None:
    model = ByteGPT(**Settings().model_arguments)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert 0.8e6 < sum(sizes) < 1.2e6
    assert min(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2) >= 16_384


def test_prediction_sees_no_later_byte() -> None:
    model = ByteGPT(width=32, blocks=2, heads=2, context=8, seed=0)
    inputs = torch.arange(8)[None].repeat(2, 1)
    inputs[1, 5:] = 200
    ignored = -100
    targets = torch.full((2, 8), ignored)
    targets[:, :5] = 7
    first, second = (model(inputs[i : i + 1], targets[i : i + 1]) for i in range(2))
    assert torch.equal(first, second)
    targets[:, 5] = 7
    first, second = (model(inputs[i : i + 1], targets[i : i + 1]) for i in range(2))
    assert not torch.equal(first, second)
