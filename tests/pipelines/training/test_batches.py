from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged, digest
from pipelines.storage.store import Store
from pipelines.training.batches import Examples, pad, shares
from tests import trainings


def read(store: Store, table: pa.Table, vocab_size: int = 64, split: str = "train") -> Examples:
    return Examples.read(trainings.write_sequences(store, {"train": table}), split, vocab_size)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(64, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_examples_are_the_rows_of_the_file_in_the_smallest_type(store: Store, vocab_size: int, dtype: type) -> None:
    rows = [[0, 5, 2], [0, 2], [0, 63, 63, 63, 2]]
    examples = read(store, trainings.table(rows), vocab_size)
    assert [examples[i].tolist() for i in range(len(examples))] == rows
    assert examples.ids.dtype == dtype and examples[0].dtype == np.int64


def test_a_split_without_a_file_has_no_examples(store: Store) -> None:
    assert len(read(store, trainings.table([[0, 2]]), split="valid")) == 0


def test_a_nullable_or_unnamed_item_type_is_read_too(store: Store) -> None:
    kind = pa.list_(pa.field("item", pa.int32(), nullable=False))
    assert len(read(store, pa.table({"id": pa.array([[0, 2]], kind)}))) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"ids": pa.array([[1]], trainings.IDS)}), "id is missing"),
        (pa.table({"id": pa.array([[1]], pa.list_(pa.int64()))}), "list<.*int64>, not list<int32>"),
        (pa.table({"id": pa.array([1], pa.int32())}), "int32, not list<int32>"),
        (pa.table({"id": pa.array(["1"])}), "string, not list<int32>"),
        (pa.table([pa.array([[1]], trainings.IDS)] * 2, names=["id", "id"]), "id is list.* and list.*, not"),
        (trainings.table([[1], None]), "nulls"),
        (trainings.table([[1, None]]), "nulls"),  # type: ignore[list-item]
        (trainings.table([[1], []]), "empty sequences"),
        (trainings.table([[0, 64]]), "outside the vocabulary of 64"),
        (trainings.table([[0, -1]]), "outside the vocabulary of 64"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(store: Store, table: pa.Table, message: str) -> None:
    with pytest.raises(ArtifactDamaged, match=message) as caught:
        read(store, table)
    assert "train.parquet" in caught.value.message


def test_several_artifacts_are_read_one_after_the_other(store: Store) -> None:
    rows = [[[0, 5, 6, 7, 8, 9, 2], [0, 7, 2]], [[0, 8, 2]], [[0, n, n, 2] for n in range(5, 12)]]
    data = [trainings.write_sequences(store, {"train": trainings.with_places(part)}) for part in rows]
    found = Examples.read_all(data, "train", 64, features=("segment",))
    assert [found[n].tolist() for n in range(len(found))] == [row for part in rows for row in part]
    assert [found.column("segment", n).tolist() for n in (0, 2)] == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0]]
    assert len(Examples.read_all(data, "valid", 64)) == 0


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, [2, 1, 7]), (10, [2, 1, 7]), (99, [2, 1, 7]), (5, [1, 1, 3]), (1, [0, 0, 1])]
)
def test_a_limit_takes_sequences_of_all_artifacts_in_proportion(store: Store, limit: int, kept: list[int]) -> None:
    data = [
        trainings.write_sequences(store, {"train": trainings.table([[0, 10 * part + n, 2] for n in range(number)])})
        for part, number in enumerate((2, 1, 7), 1)
    ]
    found = Examples.read_all(data, "train", 64, limit=limit)
    words = [int(found[n][1]) for n in range(len(found))]
    assert words == [10 * part + n for part, number in enumerate(kept, 1) for n in range(number)]


