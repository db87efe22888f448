"""Small datasets of documents with summaries and with sections, for all tests of them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipelines.stages import dataset, sequences
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

TOPICS = {
    "sea": ("the ship sails on the deep sea", "a whale swims under the old ship", "sailors fear the sea and its waves"),
    "law": (
        "the judge reads the new law aloud",
        "a court hears what the judge said",
        "lawyers write laws for the high court",
    ),
    "farm": (
        "the farmer feeds his brown cows early",
        "a cow eats the grass of fields",
        "farmers sow their wheat in the fields",
    ),
}


def write(path: Path, data: str | bytes) -> Path:
    """A file with this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def make(store: Store, *train: Path, test: Path | None = None, **settings: Any) -> Artifact:
    """A dataset without validation documents."""
    files = {"train": [str(path) for path in train], "test": [str(test)] if test else []}
    settings = {"valid_fraction": 0.0 if train else None, **settings}
    return dataset.run(files, dataset.Config(**settings), store=store).artifact


def parts(made: Artifact) -> list[list[list[str]]]:
    """The sentences of each block of each document."""
    found: dict[int, list[list[str]]] = {}
    for row in pq.read_table(made.path / "blocks.parquet").to_pylist():
        sentences = [row["text"][span["start"] : span["end"]] for span in row["sentences"]]
        found.setdefault(row["document"], []).append(sentences)
    return list(found.values())


def column(made: Artifact, name: str) -> list[Any]:
    """A column of ``documents.parquet``."""
    found: list[Any] = pq.read_table(made.path / "documents.parquet")[name].to_pylist()
    return found


def lay_out(store: Store, data: Artifact, tokenizer: str, split: str, **settings: Any) -> list[dict[str, Any]]:
    """The sequences of a split."""
    config = sequences.Config(packing="examples", **settings)
    made = sequences.run(data.reference, tokenizer, config, store=store).artifact
    found: list[dict[str, Any]] = pq.read_table(made.path / f"{split}.parquet").to_pylist()
    return found


def articles(folder: Path, number: int, seed: int) -> Path:
    """Documents whose summary is the one sentence that begins with ``news``."""
    shuffled = random.Random(seed)
    rows = []
    for _ in range(number):
        sentences = shuffled.sample([*itertools.chain(*TOPICS.values())], 4)
        news = "news " + " ".join(shuffled.choices(["red", "blue", "green", "gold", "pink", "grey"], k=6))
        sentences.insert(shuffled.randrange(5), news)
        rows.append({"text": sentences, "summary": news})
    return write(folder / f"articles-{seed}.jsonl", "\n".join(map(json.dumps, rows)))


def sections(folder: Path, number: int, seed: int) -> Path:
    """Documents of three sections about different topics, each of which begins with ``chapter``."""
    shuffled = random.Random(seed)
    for place in range(number):
        topics = shuffled.sample(list(TOPICS.values()), 3)
        parts = ["chapter " + "\n".join(shuffled.sample(topic, shuffled.choice((2, 3)))) for topic in topics]
        write(folder / f"sections-{seed}/{place}.ref", "\n==========\n".join(parts))
    return folder / f"sections-{seed}"
