"""Makes the report of some runs, and writes its page and the files beside it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from guidance.errors import InputError, counted
from pipelines import papers
from pipelines.progress import Progress
from pipelines.report import attention, commands, methods, origin, published, results, training
from pipelines.report.blocks import Report, Section, as_markdown, notes_of
from pipelines.report.given import KINDS, Runs, open_all
from pipelines.report.page import as_html
from pipelines.report.places import TablePlaces, places
from pipelines.report.published import Ours
from pipelines.storage.files import machine_errors, write_file
from pipelines.storage.store import Store
from pipelines.views import comparison_tables
from pipelines.views.comparison import Comparison
from pipelines.views.tested_tables import as_json


def make(
    references: Sequence[str],
    store: Store,
    *,
    paper: str | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    text: str | None = None,
    title: str = "",
    progress: Progress | None = None,
) -> tuple[Report, dict[str, bytes]]:
    """The report of some runs, and the plans that its commands read, by file name.

    Args:
        references: names, ids or paths of models, searches, evaluations and probes.
        paper: a table whose numbers stand beside ours, such as ``a-table3``.
        rows, columns: which runs are which row and column of it, each ``PATTERN=NAME``; see `pipelines.report.places`.
        text: what the models read for pictures of their attention.

    Raises:
        ArtifactMissing: there is no such run, or it is not finished.
        InputError: an artifact of another kind; rows or columns without a table, or without a ``=``.
        UnknownName: there is no such table, row or column.
    """
    table, placing = beside(paper, rows, columns)
    with ExitStack() as stack:
        runs = open_all(references, store, stack)
        notes: list[str] = []
        compared = training.compared(runs, progress, notes)
        of_training = [training.tests_of(comparison) for _, comparison in compared]
        parts = [*results.evaluations(runs), *results.searches(runs)]
        tests = [
            *(tested for each in of_training for tested in each),
            *(tested for _, _, own, _ in parts for tested in own),
        ]
        sections: list[Section] = [origin.lineage(runs)]
        if table is not None:
            ours = _ours(runs, compared, parts)
            sections.append(published.section(table, ours, placing))
            if unused := placing.unused(name for each in ours for name in each.names):
                notes.append(f"no run fits {', '.join(unused)}")
        sections += training.sections(compared, of_training)
        sections += [section for _, section, _, _ in parts]
        if (shown := attention.section(runs, text, notes)) is not None:
            sections.append(shown)
        sections += results.probes(runs)
        redo, plans = commands.section(runs)
        about = methods.section(runs, [comparison for _, comparison in compared], tests, table)
        sections += [origin.cost(runs), redo, about]
        if len(runs.given) == 1:
            notes.insert(0, f"{runs.given[0].label} is the only run, so it is compared with nothing")
        sections[0] = replace(sections[0], blocks=[*sections[0].blocks, *notes_of(notes)])
        facts: dict[str, Any] = {
            "runs": [{"run": each.label, "artifact": each.artifact.reference} for each in runs.given],
            "paper": paper,
            "training": [comparison_tables.as_json(comparison) for _, comparison in compared],
            "comparisons": [as_json(tested) for tested in tests],
            "notes": notes,
        }
        return Report(title or _title(runs, table), _lead(runs), sections, facts), plans


def beside(
    paper: str | None, rows: Sequence[str], columns: Sequence[str]
) -> tuple[papers.PaperTable | None, TablePlaces]:
    """The table of a paper, and which of its cells our runs stand beside.  Raises as `make` does."""
    if paper:
        table = papers.table(paper)
        return table, places(table, rows, columns)
    if rows or columns:
        raise InputError("--row and --column say which runs are which row and column of a table", hint="--paper TABLE")
    return None, TablePlaces()


def _title(runs: Runs, table: papers.PaperTable | None) -> str:
    if table is not None:
        return f"Our runs beside {table.source}"
    labels = [each.label for each in runs.given]
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def _lead(runs: Runs) -> str:
    numbers = [
        counted(len(runs.of(kind)), kind, f"{kind}es" if kind == "search" else "") for kind in KINDS if runs.of(kind)
    ]
    last = max(str(each.artifact.manifest.get("created", "")) for each in runs.given)[:10]
    return f"{', '.join(numbers)}" + (f"; the last of them was made on {last}." if last else ".")


def _ours(runs: Runs, compared: Sequence[tuple[training.Family, Comparison]], parts: Sequence[Any]) -> list[Ours]:
    """Our figures, for the table of a paper."""
    sizes = {each.label: methods.size_of(each) for each in runs.of("model")}
    given = {each.label: each for each in runs.given}
    found: list[Ours] = []
    for family, comparison in compared:
        data = runs.data_of(given[family.curves[0].label].artifact.manifest)
        found += published.of_training(comparison, data, sizes)
    for part, _, tests, scored in parts:
        found += published.of_scores(scored, tests, runs.data_of(part[0].artifact.manifest))
    return [*found, *published.of_probes(runs)]


SUMS = "sha256sums.txt"
"""The file beside the tables and figures that lists them, as the program ``sha256sum`` does."""


def write(report: Report, plans: dict[str, bytes], folder: Path, name: str) -> Path:
    """Write ``NAME.html``, ``NAME.md`` and the folder ``NAME`` of the files beside them; returns the path of the page.

    Files that an earlier report wrote there, and this one does not, are removed, unless somebody has changed them since.

    Raises:
        InputError: ``folder`` is a file.
        MachineError: a file cannot be written or removed.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is a file, not a folder", hint="--out FOLDER")
    files = {**dict(report.files()), **plans}
    _remove_others(folder / name, files)
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {file}\n" for file, content in files.items())
    write_file(folder / name / SUMS, sums.encode())
    for file, content in files.items():
        write_file(folder / name / file, content)
    write_file(folder / f"{name}.md", as_markdown(report, name).encode())
    page = folder / f"{name}.html"
    write_file(page, as_html(report).encode())
    return page


def _remove_others(folder: Path, kept: Collection[str]) -> None:
    """Remove the files that an earlier report listed in `SUMS`, and that are as it wrote them, but for those that are kept."""
    with machine_errors(f"cannot replace the files of an earlier report in {folder}"):
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines() if (folder / SUMS).is_file() else []
        for digest, file in (line.split("  ", 1) for line in lines if "  " in line):
            path = folder / file
            if file in kept or ".." in path.parts or not path.is_file():
                continue
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
                path.unlink()
                with contextlib.suppress(OSError):  # files of others are left there
                    path.parent.rmdir()
