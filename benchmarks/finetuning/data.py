"""The data sets, and the models that runs start from."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

from benchmarks import shared_data
from guidance.plan import Plan
from pipelines.stages import corpus, dataset, evaluate, pretrain, sequences, tokenizer
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store

SHAPE: dict[str, Any] = {"architecture": "modernbert", "layers": 8, "hidden": 128, "heads": 4, "ffn": 512}


def files(
    store: Store,
    train: str | Sequence[str] = "",
    test: str = "",
    take: int = 0,
    unit: str = "lines",
    skip: int = 0,
    **settings: Any,
) -> str:
    """A dataset of files below the shared data.

    Args:
        train: a file or folder, or several.
        take: how many units of the only training file to take, from the first one on; 0 for all.
        unit: ``lines``, ``sentences`` in CoNLL columns, or ``pairs`` of a JSON object.
        skip: how many lines of the test file to leave out, from the first one on.
    """
    sources = [shared_data(one) for one in ([train] if isinstance(train, str) else train) if one]
    tests = [shared_data(test)] if test else []
    if take:
        (source,) = sources
        sources = [_slice(source, str(take), first_of(_content(source), take, unit), store)]
    if skip:
        (source,) = tests
        rest = b"".join(_content(source).splitlines(keepends=True)[skip:])
        tests = [_slice(source, f"from-{skip}", rest, store)]
    given = {"train": sources} | ({"test": tests} if tests else {})
    named = {split: [str(path) for path in paths] for split, paths in given.items() if paths}
    fractions = {"valid_fraction": 0.1} if sources else {}
    return dataset.run(named, dataset.Config(**fractions | settings), store=store).reference


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _slice(source: Path, name: str, content: bytes, store: Store) -> Path:
    """A file beside the artifacts with a part of a file of the shared data."""
    part = store.root / "slices" / source.parent.name / f"{source.name.removesuffix('.gz')}-{name}"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    return part


def first_of(content: bytes, count: int, unit: str) -> bytes:
    """The beginning of a file, as many units long; see `files`."""
    if unit == "pairs":
        return json.dumps(dict(itertools.islice(json.loads(content).items(), count))).encode()
    between, parts = {
        "lines": (b"\n", content.split(b"\n")),
        "sentences": (b"\n\n", re.split(rb"\n\s*\n", content)),
    }[unit]
    return between.join(parts[:count]) + between


def starter(store: Store) -> str:
    """A model that trains well at this size, pre-trained on 26 novels: ModernBERT-shaped, 8 layers x 128."""
    text = corpus.run([str(shared_data("lm-litbank-books/books"))], corpus.Config(), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=8000, lowercase=True), store=store).reference
    packed = sequences.run(text, bpe, sequences.Config(max_length=64), store=store).reference
    config = pretrain.Config(
        **SHAPE,
        steps=2000,
        warmup_steps=100,
        learning_rate=1e-3,
        schedule="linear",
        evaluate_every=500,
        save_every=250,
    )
    made = pretrain.run(packed, config, store=store)
    assert made is not None
    return made.reference


def about_starter(store: Store) -> dict[str, Any]:
    """How good `starter` is on held-out words, with the n-gram floors, and how long its word vectors are, in the median."""
    model = store.load(starter(store))
    packed = store.load_input(model, "sequences")
    scores = evaluate.run(model.reference, packed.reference, evaluate.Config(split="valid"), store=store).artifact
    found = json.loads(scores.read("metrics.json"))
    weights = load_file(model.path / "model.safetensors")
    (vectors_VD,) = (tensor for name, tensor in weights.items() if name.endswith("tok_embeddings.weight"))
    return {
        "loss": found["metrics"]["loss"],
        "floors": found["floors"],
        "vector_length": float(vectors_VD.norm(dim=1).median()),
    }


def most_frequent(reference: str, store: Store) -> float:
    """The share of the most frequent label in the test split."""
    with store.load(reference).open("documents.parquet") as file:
        rows = pq.read_table(file, columns=["split", "label"]).to_pylist()
    labels = Counter(row["label"] for row in rows if row["split"] == "test")
    return max(labels.values()) / labels.total()


def plan_file(plan: Plan, store: Store) -> str:
    """The path of a plan that is no preset."""
    path = store.root / "plans" / f"{digest(plan.dumps())[:16]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.dumps(), encoding="utf-8")
    return str(path)
