"""Says so when the unrelated distribution ``zenflow`` sits on top of this package.

The import name ``zenflow`` is also that of a distribution on PyPI (normalizing flows in JAX). pip lets two
distributions write into one folder: whichever was installed last owns ``zenflow/__init__.py``, and removing
either one deletes files of the other. Three states follow, and ``check_identity`` tells them apart:

* torch-zenflow came last: this package's ``__init__`` runs and calls the check.
* the other one came last: its ``__init__`` runs, and ``from zenflow import ZenFlowAdamW`` fails with
  Python's own message. The modules that only torch-zenflow has, such as ``zenflow.cli`` behind the command
  ``zenflow``, call the check too, and it names the reason.
* the other one was installed and removed again: ``zenflow/__init__.py`` is gone, and Python takes what is
  left for a namespace package. Again those modules say so.

A ``zenflow`` installed elsewhere on ``sys.path`` shares no file with this package and is no concern of it.
"""

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

__all__ = ["check_identity"]

_REMEDY = "pip uninstall zenflow && pip install --force-reinstall --no-deps torch-zenflow"


def check_identity() -> None:
    """Check that the package ``zenflow`` in this process is torch-zenflow's, whole and alone.

    Call it first thing in ``zenflow/__init__.py``, under the name it has here (that name is how a package
    whose ``__init__`` is another's is told from this one), and in the modules through which a program may
    enter without it.

    Raises:
        ImportError: another distribution's files are mixed with this package's. The message names both and
            the remedy.

    """
    other = _overlapping_distribution(Path(__file__).resolve().parents[1])
    if other is not None:
        raise ImportError(
            f"torch-zenflow and the unrelated distribution zenflow {other.version} are both installed in "
            f"{Path(__file__).resolve().parent}, and each overwrites files of the other. They can't share an "
            f"environment. To keep torch-zenflow: {_REMEDY}",
            name="zenflow",
        )
    package = sys.modules.get("zenflow")
    if package is not None and vars(package).get("check_identity") is not check_identity:
        raise ImportError(
            f"{Path(__file__).resolve().parent} holds torch-zenflow, but its __init__.py is missing or "
            "another's: most likely the unrelated distribution zenflow was installed over it. "
            f"To mend it: {_REMEDY}",
            name="zenflow",
        )


def _overlapping_distribution(root: Path) -> Distribution | None:
    """Return the distribution ``zenflow`` that has files in ``root/zenflow``, if there is one."""
    for found in distributions(name="zenflow", path=[str(root)]):
        files = found.files
        # Without a file list nothing tells the two apart; its metadata beside this package is reason enough.
        if files is None or any(file.parts[0] == "zenflow" for file in files):
            return found
    return None
