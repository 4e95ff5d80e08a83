"""The results of a benchmark: rows, as JSON and as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from zenflow.cli.bench.arguments import format_size
from zenflow.cli.bench.contest import OURS, ROOFLINE, Row, contest_rows
from zenflow.cli.bench.peers import PACKAGES
from zenflow.cli.bench.session import Plan, Result
from zenflow.cli.bench.worker import PASSES
from zenflow.cli.bench.works import WORKS, streams_of

__all__ = ["Line", "as_json", "as_tables", "lines_of", "peers_of"]


@dataclass(frozen=True)
class Line:
    """One row and what it is a row of.

    Attributes:
        work: name of the work, or of the bare pass ``read`` or ``copy``.
        numel: elements.
        threads: how many.
        row: the numbers.
        note: what was called, where the name doesn't say.

    """

    work: str
    numel: int
    threads: int
    row: Row
    note: str = ""


def lines_of(results: list[Result]) -> list[Line]:
    """Return the rows of all results: of each size the bare passes by number of threads, then each work's contest."""
    lines = []
    for result in results:
        times, outcome = result.times(), result.outcomes[0]
        if result.job.work == PASSES:
            for label, seconds in times.items():
                name, count = label.rsplit(" ", 1)
                (row,) = contest_rows({ROOFLINE: seconds}, outcome.numel, streams_of(name).bytes_per_element)
                lines.append(Line(name, outcome.numel, int(count), row))
            continue
        work, threads = WORKS[result.job.work], len(result.job.cores)
        lines.extend(
            Line(work.name, outcome.numel, threads, row, outcome.notes.get(row.name, ""))
            for row in contest_rows(times, outcome.numel, work.bytes_per_element)
        )
    return lines


def peers_of(plan: Plan, packages: list[str], results: list[Result]) -> list[dict[str, Any]]:
    """Return, of each of ``packages``, whether it took part, and if not, why or how to install it."""
    found = []
    for name in packages:
        package = PACKAGES[name]
        failures = {
            f"{contender} in {result.job.work}: {why}": None
            for result in results
            for outcome in result.outcomes
            for contender, why in outcome.failed.items()
            if contender in package.contenders
        }
        timed = any(contender in result.times() for result in results for contender in package.contenders)
        if not package.version:
            note = f"not installed: {package.install}"
        elif failures:
            note = "; ".join(failures)
        elif not timed:
            note = f"has no part in {', '.join(plan.works)}"
        else:
            note = ""
        found.append({"name": name, "version": package.version, "timed": timed, "note": note})
    return found


def as_json(
    machine: dict[str, Any], lines: list[Line], peers: list[dict[str, Any]], warnings: list[str]
) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {
        "machine": machine,
        "peers": peers,
        "warnings": warnings,
        "rows": [_json_row(line) for line in lines],
    }


def _json_row(line: Line) -> dict[str, Any]:
    row = line.row
    ratio = row.ratio or (None, None, None)
    return {
        "work": line.work,
        "impl": row.name,
        "numel": line.numel,
        "threads": line.threads,
        **dict(zip(("ms_median", "ms_p10", "ms_p90"), row.ms, strict=True)),
        "ns_per_element": row.ns_per_element,
        "gb_per_s": row.gb_per_s,
        "roofline_share": row.roofline_share,
        **dict(zip(("ratio_to_zenflow", "ratio_p10", "ratio_p90"), ratio, strict=True)),
        "cores_busy": row.cores,
        "rounds": row.rounds,
        "note": line.note,
    }


_HEADERS = ("ms", "p10-p90", "ns/elem", "GB/s", "roof", "x ours", "p10-p90")


def as_tables(lines: list[Line], peers: list[dict[str, Any]], warnings: list[str]) -> Group:
    """Return what is printed without ``--json``: a table for each work, the bare passes, the peers, the warnings."""
    tables: dict[tuple[str, int, int], list[Line]] = {}
    passes = []
    for line in lines:
        if any(
            other.work == line.work and other.row.name == OURS and _where(other) == _where(line)
            for other in lines
        ):
            tables.setdefault((line.work, *_where(line)), []).append(line)
        else:
            passes.append(line)
    parts: list[Any] = []
    for (work, numel, threads), rows in tables.items():
        title = (
            f"{work}: {WORKS[work].text}\n{format_size(numel)} elements of "
            f"{WORKS[work].bytes_per_element:g} B, {_threads(threads)}, {rows[0].row.rounds} rounds"
        )
        parts += [_contest_table(title, rows), *_notes(rows), ""]
    parts += [_passes_table(passes), ""]
    parts += [Text(f"{peer['name']}: {peer['note']}") for peer in peers if peer["note"]]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in warnings]
    parts.append(
        Text(
            "roof: share of the speed of a pass with the same streams and no arithmetic, in the same rounds. "
            "x ours: time over ours in the same round, above 1 is slower.",
            style="dim",
        )
    )
    return Group(*parts)


def _where(line: Line) -> tuple[int, int]:
    return line.numel, line.threads


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def _table(title: str, first: str, headers: tuple[str, ...]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column(first, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _contest_table(title: str, lines: list[Line]) -> Table:
    table = _table(title, "", _HEADERS)
    for row in (line.row for line in lines):
        ratio = row.ratio
        table.add_row(
            row.name,
            _milliseconds(row.ms[0]),
            f"{_milliseconds(row.ms[1])}-{_milliseconds(row.ms[2])}",
            f"{row.ns_per_element:.3f}",
            f"{row.gb_per_s:.1f}",
            f"{row.roofline_share:.2f}" if row.roofline_share is not None else "",
            f"{ratio[0]:.2f}" if ratio else "",
            f"{ratio[1]:.2f}-{ratio[2]:.2f}" if ratio else "",
            style="bold" if row.name == OURS else None,
        )
    return table


def _milliseconds(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{digits}f}"


def _notes(lines: list[Line]) -> list[Text]:
    noted: dict[str, list[str]] = {}
    for line in lines:
        if line.note:
            noted.setdefault(line.note, []).append(line.row.name)
    return [Text(f"{', '.join(names)}: {note}", style="dim") for note, names in noted.items()]


def _passes_table(lines: list[Line]) -> Table:
    table = _table("Bare passes", "streams of", ("elements", "threads", "ms", "p10-p90", "GB/s"))
    for line in lines:
        low, high = line.row.ms[1:]
        table.add_row(
            line.work,
            format_size(line.numel),
            str(line.threads),
            _milliseconds(line.row.ms[0]),
            f"{_milliseconds(low)}-{_milliseconds(high)}",
            f"{line.row.gb_per_s:.1f}",
        )
    return table
