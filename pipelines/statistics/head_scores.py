"""Reads scores of heads from a file, for plans that choose heads by score."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from guidance.errors import InputError
from pipelines.text.readers import read_small


def read_scores(path: Path) -> dict[tuple[int, int], float]:
    """The score of each (layer, head), from a file with the columns layer, head and score.

    The file is JSON, CSV or Parquet.  JSON may also be a list of scores for each layer.

    Raises:
        InputError: the file cannot be read, or is not such a table.
    """
    wanted = "columns layer, head and score"
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
            layer, head = int(row["layer"]), int(row["head"])
            if (layer, head) in scores:
                raise ValueError(f"layer {layer}, head {head} occurs twice")
            scores[layer, head] = float(row["score"])
    except (
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OSError,
        csv.Error,
    ) as error:
        raise InputError(
            f"{path}: not a table of scores ({error})", hint=f"JSON, CSV or Parquet with {wanted}"
        ) from error
    if not scores:
        raise InputError(f"{path}: no scores found", hint=f"JSON, CSV or Parquet with {wanted}")
    return scores
