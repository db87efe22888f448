"""How tables of probes write heads, numbers and shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.storage.artifacts import Artifact

SHOWN_HEADS = 8
"""Heads in a list of heads."""


def heads_of(artifact: Artifact) -> list[dict[str, Any]]:
    """The rows of ``heads.parquet``."""
    import pyarrow.parquet as pq

    with artifact.open("heads.parquet") as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def head_name(row: Mapping[str, Any]) -> str:
    """A head as tables name it: layer and head, and what kind it is if it is not the model's own."""
    return f"{row['layer']}-{row['head']}" + (f" ({row['attention']})" if row["attention"] != "self" else "")


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def shares(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(share(row[name]) for name in names)
