from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from guidance.errors import InputError
from pipelines.batches import Examples, Order, pad, shares
from pipelines.manifest import ArtifactDamaged
from pipelines.store import Store
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


def test_every_example_comes_once_in_every_epoch() -> None:
    order = Order(10, 4, seed=3)
    seen = [pair for step in range(10) for pair in order.batch(step)]
    assert sorted(seen) == [(epoch, example) for epoch in range(4) for example in range(10)]


def test_the_order_is_a_function_of_seed_and_step_alone() -> None:
    straight = [Order(10, 4, seed=3).batch(step) for step in range(8)]
    one = Order(10, 4, seed=3)
    assert [one.batch(step) for step in (7, 0, 3)] == [straight[step] for step in (7, 0, 3)]
    assert straight != [Order(10, 4, seed=4).batch(step) for step in range(8)]
    epochs = [[example for _, example in Order(50, 50, seed=3).batch(step)] for step in range(2)]
    assert epochs[0] != epochs[1]


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    assert Order(1, 3, seed=0).batch(1) == [(3, 0), (4, 0), (5, 0)]


def test_no_examples_are_refused() -> None:
    with pytest.raises(InputError, match="no training sequences"):
        Order(0, 4, seed=0)


@pytest.mark.parametrize(("items", "parts"), [(0, 3), (2, 3), (7, 3), (9, 3), (8, 1)])
def test_shares_keep_the_order_and_differ_by_one_at_most(items: int, parts: int) -> None:
    cut = shares(list(range(items)), parts)
    assert len(cut) == parts and [item for part in cut for item in part] == list(range(items))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_padding_stands_on_the_right() -> None:
    assert pad([np.array([1, 2]), np.array([], np.int64)], 9, 3).tolist() == [[1, 2, 9], [9, 9, 9]]
