"""Real data and trained parsers that live beside the checkout; tests that need them skip where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GIVEN = os.environ.get("GUIDE_SHARED")
"""Read here, since tests run without variables of the user's."""


def shared(part: str) -> Path:
    """A folder of the shared material, ``GUIDE_SHARED`` or ``shared`` beside the checkout; skips when it is not there."""
    folder = Path(GIVEN or Path(__file__).resolve().parents[2] / "shared") / part
    if not folder.is_dir():
        (pytest.fail if GIVEN else pytest.skip)(f"no {folder}: this test needs the shared data")
    return folder
