"""Parses the command line and hands over to one subcommand.

Whatever a user can get wrong ends here as one line on stderr and exit code 2; a traceback is a bug of ours.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zenflow import __version__
from zenflow.cli.bench import command as bench
from zenflow.cli.common import Parser, UsageError
from zenflow.cli.demo import command as demo

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = (demo, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default that of the process) and return its exit code.

    0: done; 2: the input can't be used, and stderr says why in one line; 130: interrupted by the keyboard.
    """
    parser = Parser(
        prog="zenflow",
        description="AdamW whose states live in host memory, without stalls.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zenflow {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    try:
        args = parser.parse_args(argv)
        code: int = args.run(args)
    except UsageError as error:
        print(f"zenflow: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zenflow: interrupted", file=sys.stderr)
        return 130
    return code
