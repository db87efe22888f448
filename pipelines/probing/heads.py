"""Tables and pictures with one entry for each head, and how tables for people write heads, numbers and shares."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.lazy import np, pq
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns
from pipelines.training.learner import name_of_model

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.sites import Site

TABLE = "heads.parquet"

COLUMNS: Columns = {
    "stack": ("string", "encoder or decoder"),
    "attention": ("string", "self, or pal for added heads"),
    "layer": ("int32", "running number"),
    "head": ("int32", "running number in its layer"),
}
"""The columns that name a head."""

SHOWN_HEADS = 8
"""Heads in a list of heads."""


def key_of(site: Site, head: int) -> dict[str, Any]:
    """The cells of `COLUMNS` for a head."""
    return {"stack": site.stack, "attention": site.attention, "layer": site.layer, "head": head}


def head_columns(units: Mapping[str, str]) -> Columns:
    """Columns of ``heads.parquet``, given the unit of each figure; figures may be null."""
    return {**COLUMNS, **{name: ("float64", unit) for name, unit in units.items()}}


def write_heads(
    run: Run[Any],
    figures: Mapping[str, Mapping[Site, Tensor]],
    units: Mapping[str, str],
    drawn: str = "",
    *,
    title: str = "",
    label: str = "",
) -> list[dict[str, Any]]:
    """Write ``heads.parquet``, and ``heads.png`` if a figure is to be drawn; returns the rows.

    Args:
        figures: ``{name: {site: figure_H}}``: one number for each head of each site, as `Means.column` gives them; NaN is written
            as null.
        units: by name, what each figure is, with its unit.
        drawn: the name of the figure that the picture shows; without one there is no picture.
        title, label: see `heads_picture`.
    """
    rows = []
    for site in next(iter(figures.values())):
        for head in range(site.num_heads):
            values = {name: float(by_site[site][head]) for name, by_site in figures.items()}
            rows.append(key_of(site, head) | {name: None if math.isnan(v) else v for name, v in values.items()})
    run.out.write_rows(TABLE, head_columns(units), rows, may_be_null=units)
    if drawn:
        run.out.write("heads.png", heads_picture(run, rows, drawn, title=title, label=label))
    return rows


def best(rows: Sequence[Mapping[str, Any]], figure: str) -> Mapping[str, Any] | None:
    """The head with the highest figure; of equal ones the first; None if it is null for all."""
    known = [row for row in rows if row[figure] is not None]
    return max(known, key=lambda row: row[figure]) if known else None


def heads_picture(
    run: Run[Any],
    rows: Sequence[Mapping[str, Any]],
    figure: str,
    *,
    title: str,
    label: str,
    hundredths: bool = True,
) -> bytes:
    """A heat map of a figure as PNG: a row for each layer, a column for each head; added heads have a map of their own.

    Args:
        run: that of the probe; the title names its model.
        label: the figure with its unit, for the colour bar, such as ``% of attention``.
        hundredths: whether cells and colour bar are in hundredths, as whole numbers, which is right for shares; otherwise they
            show the figures as they are, the highest with three digits.
    """
    name = name_of_model(run.inputs["model"])
    is_random = getattr(run.config, "random", None) is not None
    of = f"{name}{', random weights' if is_random else ''}"
    return heads_map({of: rows}, figure, title=title, label=label, hundredths=hundredths)


def heads_map(
    heads: Mapping[str, Sequence[Mapping[str, Any]]],
    figure: str,
    *,
    title: str,
    label: str,
    hundredths: bool = True,
    form: str = "png",
) -> bytes:
    """A picture as that of `heads_picture`, of one model or of several, one below the other on one scale.

    Args:
        heads: the rows of each model, by what it is called.
        form: the file format, one of `pipelines.drawing.FORMATS`.
    """
    from pipelines.drawing import PALETTE, figure_of, png, printed

    rows = [row for own in heads.values() for row in own]
    kinds = list(dict.fromkeys(row["attention"] for row in rows))
    sizes = [
        [1 + max(row[key] for row in rows if row["attention"] == kind) for key in ("layer", "head")] for kind in kinds
    ]
    width = sum(max(2.8, 0.5 * wide) for _, wide in sizes) + 2.0
    height = len(heads) * max(2.0, 0.42 * max(layers for layers, _ in sizes) + 1.0) + 0.4
    drawn, grid = figure_of(width, height, rows=len(heads), columns=len(kinds))
    scale = 100 if hundredths else 1
    values = [scale * row[figure] for row in rows if row[figure] is not None] or [scale]
    lowest, highest = min(0.0, *values), max(0.0, *values)
    if lowest == highest:
        highest = 1.0
    decimals = 0 if hundredths else max(0, 2 - math.floor(math.log10(max(-lowest, highest))))
    for (name, own), line in zip(heads.items(), grid, strict=True):
        for axes, kind, (layers, wide) in zip(line, kinds, sizes, strict=True):
            table = np.full((layers, wide), np.nan)
            for row in own:
                if row["attention"] == kind and row[figure] is not None:
                    table[row["layer"], row["head"]] = scale * row[figure]
            image = axes.imshow(table, cmap=PALETTE, vmin=lowest, vmax=highest, aspect="auto")
            axes.set_xticks(range(wide))
            axes.set_yticks(range(layers))
            axes.set_xlabel("head" if kind == "self" else f"head ({kind})")
            for (layer, head), value in np.ndenumerate(table):
                if wide <= 16 and not np.isnan(value):
                    colour = "black" if value - lowest > 0.6 * (highest - lowest) else "white"
                    axes.text(head, layer, f"{value:.{decimals}f}", ha="center", va="center", fontsize=8, color=colour)
        line[0].set_ylabel("layer")
        if len(heads) > 1:
            line[0].set_title(name, fontsize=10, parse_math=False)
    names = [title, *heads] if len(heads) == 1 else [title]
    drawn.suptitle("\n".join(names), fontsize=11, parse_math=False)
    drawn.colorbar(image, ax=list(grid.ravel()), shrink=0.8, label=label)
    return png(drawn) if form == "png" else printed(drawn, form)


def heads_of(artifact: Artifact) -> list[dict[str, Any]]:
    """The rows of ``heads.parquet``."""
    with artifact.open(TABLE) as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def ends_of(ranked: Sequence[dict[str, Any]], last: int) -> tuple[Sequence[dict[str, Any]], tuple[str, ...]]:
    """The first `SHOWN_HEADS` heads of a ranking and the last ones, and a note if these are not all."""
    if len(ranked) <= SHOWN_HEADS + last:
        return ranked, ()
    note = f"the first {SHOWN_HEADS} and the last {last} of {len(ranked):,} heads; {TABLE} has all"
    return [*ranked[:SHOWN_HEADS], *ranked[-last:]], (note,)


def head_name(row: Mapping[str, Any]) -> str:
    """A head as tables name it: layer and head, and what kind it is if it is not the model's own."""
    return f"{row['layer']}-{row['head']}" + (f" ({row['attention']})" if row["attention"] != "self" else "")


def no_such_head(layer: int, head: int | None, known: Collection[tuple[int, int]]) -> InputError:
    """The error for a head, or without one a layer, that is none of the known ones, which are given by layer and number."""
    layers, heads = (max(each) for each in zip(*known, strict=True))
    if head is None:
        return InputError(f"there is no layer {layer}: the model has layers 0 to {layers}")
    return InputError(f"there is no head {layer}-{head}: the model has layers 0 to {layers} with heads 0 to {heads}")


def number(value: float | None) -> str:
    """A number as tables write it."""
    return "–" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    """A share as tables write it."""
    return "–" if value is None else f"{100 * value:.1f} %"


def shares(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Several shares of a row."""
    return tuple(share(row.get(name)) for name in names)
