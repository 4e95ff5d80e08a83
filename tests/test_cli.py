"""The command line as a whole: what it says when an argument can't be used, and when a package is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

import zenflow
from zenflow.cli import main

pytest.importorskip("rich", reason='needs "torch-zenflow[cli]"')
pytest.importorskip("matplotlib", reason='needs "torch-zenflow[cli]"')


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"zenflow {zenflow.__version__}\n"


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "zenflow.cli", "demo", "--steps", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "zenflow: error: argument --steps: 'none'; accepted: an integer of 1 or more\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND"]),
        (["demos"], ["COMMAND", "'demos'", "demo"]),
        (["demo", "--step", "3"], ["--step 3"]),
        (["demo", "--steps", "-1"], ["--steps", "'-1'", "an integer of 1 or more"]),
        (["demo", "--pretrain-steps", "-5"], ["--pretrain-steps", "'-5'", "an integer of 0 or more"]),
        (["demo", "--seed", "1e3"], ["--seed", "'1e3'", "an integer from 0 to 2147483647"]),
        (["demo", "--threads", "0"], ["--threads", "'0'", "an integer from 1 to 1024"]),
        (["demo", "--checkpoint-every", "5"], ["--checkpoint-every", "5", "--resume DIR"]),
        (["demo", "--data", "absent"], ["--data", "'absent'", "No such file", "readable files"]),
        (["demo", "--data", "."], ["--data", "'.'", "Is a directory", "readable files"]),
        (["demo", "--data", "empty"], ["--data", "'empty'", "0 bytes", "at least 2580 bytes"]),
        (["demo", "--data", "empty", "small"], ["'empty', 'small'", "100 bytes", "at least 2580 bytes"]),
        (["demo", "--out", "small"], ["--out", "'small'", "File exists", "a directory"]),
        (["demo", "--resume", "small"], ["--resume", "'small'", "File exists", "a directory"]),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("small").write_bytes(bytes(100))
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zenflow: error: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_missing_packages_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == 2
    line = 'zenflow: error: this command needs rich and matplotlib: pip install "torch-zenflow[cli]"\n'
    assert capsys.readouterr().err == line
