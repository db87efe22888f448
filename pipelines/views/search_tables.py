"""What a search has found, as tables for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.engine.declaration import Table
from pipelines.searching.settings import as_flag
from pipelines.stages.search import FRESH
from pipelines.storage.artifacts import Artifact
from pipelines.views.comparison_tables import with_spread
from pipelines.views.figures import Summary


def search_tables(search: Artifact) -> list[Table]:
    """The validation of each setting, and the test metrics: of the chosen runs, or of every setting that was tested.  With
    ``--along`` each moment of pre-training has a row of its own."""
    counts = search.counts
    settings, is_along = _settings(search), bool(counts.get("along"))
    fresh = any(FRESH in found for _, found in settings)
    place = ["step"] if is_along else []
    titles = (
        "setting",
        *place,
        f"validation: {counts['select']}",
        *(["with test seeds"] if fresh else []),
        "runs chosen",
    )
    rows = []
    for label, found in settings:
        of_tests = [_mean_and_sd(found[FRESH]) if FRESH in found else "–"] if fresh else []
        rows.append((*label, _mean_and_sd(found), *of_tests, f"{found['chosen']:,}"))
    tables = [Table(titles, rows)]
    tested = {label: found["test"] for label, found in settings if "test" in found}
    if len(tested) > 1:
        names = list(next(iter(tested.values())))
        cells = [(*label, *(_mean_and_sd(means[name]) for name in names)) for label, means in tested.items()]
        tables.append(Table(("on the test split", *place, *names), cells))
    elif names := list(next(iter(counts.get("along", {}).values()), {})):
        cells = [
            (f"{int(step):,}", *(_mean_and_sd(means[name]) for name in names))
            for step, means in counts["along"].items()
        ]
        tables.append(Table(("on the test split, after step", *names), cells))
    elif metrics := dict(counts["metrics"] or next(iter(tested.values()), {})):
        values = [(name, _mean_and_sd(found)) for name, found in metrics.items()]
        tables.append(Table(("metric", "on the test split"), values))
    return tables


def _settings(search: Artifact) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """What was found of each setting, by how it is called; or with ``--along`` of each setting at each moment of pre-training."""
    labels, settings = labels_of_settings(search), search.counts["settings"].items()
    if not search.counts.get("along"):
        return [((labels[name],), found) for name, found in settings]
    # a search by an earlier version has no moments here: it mixed them
    moments = [(name, step, part) for name, found in settings for step, part in found.get("along", {}).items()]
    return [((labels[name], f"{int(step):,}"), part) for name, step, part in moments]


def labels_of_settings(search: Artifact) -> dict[str, str]:
    """How people call the settings of a search, by what ``runs.parquet`` calls them."""
    rows, one_out = search.counts.get("rows"), search.manifest["config"].get("leave_one_out", False)
    return {name: _label(name, found, rows, one_out) for name, found in search.counts["settings"].items()}


def _label(setting: str, found: Mapping[str, Any], rows: Sequence[str] | None, one_out: bool) -> str:
    if "values" not in found:  # of a search before rows could vary
        return _as_flags(setting) or "(no grid)"
    values = [f"{as_flag(name)}={_plain(value)}" for name, value in found["values"].items()]
    kept = [] if rows is None else [rows_label(found["rows"], rows, one_out)]
    return ", ".join([*kept, *([" ".join(values)] if values else [])]) or "(no grid)"


def rows_label(kept: Sequence[str], rows: Sequence[str], one_out: bool) -> str:
    """Which rows of a plan are kept.

    Args:
        one_out: whether one row at most is left out.
    """
    left = [row for row in rows if row not in kept]
    if not left:
        return "all rows"
    if one_out:
        return f"without {left[0]}"
    return " + ".join(kept) or "no rows"


def _plain(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_flags(setting: str) -> str:
    """``learning_rate=0.1 ffn=8``, as tables hold it, in the way that people write it after ``--grid``."""
    return re.sub(r"(?:^| )\w+=", lambda name: name[0].replace("_", "-"), setting)


def _mean_and_sd(found: Mapping[str, Any]) -> str:
    """A mean of ``search.json`` with its deviation; a search has none where a run has no value."""
    return "undefined" if found["mean"] is None else with_spread(Summary((), found["mean"], found["sd"]), ".4f")
