"""Training examples: token ids in compact arrays, and padded batches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from guidance.patterns.features import FEATURES
from guidance.statistics.roles import COLUMNS, Pieces, segment_numbers
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.labels import TAGGED_WORD

_OWN = {"text": pa.int8(), "word": pa.int32(), "segment": pa.int32()}
"""Columns of lists that sequences of a task's examples may have besides those of all sequences."""

_SEQUENCES = 4096
"""How many sequences are numbered at once."""


@dataclass(frozen=True)
class Examples:
    """The sequences of one split: all ids in one array, with the bounds of each sequence.

    A token takes two bytes for vocabularies up to 65,536, else four.  Each of the ``columns`` (token features by name)
    takes one to four bytes more.

    Attributes:
        labels: of examples of a task, the label of each sequence, or None.
        numbers: of examples of a task, the row of each sequence's example in the dataset's ``documents.parquet``.
    """

    ids: np.ndarray
    bounds: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, object))
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def read(
        cls,
        artifact: Artifact,
        split: str,
        vocab_size: int,
        *,
        features: Sequence[str] = (),
        masks: Artifact | None = None,
        column: str = "id",
        own: Sequence[str] = (),
    ) -> Examples:
        """The sequences of a split of an artifact; empty if the split has no file.

        Args:
            features: token features to read from ``masks``.  ``segment`` is read from the sequences if they have such a column;
                without masks it is the only one, and else follows from their sentences.
            masks: what ``build-masks`` made of these sequences.
            column: the column of the ids; ``target`` for the targets of pairs, which have no features.
            own: for examples of a task, further columns of lists in the sequences; labels and numbers are read too.

        Raises:
            ArtifactDamaged: a file is no table; a column is missing, of another type, has nulls or another length than
                ``id``; a sequence is empty; or an id is outside the vocabulary.
        """
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        name = f"{split}.parquet"
        if name not in artifact.files:
            return cls(np.zeros(0, dtype), np.zeros(1, np.int64), {f: np.zeros(0, np.int16) for f in (*features, *own)})

        def checked(ids: np.ndarray) -> np.ndarray:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ArtifactDamaged(f"{artifact.path / name}: a token id is outside the vocabulary of {vocab_size}")
            return ids.astype(dtype)

        ids, lengths = read_column(artifact, name, column, pa.int32(), checked)
        if not lengths.all():
            raise ArtifactDamaged(f"{artifact.path / name}: column {column} has empty sequences")
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        columns = {}
        for feature in features:
            if feature == "segment" and _has_column(artifact, name, feature):
                own = tuple(dict.fromkeys((*own, feature)))
                continue
            if masks is None:
                assert feature == "segment"
                columns[feature] = _segments(artifact, name, bounds)
                continue
            values, sizes = read_column(masks, name, feature, pa.from_numpy_dtype(COLUMNS[feature]), compact)
            check_sizes(sizes, lengths, masks.path / name, feature)
            columns[feature] = values
        if not own:
            return cls(ids, bounds, columns)
        for other in own:
            values, sizes = read_column(artifact, name, other, _OWN[other], compact)
            check_sizes(sizes, lengths, artifact.path / name, other)
            columns[TAGGED_WORD if other == "word" else other] = values
        return cls(ids, bounds, columns, *_read_examples(artifact, name, len(lengths)))

    @classmethod
    def read_all(
        cls,
        artifacts: Sequence[Artifact],
        split: str,
        vocab_size: int,
        *,
        masks: Sequence[Artifact] = (),
        limit: int = 0,
        **columns: Any,
    ) -> Examples:
        """The sequences of a split of several artifacts, one artifact after the other; see `read`.

        Args:
            masks: what ``build-masks`` made of each of them, or empty.
            limit: how many sequences of several artifacts to keep, 0 for all; each gives its first ones, in proportion.
            columns: further arguments of `read`.
        """
        given: Sequence[Artifact | None] = masks or [None] * len(artifacts)
        parts = [
            cls.read(artifact, split, vocab_size, masks=its_masks, **columns)
            for artifact, its_masks in zip(artifacts, given, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        sizes = np.array([len(part) for part in parts])
        if 0 < limit < sizes.sum():
            kept = np.diff(np.round(np.cumsum([0, *sizes]) * limit / sizes.sum()).astype(int))
            parts = [part._first(int(number)) for part, number in zip(parts, kept, strict=True)]
        starts = np.cumsum([0, *(part.bounds[-1] for part in parts)])
        bounds = [part.bounds[:-1] + start for part, start in zip(parts, starts[:-1], strict=True)]
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([*bounds, starts[-1:]]),
            {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.numbers for part in parts]),
        )

    def _first(self, number: int) -> Examples:
        end = self.bounds[number]
        columns = {name: column[:end] for name, column in self.columns.items()}
        return Examples(self.ids[:end], self.bounds[: number + 1], columns, self.labels[:number], self.numbers[:number])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sequence, int64."""
        return np.diff(self.bounds)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.bounds[index] : self.bounds[index + 1]].astype(np.int64)

    def column(self, name: str, index: int) -> np.ndarray:
        """A feature of the tokens of a sequence."""
        return self.columns[name][self.bounds[index] : self.bounds[index + 1]]


def read_column(
    artifact: Artifact, name: str, column: str, kind: Any, shrink: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """All values of a column of lists, each batch passed through ``shrink``, and the length of each list."""
    values, lengths = [shrink(np.zeros(0, kind.to_pandas_dtype()))], [np.zeros(0, np.int64)]
    with artifact.open(name) as file:
        try:
            table = open_parquet(file)
            kinds = [field.type for field in table.schema_arrow if field.name == column]
            if len(kinds) != 1 or not pa.types.is_list(kinds[0]) or kinds[0].value_type != kind:
                raise ArtifactDamaged(
                    f"{artifact.path / name}: column {column} is {' and '.join(map(str, kinds)) or 'missing'}, "
                    f"not list<{kind}>"
                )
            for batch in table.iter_batches(columns=[column]):
                lists = batch.column(column)
                flat = lists.flatten()
                if lists.null_count or flat.null_count:
                    raise ArtifactDamaged(f"{artifact.path / name}: column {column} has nulls")
                values.append(shrink(flat.to_numpy(zero_copy_only=False)))
                lengths.append(np.diff(lists.offsets.to_numpy()).astype(np.int64))
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise ArtifactDamaged(f"{artifact.path / name}: unreadable ({str(error)[:160]!r})") from error
    return np.concatenate(values), np.concatenate(lengths)


def _has_column(artifact: Artifact, name: str, column: str) -> bool:
    with artifact.open(name) as file:
        return column in open_parquet(file).schema_arrow.names


def check_sizes(sizes: np.ndarray, lengths: np.ndarray, path: Path, column: str) -> None:
    """Raises ArtifactDamaged when the lists of a column are not as long as the sequences."""
    if not np.array_equal(sizes, lengths):
        raise ArtifactDamaged(f"{path}: column {column} does not have one value for each token")


def _read_examples(artifact: Artifact, name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The label of each sequence, and the number of its example."""
    with artifact.open(name) as file:
        try:
            table = open_parquet(file).read(columns=["label", "example"])
            labels = np.array(table["label"].cast(pa.string()).to_pylist(), object)
            numbers = table["example"].cast(pa.int32()).to_numpy()
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise ArtifactDamaged(f"{artifact.path / name}: unreadable ({str(error)[:160]!r})") from error
    if not len(labels) == len(numbers) == size:
        raise ArtifactDamaged(f"{artifact.path / name}: label and example do not have one value for each sequence")
    return labels, numbers


