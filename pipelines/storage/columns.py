"""Columns of tables: never null, with the unit in their metadata."""

from __future__ import annotations

from typing import Any

__all__ = ["column", "list_column"]


def column(name: str, kind: Any, unit: str) -> Any:
    """A ``pyarrow.Field``.

    Args:
        kind: a ``pyarrow.DataType``.
        unit: what a value means, in a few words.
    """
    import pyarrow as pa

    return pa.field(name, kind, False, metadata={"unit": unit})


def list_column(name: str, kind: Any, unit: str) -> Any:
    """A column of lists whose elements have the type ``kind`` and are never null."""
    import pyarrow as pa

    return column(name, pa.list_(pa.field("element", kind, False)), unit)
