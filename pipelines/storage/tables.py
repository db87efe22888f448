"""Names of tables that several stages read, and schemas: columns have their unit in the metadata, and few may be null."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pipelines.lazy import pa

Columns = Mapping[str, tuple[Any, str]]
"""The columns of a table by name, each with its type, and what a value means, in a few words.  A type is a ``pyarrow.DataType`` or the
name of one, such as ``int32``; ``[int32]`` is a list whose elements are never null."""

BLOCKS, DOCUMENTS = "blocks.parquet", "documents.parquet"
"""Of ``build-corpus`` and ``build-dataset``: the text, and where it comes from."""

IDF = "idf.parquet"
"""Of ``build-idf``."""

TREES = "deps.parquet"
"""Of ``build-deps``."""

VOCABULARY, COUNTS = "vocabulary.parquet", "counts.parquet"
"""Of ``build-cooccur``: the tokens that are counted, and the counts of pairs."""

OF_COUNTS: Columns = {
    "i": ("int32", "row in vocabulary.parquet"),
    "j": ("int32", "row in vocabulary.parquet, not below i"),
    "count": ("int64", "pairs of places; two places with the same token count twice, once from each"),
}
"""Columns of ``counts.parquet``: the pairs that occur, sorted."""


def schema_of(columns: Columns, may_be_null: Container[str] = ()) -> Any:
    """A ``pyarrow.Schema``.

    Args:
        may_be_null: the names of the columns that may be null.
    """
    return pa.schema(
        [
            pa.field(name, _type_of(kind), name in may_be_null, metadata={"unit": unit})
            for name, (kind, unit) in columns.items()
        ]
    )


def _type_of(kind: Any) -> Any:
    if isinstance(kind, str) and kind.startswith("["):
        return pa.list_(pa.field("element", pa.type_for_alias(kind[1:-1]), False))
    return pa.type_for_alias(kind) if isinstance(kind, str) else kind
