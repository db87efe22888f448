"""Reads scores of heads from a file, for plans that choose heads by score."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from guidance.errors import InputError, reason_of
from pipelines.text.readers import read_small

COLUMNS = ("layer", "head", "score")


def read_scores(path: Path) -> dict[tuple[int, int], float]:
    """The score of each (layer, head), from a file with the columns layer, head and score.

    The file is JSON, CSV or Parquet.  JSON may also be a list of scores for each layer.  Raises InputError if the file
    cannot be read, or is not such a table.
    """
    wanted = "JSON, CSV or Parquet with columns layer, head and score"
    scores: dict[tuple[int, int], float] = {}
    try:
        for number, row in enumerate(_rows(path), 1):
            layer, head, score = _values(row, number)
            if (layer, head) in scores:
                raise ValueError(f"layer {layer}, head {head} occurs twice")
            scores[layer, head] = score
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, OSError, csv.Error) as error:
        raise InputError(f"{path}: not a table of scores ({reason_of(error)})", hint=wanted) from error
    if not scores:
        raise InputError(f"{path}: no scores found", hint=wanted)
    return scores


def _rows(path: Path) -> list[Any]:
    """The rows of a file.  Raises ValueError if it has none, or two columns of one name."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        rows: list[Any] = parquet.read_table(io.BytesIO(read_small(path))).to_pylist()
        return rows
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(read_small(path).decode("utf-8-sig")))
        names = list(reader.fieldnames or ())
        if twice := [name for name in COLUMNS if names.count(name) > 1]:
            raise ValueError(f"two columns are called {twice[0]}")
        return list(reader)
    table = json.loads(read_small(path))
    if not isinstance(table, list):
        raise ValueError("it is no list of rows")
    if all(isinstance(row, list) for row in table):
        return [{"layer": la, "head": h, "score": s} for la, row in enumerate(table) for h, s in enumerate(row)]
    return table


def _values(row: Any, number: int) -> tuple[int, int, float]:
    """The layer, the head and the score of a row.  Raises ValueError if it lacks one of them."""
    if not isinstance(row, dict):
        raise ValueError(f"row {number} is not a table")
    for name in COLUMNS:
        if name not in row:
            raise ValueError(f"row {number} has no column {name}")
        if row[name] in (None, ""):
            raise ValueError(f"row {number} has no {name}")
    try:
        return _whole(row["layer"]), _whole(row["head"]), float(row["score"])
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"row {number}: {reason_of(error)}") from error


def _whole(value: Any) -> int:
    """A whole number; raises ValueError for what `int` would round, such as 1.7, or take for one, such as true."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)
