"""The role masks of a masks artifact: for one sequence, to look at, or for all, exported for other tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from guidance.errors import InputError
from guidance.patterns import Pattern
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import Tokens, Vocabulary
from guidance.plan import Plan
from guidance.statistics.roles import COLUMNS
from pipelines.engine.shards import parquet_file
from pipelines.progress import Progress
from pipelines.statistics.codes import check_codes
from pipelines.statistics.role_tables import RoleTables, pieces_of
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import new_folder, open_parquet
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from pipelines.training.batches import pad, pad_features
from pipelines.training.models import read_tokenizer
from pipelines.views.one_text import word_labels

__all__ = ["Example", "Opened", "Roles", "choose", "dense_schema", "export"]

ENTRIES = 1 << 24
"""Approximate number of mask entries to hold in memory at once."""


@dataclass(frozen=True)
class Roles:
    """The roles that can be computed from a masks artifact, by name; and for each other one, why not."""

    known: Mapping[str, Pattern]
    missing: Mapping[str, str]


@dataclass(frozen=True)
class Example:
    """A sequence, or one of its sentences, with its role masks.

    Attributes:
        labels: a label for each token.
        masks: for each role, bool (queries, keys).
        sentences: the number of sentences in the sequence.
    """

    labels: tuple[str, ...]
    masks: Mapping[str, np.ndarray]
    sentences: int


def choose(masks: Artifact, wanted: Sequence[Any] = ()) -> Roles:
    """The wanted roles, written as patterns in plans; by default those of ``preset:roles``.

    Raises:
        UnknownName: there is no such pattern.
        InputError: a pattern is weighted, so it is not a mask; or a wanted one needs data that this artifact lacks.
    """
    if wanted:
        patterns = [read_pattern(spec) for spec in wanted]
    else:
        patterns = [guide.bound_pattern for guide in Plan.load("preset:roles").guides if guide.bound_pattern]
    chosen, missing, reasons = {}, {}, masks.counts.get("missing", {})
    known = {*Vocabulary.FEATURES, *masks.counts["columns"]}
    for pattern in patterns:
        if pattern.weighted or pattern.tables:
            raise InputError(f"{pattern} gives weights, not a mask", hint="draw weights with `guide patterns show`")
        needs: dict[str, list[str]] = {}
        for need in pattern.needs:
            if need not in known:
                needs.setdefault(reasons.get(need, "unknown"), []).append(need)
        if needs:
            missing[str(pattern)] = "; ".join(f"no {', '.join(names)}: {reason}" for reason, names in needs.items())
        else:
            chosen[str(pattern)] = pattern
    if missing and (wanted or not chosen):
        name, reason = next(iter(missing.items()))
        raise InputError(f"{masks.reference} lacks data that {name} needs: {reason}")
    return Roles(chosen, missing)


class Opened(contextlib.ExitStack):
    """A masks artifact, open together with its sequences, and with its corpus if that is still there."""

    def __init__(self, masks: Artifact, store: Store) -> None:
        super().__init__()
        check_codes(masks)
        self.masks, self.data = masks, self.enter_context(store.load_input(masks, "sequences"))
        self._tokenizer = read_tokenizer(self.data, masked=False)
        self._vocabulary: Vocabulary | None = None
        self._corpus: Artifact | None = None
        with contextlib.suppress(ArtifactMissing):
            self._corpus = self.enter_context(store.load_input(masks, "corpus"))

    def size(self, split: str) -> int:
        """The number of sequences in a split.

        Raises:
            InputError: the split has none.
        """
        rows = self.masks.files.get(f"{split}.parquet", {}).get("rows", 0)
        if not rows:
            splits = ", ".join(name.removesuffix(".parquet") for name in self.masks.files if name.endswith(".parquet"))
            raise InputError(
                f"{self.masks.reference} has no sequences in {split!r}", hint=f"it has the splits {splits}"
            )
        return int(rows)

    def example(self, split: str, number: int, patterns: Mapping[str, Pattern], sentence: int | None = None) -> Example:
        """One sequence, or with ``sentence`` only that sentence; masks are computed on the whole sequence either way.

        Raises:
            InputError: there is no such sequence or sentence.
        """
        if not 0 <= number < self.size(split):
            raise InputError(f"{split} has the sequences 0 to {self.size(split) - 1}, not {number}")
        row, roles = (self._row(artifact, split, number) for artifact in (self.data, self.masks))
        tokens = self._tokens([row], [roles])
        segment = np.array(roles["segment"])
        kept = np.arange(len(segment))
        if sentence is not None:
            kept = np.flatnonzero(segment == sentence)
            if not len(kept):
                raise InputError(f"sequence {number} has the sentences 0 to {segment.max()}, not {sentence}")
        letters = self._letters(row) if self._corpus is not None else [None] * len(row["id"])
        labels = word_labels(self._tokenizer.convert_ids_to_tokens(row["id"]), letters, roles["word"])
        masks = {name: p.on(tokens).dense()[0].bool().numpy()[np.ix_(kept, kept)] for name, p in patterns.items()}
        return Example(tuple(labels[n] for n in kept), masks, int(segment.max()) + 1)

    def batches(self, split: str, most: int) -> Iterator[tuple[Tokens, list[int]]]:
        """All sequences of a split in batches, with their lengths.

        The masks of a batch have at most ``most`` entries each, unless it is a single sequence.
        """
        held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        longest = 0
        for pair in zip(*(self._rows(artifact, split) for artifact in (self.data, self.masks)), strict=True):
            size = len(pair[0]["id"])
            longest = max(longest, size)
            if held and (len(held) + 1) * longest**2 > most:
                yield self._batch(held)
                held, longest = [], size
            held.append(pair)
        if held:
            yield self._batch(held)

    def _batch(self, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[Tokens, list[int]]:
        rows, roles = zip(*pairs, strict=True)
        return self._tokens(rows, roles), [len(row["id"]) for row in rows]

    def _rows(self, artifact: Artifact, split: str) -> Iterator[dict[str, Any]]:
        with artifact.open(f"{split}.parquet") as raw:
            for batch in open_parquet(raw).iter_batches(batch_size=64):
                yield from batch.to_pylist()

    def _row(self, artifact: Artifact, split: str, number: int) -> dict[str, Any]:
        with artifact.open(f"{split}.parquet") as raw:
            file = open_parquet(raw)
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if number < size:
                    row: dict[str, Any] = file.read_row_group(group).slice(number, 1).to_pylist()[0]
                    return row
                number -= size
        raise ArtifactDamaged(f"{artifact.path / split}.parquet: fewer rows than its manifest says")

    def _tokens(self, rows: Sequence[dict[str, Any]], roles: Sequence[dict[str, Any]]) -> Tokens:
        self._vocabulary = self._vocabulary or Vocabulary.from_tokenizer(self._tokenizer)
        length = max(len(row["id"]) for row in rows)
        ids = pad([np.array(row["id"]) for row in rows], 0, length)
        valid = torch.zeros_like(ids, dtype=torch.bool)
        for n, (row, role) in enumerate(zip(rows, roles, strict=True)):
            if {len(values) for values in role.values()} != {len(row["id"])}:
                raise ArtifactDamaged(f"{self.masks.path}: masks and sequences have different lengths")
            valid[n, : len(row["id"])] = True
        columns = {name: [np.array(role[name], COLUMNS[name]) for role in roles] for name in roles[0]}
        return Tokens(ids, valid, {**self._vocabulary.columns(ids), **pad_features(columns, length)})

    def _letters(self, row: dict[str, Any]) -> list[str | None]:
        assert self._corpus is not None
        columns = {name: pa.array([row[name]]) for name in ("document", "sentence", "start", "end")}
        texts = RoleTables(str(self._corpus.path)).texts(pieces_of(pa.table(columns)))
        return [None if document < 0 else text for document, text in zip(row["document"], texts, strict=True)]


# export


def dense_schema(roles: Sequence[str]) -> Any:
    """Columns of a file of dense masks, with one row per sequence."""
    unit = "length x length, query after query; true: the key may be looked at"
    return schema_of(
        {
            "sequence": ("int64", "row in the file of the same name of the sequences"),
            "length": ("int32", "tokens"),
            **dict.fromkeys(roles, ("[bool]", unit)),
        }
    )


def export(opened: Opened, roles: Roles, folder: Path, progress: Progress) -> dict[str, int]:
    """Write the masks of all sequences to a new folder, one file per split; returns the number of rows of each file.

    Raises:
        InputError: the folder exists and is not empty.
    """
    splits = [name.removesuffix(".parquet") for name in opened.masks.files if name.endswith(".parquet")]
    total, written = sum(opened.size(split) for split in splits), {}
    with new_folder(folder) as temporary, progress.task("masks", total=total, unit="sequences") as bar:
        for split in splits:
            written[f"{split}.parquet"] = _write(opened, roles, split, temporary / f"{split}.parquet", bar)
    return written


def _write(opened: Opened, roles: Roles, split: str, path: Path, bar: Any) -> int:
    schema, first = dense_schema(list(roles.known)), 0
    with parquet_file(path, schema) as writer:
        for tokens, lengths in opened.batches(split, max(1, ENTRIES // max(1, len(roles.known)))):
            offsets = pa.array(np.concatenate([[0], np.cumsum(np.square(lengths))]).astype(np.int32))
            arrays = [pa.array(range(first, first + len(lengths)), pa.int64()), pa.array(lengths, pa.int32())]
            for name, pattern in roles.known.items():
                dense = pattern.on(tokens).dense().bool().numpy()
                flat = np.concatenate([mask[:n, :n].ravel() for mask, n in zip(dense, lengths, strict=True)])
                arrays.append(pa.ListArray.from_arrays(offsets, pa.array(flat), type=schema.field(name).type))
            writer.write_table(pa.table(arrays, schema=schema))
            first += len(lengths)
            bar.advance(len(lengths))
    return first
