"""Reads scores of heads from a file, for plans that choose heads by score."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from guidance.errors import InputError, reason_of
from pipelines.text.readers import read_small


def read_scores(path: Path) -> dict[tuple[int, int], float]:
    """The score of each (layer, head), from a file with the columns layer, head and score.

    The file is JSON, CSV or Parquet.  JSON may also be a list of scores for each layer.  Raises InputError if the file
    cannot be read, or is not such a table.
    """
    wanted = "JSON, CSV or Parquet with columns layer, head and score"
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as parquet

            table = parquet.read_table(io.BytesIO(read_small(path))).to_pylist()
        elif path.suffix.lower() == ".csv":
            table = list(csv.DictReader(io.StringIO(read_small(path).decode("utf-8-sig"))))
        else:
            table = json.loads(read_small(path))
        if isinstance(table, list) and all(isinstance(row, list) for row in table):
            table = [{"layer": la, "head": h, "score": s} for la, row in enumerate(table) for h, s in enumerate(row)]
        scores: dict[tuple[int, int], float] = {}
        for row in table:
            layer, head = _whole(row["layer"]), _whole(row["head"])
            if (layer, head) in scores:
                raise ValueError(f"layer {layer}, head {head} occurs twice")
            scores[layer, head] = float(row["score"])
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        OSError,
        csv.Error,
    ) as error:
        raise InputError(f"{path}: not a table of scores ({reason_of(error)})", hint=wanted) from error
    if not scores:
        raise InputError(f"{path}: no scores found", hint=wanted)
    return scores


def _whole(value: Any) -> int:
    """A whole number; raises ValueError for what `int` would round, such as 1.7, or take for one, such as true."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)
