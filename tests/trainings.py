"""Tiny sequences and trainings, for all tests that train.

Most tokens are their predecessor plus one, so that there is something to learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelines.engine.stage import Result
from pipelines.progress import Progress, Task
from pipelines.stages import pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [".", ",", *(f"w{n}" for n in range(57))]
VOCABULARY = [*SPECIAL, *WORDS]
IDS = pa.list_(pa.field("element", pa.int32()))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread for modules that import this: tiny trainings are faster, bits are equal everywhere, and forking is safe."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokenizer_files(vocabulary: list[str] = VOCABULARY) -> dict[str, bytes]:
    """A word-level tokenizer of 64 tokens in RoBERTa's order."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    special = dict(zip(names, SPECIAL, strict=True)) | {"cls_token": "<s>", "sep_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **special}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def rows_of_ids(number: int, length: int, seed: int = 0) -> list[list[int]]:
    """Sequences of ``length`` - 4 to ``length`` tokens."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        body = [int(random.integers(5, 64))]
        while len(body) < length - 2 - int(random.integers(0, 4)):
            body.append(int(random.integers(5, 64)) if random.random() < 0.2 else 5 + (body[-1] - 4) % 59)
        rows.append([0, *body, 2])
    return rows


def write_sequences(
    store: Store,
    tables: dict[str, pa.Table],
    *,
    max_length: int = 16,
    tokenizer: dict[str, bytes] | None = None,
    provenance: list[dict[str, Any]] | None = None,
) -> Artifact:
    """A sequences artifact with these tables as splits."""
    shown = {split: [str(table.schema), table.to_pylist()] for split, table in tables.items()}
    tokenizer = tokenizer or tokenizer_files()
    recipe = digest(["tiny sequences", shown, max_length, sorted(map(repr, tokenizer.items()))])
    place = store.folder("sequences", recipe)
    if not place.exists():
        manifest = {"stage": "build-sequences", "stage_version": 1, "config": {"max_length": max_length}, "inputs": {}}
        with store.build("sequences", recipe, manifest) as out:
            for split, table in tables.items():
                with out.parquet(f"{split}.parquet", table.schema) as writer:
                    writer.write_table(table)
            for name, content in tokenizer.items():
                out.write(f"tokenizer/{name}", content)
            out.counts |= {"sequences": {split: table.num_rows for split, table in tables.items()}}
            out.provenance += provenance or [{"source": "made by hand", "license": "Apache-2.0"}]
    return Artifact(place)


def table(rows: list[list[int] | None]) -> pa.Table:
    return pa.table({"id": pa.array(rows, IDS)})


def with_places(rows: list[list[int]]) -> pa.Table:
    """Ids with their document and sentence: each row is a document, and every four tokens are a sentence."""
    documents = [[-1, *[n] * (len(row) - 2), -1] for n, row in enumerate(rows)]
    sentences = [[-1, *(place // 4 for place in range(len(row) - 2)), -1] for row in rows]
    return (
        table(rows)
        .append_column("document", pa.array(documents, IDS))
        .append_column("sentence", pa.array(sentences, IDS))
    )


def sequences(store: Store, *, train: int = 40, valid: int = 8, length: int = 16, **options: Any) -> Artifact:
    """A sequences artifact with the columns that training reads."""
    numbers = {"train": train, "valid": valid}
    tables = {s: with_places(rows_of_ids(n, length, s == "valid")) for s, n in numbers.items() if n}
    return write_sequences(store, tables, max_length=length, **options)


TINY: dict[str, Any] = {"size": "tiny", "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "learning_rate": 1e-3}


def config(**changes: Any) -> pretrain.Config:
    """By default six steps of a model with two layers of two heads."""
    defaults = {**TINY, "steps": 6, "batch_size": 8, "evaluate_every": 3, "save_every": 2}
    if changes.get("epochs") is not None and "steps" not in changes:
        del defaults["steps"]
    return pretrain.Config(**(defaults | changes))


def train(store: Store, *data: Artifact, progress: Progress | None = None, **changes: Any) -> Result:
    """Run ``pretrain``; changes that are not fields of its configuration go to `pipelines.stages.pretrain.run`."""
    options = {key: changes.pop(key) for key in list(changes) if key not in pretrain.Config.model_fields}
    references = [given.reference for given in data or (sequences(store),)]
    result = pretrain.run(references, config(**changes), store=store, progress=progress, **options)
    assert result is not None
    return result


def metrics(folder: Path) -> list[dict[str, str]]:
    """The metrics of each step as hexadecimal floats, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: float(v).hex() for k, v in row.items() if "second" not in k} for row in rows]


def files_of(artifact: Artifact) -> dict[str, str]:
    """The digests of all weights of a model artifact."""
    return {name: entry["sha256"] for name, entry in artifact.files.items() if name.endswith(".safetensors")}


def assert_close(one: Path, other: Path) -> None:
    """Assert that all metrics but times and all weights of two model folders are equal to 1e-9."""
    for row, there in zip(metrics(one), metrics(other), strict=True):
        assert row.keys() == there.keys()
        for key in row:
            assert float.fromhex(row[key]) == pytest.approx(float.fromhex(there[key]), abs=1e-9), key
    names, others = ({p.relative_to(folder) for p in folder.rglob("*.safetensors")} for folder in (one, other))
    assert names == others
    for name in names:
        weights, theirs = (safetensors.torch.load_file(folder / name) for folder in (one, other))
        torch.testing.assert_close(weights, theirs, atol=1e-9, rtol=0)


class At(Progress):
    """Calls ``action`` after a number of steps, between the update and the checkpoint."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    @contextmanager
    def task(self, title: str, *, total: float | None = None, unit: str = "", done: float = 0) -> Iterator[Task]:
        outer = self

        class Counting(Task):
            def advance(self, amount: float = 1, note: str = "") -> None:
                nonlocal done
                done += amount
                if amount == 1 and done == outer.step:
                    outer.action()

        yield Counting()


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)
