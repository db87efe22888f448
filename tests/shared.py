"""Real data and trained parsers that live beside the checkout; tests that need them skip where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def shared(part: str) -> Path:
    """A folder of the shared material, ``GUIDE_SHARED`` or ``shared`` beside the checkout; skips when it is not there."""
    root = Path(os.environ.get("GUIDE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (root / part).is_dir():
        pytest.skip(f"no {root / part}: this test needs the shared data")
    return root / part
