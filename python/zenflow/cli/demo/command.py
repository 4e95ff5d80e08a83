"""The subcommand ``zenflow demo``: its arguments, and the order of its work."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zenflow.cli.common import UsageError, integer, require_packages

if TYPE_CHECKING:
    from zenflow.cli.common import Subparsers
    from zenflow.cli.demo.data import Corpus
    from zenflow.cli.demo.settings import Settings

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Pretrain a byte-level GPT of about 1 M parameters on the source of Python's standard library, then
fine-tune it four times from the same weights, on the same data in the same order: with torch's AdamW,
and with ZenFlowAdamW as update_interval=1, update_interval=4, and update_interval=4 with staleness=1.
A few minutes on two cores."""

_CHECKPOINT_EVERY = 50


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of ``zenflow demo``."""
    parser = subparsers.add_parser(
        "demo",
        help="fine-tune a small language model with torch's AdamW and with ZenFlowAdamW, and compare",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--steps", type=integer(1), metavar="N", help="steps of each fine-tuning run")
    parser.add_argument("--pretrain-steps", type=integer(0), metavar="N", help="steps of the pretraining")
    parser.add_argument(
        "--seed", type=integer(0, 2**31 - 1), default=0, metavar="N", help="of weights and data order (0)"
    )
    parser.add_argument(
        "--threads", type=integer(1, 1024), metavar="N", help="torch threads (what torch itself would take)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="fine-tune on these files instead of the Python language reference",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="where the plot, demo.png, goes (./out/demo)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps: does it work?")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="keep checkpoints in DIR, and go on from them"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=integer(1),
        metavar="N",
        help=f"steps between two checkpoints of a run, with --resume ({_CHECKPOINT_EVERY})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo and print its results; 0 when all runs are finished, 130 when interrupted.

    Raises:
        UsageError: an argument can't be used, or a package is missing.

    """
    require_packages("rich", "matplotlib")
    if args.checkpoint_every is not None and args.resume is None:
        raise UsageError(
            f"argument --checkpoint-every: {args.checkpoint_every}; accepted: together with --resume DIR only"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"argument --out: {str(args.out)!r}: {error.strerror}; accepted: a directory, new or old"
        ) from None

    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads)
    try:
        return _run(args)
    except KeyboardInterrupt:
        hint = "the same command goes on from there" if args.resume else "with --resume DIR it could go on"
        print(f"zenflow: interrupted; {hint}", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from zenflow.cli.demo.checkpoint import Store
    from zenflow.cli.demo.plot import draw_figure
    from zenflow.cli.demo.progress import Bars
    from zenflow.cli.demo.report import as_json, as_table, summarize
    from zenflow.cli.demo.runs import run_all
    from zenflow.cli.demo.settings import FINE_TUNING

    settings, source, target = _prepare(args)
    store = Store(args.resume, settings, args.checkpoint_every or _CHECKPOINT_EVERY) if args.resume else None
    with Bars(settings.pretrain_steps + len(FINE_TUNING) * settings.steps) as bars:
        records = run_all(settings, source, target, bars, store)
    summaries = summarize(records)
    picture = args.out / "demo.png"
    draw_figure(picture, records, summaries)
    if args.json:
        print(json.dumps(as_json(settings, summaries)))
        print(f"plot: {picture}", file=sys.stderr)
    else:
        Console().print(as_table(settings, records, summaries))
        print(f"plot: {picture}")
    return 0


def _prepare(args: argparse.Namespace) -> tuple[Settings, Corpus, Corpus]:
    """Return the settings, the corpus of the pretraining and that of the fine-tuning."""
    import torch

    from zenflow import __version__
    from zenflow.cli.demo import data
    from zenflow.cli.demo.settings import QUICK, Settings

    chosen = {"steps": args.steps, "pretrain_steps": args.pretrain_steps, "seed": args.seed}
    sizes = (QUICK if args.quick else {}) | {key: value for key, value in chosen.items() if value is not None}
    defaults = Settings(**sizes)
    source = data.standard_library(defaults.pretrain_bytes)
    target = data.files(args.data, defaults.context) if args.data else data.language_reference()
    settings = Settings(
        **sizes,
        threads=torch.get_num_threads(),
        versions={"torch": str(torch.__version__), "zenflow": __version__},
        data={"pretraining": source.description, "fine_tuning": target.description},
    )
    return settings, source, target
