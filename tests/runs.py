"""Made-up runs: model artifacts and unfinished work with metrics written by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.engine.declaration import roles
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store

_numbers = itertools.count()


def metrics(
    losses: Sequence[float | None],
    *,
    seconds: float = 1.0,
    tokens: float = 30.0,
    loss: str = "mlm",
    more: Mapping[str, Mapping[int, float]] | None = None,
) -> list[dict[str, float]]:
    """Metrics as training logs them, one row a step; columns of ``more`` have values at some steps, counted from 1."""
    rows = []
    for step, value in enumerate(losses, 1):
        row = {"step": step, "loss/total": 9.0, f"loss/{loss}": value, "loss/guidance/next": 0.5}
        row |= {"weight/guidance/next": 12.0, "tokens": tokens, "seconds": seconds}
        row |= {name: points[step] for name, points in (more or {}).items() if step in points}
        rows.append(row)
    return rows  # type: ignore[return-value]


def settings(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """The configuration of a run, without knobs."""
    return {"objective": "mlm", "steps": 8, "epochs": None, "seed": seed, "valid_sequences": 512} | changes


def finished(
    store: Store,
    rows: Sequence[Mapping[str, Any]] | None,
    *,
    seed: int = 0,
    plan: str = "plain",
    sequences: str | Sequence[str] = "same",
    columns: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    counts: Mapping[str, Any] | None = None,
    init: str = "",
) -> Artifact:
    """A model artifact with these metrics, and no weights.

    Args:
        rows: None for a model without metrics.
        counts: further counts of the manifest.
        sequences: the content of its training sequences; several for several inputs.
        columns: further whole columns of the table.
        init: the content of the model that it began from, if any.
    """
    whole = settings(seed) | {"plan": f"{plan}.toml", "device": "auto"} | dict(config or {})
    contents = [sequences] if isinstance(sequences, str) else sequences
    inputs = {
        role: {"kind": "sequences", "content": content}
        for role, content in zip(roles("sequences", len(contents)), contents, strict=True)
    } | {"plan": {"kind": "plan", "content": plan}}
    inputs |= {"init": {"kind": "model", "content": init}} if init else {}
    recipe = digest([whole, inputs, next(_numbers)])
    manifest = {"stage": "pretrain", "stage_version": 1, "config": whole, "inputs": inputs}
    with store.build("model", recipe, manifest) as out:
        out.write("config.json", b"{}")
        if rows is not None:
            names = list(dict.fromkeys(name for row in rows for name in row))
            table = pa.table({name: [row.get(name) for row in rows] for name in names} | dict(columns or {}))
            with out.parquet("metrics.parquet", table.schema) as writer:
                writer.write_table(table)
        out.counts |= {"device": "cpu", "precision": "fp32", "processes": 1}
        out.counts |= dict(counts or {})
    return Artifact(store.folder("model", recipe))


def going(
    store: Store, rows: Sequence[Mapping[str, Any]], *, seed: int = 0, plan: str = "plain", torn: str = ""
) -> str:
    """Make unfinished work with these metrics; gives its reference."""
    folder: Path = store.root / ".partial" / "model" / digest(next(_numbers))[:16]
    folder.mkdir(parents=True)
    about = {"config": settings(seed), "inputs": {"sequences": "same", "plan": plan}}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    return f"model/{folder.name}"
