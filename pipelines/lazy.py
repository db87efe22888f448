"""Libraries of arrays and tables that are imported when they are first used, so that ``guide --help`` stays quick."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["np", "pa", "pc", "pq"]


class Lazy:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    np, pa, pc, pq = map(Lazy, ("numpy", "pyarrow", "pyarrow.compute", "pyarrow.parquet"))
