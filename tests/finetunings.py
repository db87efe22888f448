"""Tiny datasets, and models that are fine-tuned on them, for all tests of tasks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.engine.stage import Result
from pipelines.progress import Progress
from pipelines.stages import dataset, evaluate, finetune, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "learning_rate": 1e-2, "batch_size": 8}
FILLERS = ("the film was", "I thought it", "we all found this")


def reviews(number: int = 24, start: int = 0) -> list[dict[str, str]]:
    """Examples whose label is in one of their words."""
    words = {"good": ("fine", "great", "lovely"), "bad": ("dull", "poor", "grim")}
    rows = []
    for i in range(start, start + number):
        label = ("good", "bad")[i % 2]
        rows.append({"text": f"{FILLERS[i % 3]} {words[label][i // 2 % 3]}", "label": label})
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> str:
    """A CSV file of these rows."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def build(store: Store, folder: Path, splits: dict[str, list[dict[str, str]]], **settings: Any) -> Artifact:
    """A dataset of these splits."""
    files = {split: [write(folder / f"{split}.csv", rows)] for split, rows in splits.items()}
    return dataset.run(files, dataset.Config(**settings), store=store).artifact


def train(store: Store, data: Artifact, progress: Progress | None = None, **changes: Any) -> Result:
    """Fine-tune a tiny model, by default a new one with a tokenizer of whole words."""
    if not changes.keys() & {"init", "tokenizer"} and data.kind == "corpus":
        words = tokenizer.run(data.reference, tokenizer.Config(kind="word", min_frequency=1), store=store)
        changes["tokenizer"] = words.reference
    options = {key: changes.pop(key) for key in ("resume", "allow_change", "force") if key in changes}
    result = finetune.run(
        data.reference, finetune.Config(**(TINY | changes)), store=store, progress=progress, **options
    )
    assert result is not None
    return result


def measure(store: Store, model: str, data: Artifact, **settings: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The metrics of a model on a dataset, and its predictions."""
    made = evaluate.run(model, data.reference, evaluate.Config(**settings), store=store).artifact
    return made.counts["metrics"], pq.read_table(made.path / "predictions.parquet").to_pylist()
