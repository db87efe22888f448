"""Tables and pictures with one entry for each head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from guidance.sites import Site
from pipelines.drawing import figure_of, png
from pipelines.engine.stage import Run
from pipelines.storage.columns import column
from pipelines.training.learner import name_of_model

TABLE = "heads.parquet"


def head_schema(units: Mapping[str, str]) -> pa.Schema:
    """Columns of ``heads.parquet``.

    Args:
        units: the unit of each figure; figures may be null.
    """
    return pa.schema(
        [
            column("stack", pa.string(), "encoder or decoder"),
            column("attention", pa.string(), "self, or pal for added heads"),
            column("layer", pa.int32(), "running number"),
            column("head", pa.int32(), "running number in its layer"),
            *(pa.field(name, pa.float64(), metadata={"unit": unit}) for name, unit in units.items()),
        ]
    )


def write_heads(
    run: Run, figures: Mapping[str, Mapping[Site, Tensor]], units: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Write ``heads.parquet``; returns its rows.

    Args:
        figures: by name, of each site the figure of each head, (H,); NaN is written as null.
    """
    rows = []
    for site in next(iter(figures.values())):
        for head in range(site.num_heads):
            values = {name: float(found[site][head]) for name, found in figures.items()}
            known = {name: None if math.isnan(value) else value for name, value in values.items()}
            rows.append({"stack": site.stack, "attention": site.attention, "layer": site.layer, "head": head, **known})
    schema = head_schema(units)
    with run.out.parquet(TABLE, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return rows


def best(rows: Sequence[Mapping[str, Any]], figure: str) -> Mapping[str, Any] | None:
    """The head with the highest figure; of equal ones the first; None if it is null for all."""
    known = [row for row in rows if row[figure] is not None]
    return max(known, key=lambda row: row[figure]) if known else None


def heads_picture(run: Run, rows: Sequence[Mapping[str, Any]], figure: str, *, title: str, label: str) -> bytes:
    """A heat map of a figure as PNG: a row for each layer, a column for each head; added heads have a map of their own.

    Cells and colour bar are in hundredths.

    Args:
        run: that of the probe; the title names its model.
        label: the figure with its unit, for the colour bar.
    """
    kinds = list(dict.fromkeys(row["attention"] for row in rows))
    sizes = [
        [1 + max(row[key] for row in rows if row["attention"] == kind) for key in ("layer", "head")] for kind in kinds
    ]
    width = sum(max(2.8, 0.5 * heads) for _, heads in sizes) + 2.0
    drawn, grid = figure_of(width, max(2.4, 0.42 * max(layers for layers, _ in sizes) + 1.4), columns=len(kinds))
    values = [row[figure] for row in rows if row[figure] is not None]
    highest = 100 * max(values, default=1.0) or 1.0
    for axes, kind, (layers, heads) in zip(grid[0], kinds, sizes, strict=True):
        table = np.full((layers, heads), np.nan)
        for row in rows:
            if row["attention"] == kind and row[figure] is not None:
                table[row["layer"], row["head"]] = 100 * row[figure]
        image = axes.imshow(table, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
        axes.set_xticks(range(heads))
        axes.set_yticks(range(layers))
        axes.set_xlabel("head" if kind == "self" else f"head ({kind})")
        if heads <= 16:
            for layer, head, value in _cells(table):
                colour = "black" if value > 0.6 * highest else "white"
                axes.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    grid[0][0].set_ylabel("layer")
    name = name_of_model(run.inputs["model"])
    is_random = getattr(run.config, "random", None) is not None
    drawn.suptitle(f"{title}\n{name}{', random weights' if is_random else ''}", fontsize=11, parse_math=False)
    drawn.colorbar(image, ax=list(grid[0]), shrink=0.8, label=label)
    return png(drawn)


def _cells(table: np.ndarray) -> Iterator[tuple[int, int, float]]:
    for (layer, head), value in np.ndenumerate(table):
        if not np.isnan(value):
            yield layer, head, float(value)
