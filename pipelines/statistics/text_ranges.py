"""Stretches of a corpus, and reading only the rows of a Parquet table that overlap with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from guidance.statistics.roles import Pieces
from pipelines.engine.shards import footer, open_checked, remembered

FAR = 1 << 62
"""A position beyond the end of every document."""


class TextRange:
    """The stretch of the corpus that some pieces cover.

    Attributes:
        documents: the documents, sorted.
        places: first code point in the first document, and last one in the last document.
        sentences: likewise for numbers of sentences.
    """

    def __init__(self, documents: Any, places: tuple[int, int], sentences: tuple[int, int]) -> None:
        self.documents, self.places, self.sentences = documents, places, sentences

    @classmethod
    def of(cls, pieces: Pieces, ordinary: Any) -> TextRange:
        """The stretch of some pieces; ``ordinary`` are the indices of those that are not special tokens, at least one."""
        documents = np.unique(pieces.document[ordinary])
        first = ordinary[pieces.document[ordinary] == documents[0]]
        last = ordinary[pieces.document[ordinary] == documents[-1]]
        return cls(
            documents,
            (int(pieces.start[first].min()), int(pieces.end[last].max())),
            (int(pieces.sentence[first].min()), int(pieces.sentence[last].max())),
        )

    @classmethod
    def empty(cls) -> TextRange:
        """A range without documents."""
        return cls(np.zeros(0, np.int64), (0, 0), (0, 0))

    def holds(self, document: Any, place: Any, bounds: tuple[int, int], length: Any) -> Any:
        """Which rows of a table overlap with the stretch, a boolean array.

        Args:
            document, place, length: for each row its document, where it begins there, and how long it is.
            bounds: the limits that ``place`` is compared with: `places` or `sentences`.
        """
        first, last = self.documents[0], self.documents[-1]
        after = (document > first) | (place + length >= bounds[0])
        before = (document < last) | (place <= bounds[1])
        return np.isin(document, self.documents) & after & before


def rows_in(
    path: Path, columns: Sequence[str], wanted: TextRange, place: str, bounds: tuple[int, int], reach: int
) -> Iterator[Any]:
    """The rows of a table, sorted by the text, that overlap with a range: a ``pyarrow.Table`` for each row group.

    Args:
        place: name of the column that says where in its document a row begins.
        bounds: the limits in ``wanted`` that belong to this column.
        reach: how far a row can extend beyond where it begins.
    """
    if not len(wanted.documents):
        return
    low, high = (int(wanted.documents[0]), bounds[0] - reach), (int(wanted.documents[-1]), bounds[1])
    with open_checked(path) as file:
        for number, (first, last) in enumerate(_extents(str(path), place)):
            if first <= high and last >= low:
                table = file.read_row_group(number, columns=list(columns))
                numbers, places = (table.column(name).to_numpy() for name in ("document", place))
                lengths = pc.utf8_length(table["text"]).to_numpy() if "text" in columns else 0
                inside = wanted.holds(numbers, places, bounds, lengths)
                if inside.any():
                    yield table.filter(pa.array(inside)).combine_chunks()


@remembered
def _extents(path: str, place: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The first and last (document, place) of each row group; 0 and `FAR` where the statistics do not tell the place."""
    metadata = footer(path)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        documents, places = (group.column(names.index(name)).statistics for name in ("document", place))
        if documents is None or places is None or not documents.has_min_max or not places.has_min_max:
            found.append(((0, 0), (FAR, FAR)))
        elif documents.min == documents.max:
            found.append(((documents.min, places.min), (documents.max, places.max)))
        else:
            found.append(((documents.min, 0), (documents.max, FAR)))
    return found