def _segments(artifact: Artifact, name: str, bounds: np.ndarray) -> np.ndarray:
    """The number of each token's sentence within its sequence, from the columns ``document`` and ``sentence``."""
    document, sentence = (
        read_column(artifact, name, column, pa.int32(), compact)[0] for column in ("document", "sentence")
    )
    if not len(document) == len(sentence) == bounds[-1]:
        raise ArtifactDamaged(f"{artifact.path / name}: document and sentence do not have one value for each token")
    found, nowhere = [np.zeros(0, np.int16)], np.zeros(0, np.int64)
    for start in range(0, len(bounds) - 1, _SEQUENCES):
        some = bounds[start : start + _SEQUENCES + 1]
        places = slice(some[0], some[-1])
        found.append(
            compact(segment_numbers(Pieces(some - some[0], document[places], sentence[places], nowhere, nowhere)))
        )
    return np.concatenate(found)


def compact(values: np.ndarray) -> np.ndarray:
    """Integers as int16, if all of them fit."""
    fits = values.dtype.kind == "i" and (not len(values) or -(1 << 15) <= values.min() <= values.max() < 1 << 15)
    return values.astype(np.int16) if fits and values.itemsize > 2 else values


def pad(rows: list[np.ndarray], value: Any, length: int, device: Any = None) -> Tensor:
    """Rows of different lengths as one (B, T) tensor, padded on the right; integers become int64."""
    kind = {"f": np.dtype(np.float32), "b": np.dtype(bool)}.get(rows[0].dtype.kind if rows else "i", np.dtype(np.int64))
    filled = np.full((len(rows), length), value, kind)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return torch.from_numpy(filled).to(device, non_blocking=True)


def ids_and_mask(rows: list[np.ndarray], pad_id: int, device: Any = None) -> dict[str, Tensor]:
    """Token ids as ``input_ids`` and ``attention_mask``, (B, T) each, padded to the longest."""
    length = max(map(len, rows))
    masks = [np.ones(len(row), np.int64) for row in rows]
    return {"input_ids": pad(rows, pad_id, length, device), "attention_mask": pad(masks, 0, length, device)}


def pad_features(columns: Mapping[str, list[np.ndarray]], length: int, device: Any = None) -> dict[str, Tensor]:
    """Token features as tensors (B, T) by name, padded as `FEATURES` says; other columns are left out."""
    known = {name: rows for name, rows in columns.items() if name in COLUMNS and rows}
    return {name: pad(rows, FEATURES[name].fill, length, device) for name, rows in known.items()}


def shares(items: list[Any], parts: int) -> list[list[Any]]:
    """A list split into ``parts`` consecutive parts whose lengths differ by at most one."""
    size, extra = divmod(len(items), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [items[starts[part] : starts[part + 1]] for part in range(parts)]
