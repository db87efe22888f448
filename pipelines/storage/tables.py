"""Names of tables that several stages read, and columns with their unit in the metadata, hardly any of which may be null."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from pipelines.lazy import pa

BLOCKS, DOCUMENTS = "blocks.parquet", "documents.parquet"
"""Of ``build-corpus`` and ``build-dataset``: the text, and where it comes from."""

IDF = "idf.parquet"
"""Of ``build-idf``."""

TREES = "deps.parquet"
"""Of ``build-deps``."""

VOCABULARY, COUNTS = "vocabulary.parquet", "counts.parquet"
"""Of ``build-cooccur``: the tokens that are counted, and the counts of pairs."""


def schema_of(columns: Mapping[str, tuple[str, str]], may_be_null: Container[str] = ()) -> Any:
    """A ``pyarrow.Schema``.

    Args:
        columns: by name, each with its type, as ``pyarrow`` calls it, and what a value means, in a few words.
        may_be_null: the names of those that may be null.
    """
    return pa.schema(
        [
            pa.field(name, pa.type_for_alias(kind), name in may_be_null, metadata={"unit": unit})
            for name, (kind, unit) in columns.items()
        ]
    )


def column(name: str, kind: Any, unit: str) -> Any:
    """A ``pyarrow.Field``.

    Args:
        kind: a ``pyarrow.DataType``.
        unit: what a value means, in a few words.
    """
    return pa.field(name, kind, False, metadata={"unit": unit})


def list_column(name: str, kind: Any, unit: str) -> Any:
    """A column of lists whose elements have the type ``kind`` and are never null."""
    return column(name, pa.list_(pa.field("element", kind, False)), unit)
