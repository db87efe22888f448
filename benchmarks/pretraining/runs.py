"""How the runs of a table are trained, and their figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.finetuning.data import plan_file
from benchmarks.pretraining.data import books, learned_books
from benchmarks.pretraining.tables import Setting, Table
from guidance.plan import Plan
from pipelines.stages import evaluate, floors, pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.views.curves import Curve

WINDOW = 50
POINTS = 60
"""Number of points to keep of each curve."""

Row = Mapping[str, Any]


def settings_of(table: Table, setting: Setting, seed: int, steps: int | None) -> str:
    """A digest of all settings of a run."""
    plan = setting.plan.dumps() if isinstance(setting.plan, Plan) else setting.plan
    return digest([dict(table.common), dict(setting.changes), plan, seed, steps])[:16]


def train(
    table: Table, setting: Setting, seed: int, steps: int | None, store: Store, reference: str, more: Mapping[str, Any]
) -> Artifact:
    """Train a model, unless the store has it.

    Args:
        reference, more: the sequences, and the settings that they require.
    """
    changes = {**table.common, **more, **setting.changes, "seed": seed} | ({"steps": steps} if steps else {})
    if "objective" not in changes:
        changes.setdefault("architecture", "roberta")  # what the figures were measured with
    if setting.plan is not None:
        changes["plan"] = setting.plan if isinstance(setting.plan, str) else plan_file(setting.plan, store)
    if setting.follows:
        (leader,) = (row for row in table.rows if row.label == setting.follows)
        changes["masking"] = train(table, leader, seed, steps, store, reference, more).reference
    result = pretrain.run(reference, pretrain.Config(**changes), store=store)
    assert result is not None
    return result.artifact


def figures_of(table: Table, setting: Setting, seed: int, steps: int | None, store: Store) -> dict[str, Any]:
    """The figures of one run."""
    reference, more = table.prepare(store)
    made = train(table, setting, seed, steps, store, reference, more)
    curve = Curve.of(made, setting.label)
    shown = np.unique(np.linspace(0, len(curve.losses) - 1, POINTS).astype(int))
    figures = {
        "label": setting.label,
        "seed": seed,
        "steps": len(curve.losses),
        "settings": settings_of(table, setting, seed, steps),
        "loss_is_of": curve.loss,
        "loss": float(curve.smoothed(WINDOW)[-1]),
        "average": float(np.mean(curve.losses)),
        "valid": curve.valid[-1][1] if curve.valid else None,
        "seconds": float(curve.elapsed()[-1]),
        "curve": [[int(step) + 1, float(curve.smoothed(WINDOW)[step])] for step in shown],
        "final": made.counts["final"],
        "means": means_of(made),
    }
    if "init" in more and table.measures_start:
        measured = evaluate.run(more["init"], reference, evaluate.Config(split="valid"), store=store).artifact
        figures["starter"] = json.loads(measured.read("metrics.json"))["metrics"]
    return figures


def means_of(made: Artifact) -> dict[str, float]:
    """What guides added and attacks hid, and the shares of tokens: the mean of each such column of ``metrics.parquet``."""
    with made.open("metrics.parquet") as file:
        metrics = pq.read_table(file)
    shown = [name for name in metrics.column_names if name.startswith(("loss/guidance/", "masked/", "share/"))]
    return {name: pc.mean(metrics[name]).as_py() for name in shown}


def floors_of(table: Table, store: Store) -> dict[str, float]:
    """The n-gram floors of a table of masked language models; empty for others."""
    if table.common.get("objective", "mlm") != "mlm":
        return {}
    # the model to start from changes nothing about the sequences
    prepare = {learned_books: books}.get(table.prepare, table.prepare)
    return floors_of_sequences(prepare(store)[0], store)


def floors_of_sequences(
    reference: str, store: Store, layout: Literal["sequences", "causal"] = "sequences"
) -> dict[str, float]:
    """The n-gram floors of as many sequences as a training validates on, in nats."""
    limit = pretrain.Config.model_fields["valid_sequences"].default
    return dict(floors.run(reference, floors.Config(limit=limit, layout=layout), store=store).artifact.counts["nats"])
