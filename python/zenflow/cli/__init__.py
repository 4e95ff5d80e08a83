"""The command ``zenflow``: a subcommand is a module with ``add_parser(subparsers)`` and ``run(args)``."""

from zenflow._identity import check_identity

check_identity()

from zenflow.cli.app import main  # noqa: E402

__all__ = ["main"]