@pytest.mark.parametrize(("items", "parts"), [(0, 3), (2, 3), (7, 3), (9, 3), (8, 1)])
def test_shares_keep_the_order_and_differ_by_at_most_one(items: int, parts: int) -> None:
    cut = shares(list(range(items)), parts)
    assert len(cut) == parts and [item for part in cut for item in part] == list(range(items))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_padding_is_on_the_right() -> None:
    assert pad([np.array([1, 2]), np.array([], np.int64)], 9, 3).tolist() == [[1, 2, 9], [9, 9, 9]]


def write_masks(store: Store, **columns: pa.Array) -> Artifact:
    """A masks artifact with these columns of training sequences."""
    recipe = digest(
        ["masks by hand", {name: [str(column.type), column.to_pylist()] for name, column in columns.items()}]
    )
    table = pa.table(columns)
    with store.build("masks", recipe, {"stage": "build-masks"}) as out:
        with out.parquet("train.parquet", table.schema) as writer:
            writer.write_table(table)
    return Artifact(store.folder("masks", recipe))


def test_features_are_read_in_small_types(store: Store) -> None:
    data = trainings.write_sequences(store, {"train": trainings.with_places([[0, 5, 6, 7, 8, 9, 2], [0, 7, 2]])})
    lists = {"word": pa.int32(), "idf": pa.float32(), "negation": pa.bool_(), "relation": pa.int8()}
    values: dict[str, list[list[Any]]] = {
        "word": [[-1, 0, 0, 1, 2, 3, -1], [-1, 0, -1]],
        "idf": [[0, 1.5, 1.5, 2, 0, 3, 0], [0, 4, 0]],
        "negation": [[False] * 6 + [True], [True, False, False]],
        "relation": [[-1, 3, 3, 4, 5, 6, -1], [-1, 90, -1]],
    }
    masks = write_masks(store, **{name: pa.array(values[name], pa.list_(kind)) for name, kind in lists.items()})
    found = Examples.read(data, "train", 64, features=tuple(lists), masks=masks)
    for name, rows in values.items():
        for number, row in enumerate(rows):
            assert found.column(name, number).tolist() == row
    sizes = {name: column.dtype.itemsize for name, column in found.columns.items()}
    assert sizes == {"word": 2, "idf": 4, "negation": 1, "relation": 1}
    padded = pad([found.column("negation", n) for n in range(2)], False, 7)
    assert padded.dtype == torch.bool and padded[1].tolist() == [True] + [False] * 6
    assert pad([found.column("idf", n) for n in range(2)], 0, 7).dtype == torch.float32
    assert pad([found.column("word", n) for n in range(2)], -1, 7)[1].tolist() == [-1, 0, *[-1] * 5]
    # segments need only the sequences
    alone = Examples.read(data, "train", 64, features=("segment",))
    assert [alone.column("segment", n).tolist() for n in range(2)] == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0]]
    assert alone.columns["segment"].dtype == np.int16
    assert Examples.read(data, "valid", 64, features=("word",), masks=masks).columns["word"].tolist() == []


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1, 2], [1]], pa.list_(pa.int32())), "column word does not have one value for each token"),
        (pa.array([[1, 2, 3], [1, None, 2]], pa.list_(pa.int32())), "column word has nulls"),
        (pa.array([[1, 2, 3], [1, 2, 3]], pa.list_(pa.int64())), r"column word is list<.*int64>, not list<int32>"),
        (pa.array([1, 2], pa.int32()), "column word is int32, not list<int32>"),
    ],
)
def test_damaged_features_are_refused(store: Store, column: pa.Array, message: str) -> None:
    data = trainings.write_sequences(store, {"train": trainings.with_places([[0, 5, 2], [0, 7, 2]])})
    with pytest.raises(ArtifactDamaged, match=message):
        Examples.read(data, "train", 64, features=("word",), masks=write_masks(store, word=column))
    other = write_masks(store, idf=pa.array([[1.0]], pa.list_(pa.float32())))
    with pytest.raises(ArtifactDamaged, match="column word is missing"):
        Examples.read(data, "train", 64, features=("word",), masks=other)
