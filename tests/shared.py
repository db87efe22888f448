"""Real data and trained parsers outside the repository; tests that need them are skipped if they are missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FROM_ENVIRONMENT = os.environ.get("GUIDE_SHARED")
"""Read at import time: a fixture removes ``GUIDE_`` variables before each test."""


def shared(part: str) -> Path:
    """A folder below ``GUIDE_SHARED``, by default ``shared`` next to the checkout; skips the test if it is missing."""
    folder = Path(FROM_ENVIRONMENT or Path(__file__).resolve().parents[2] / "shared") / part
    if not folder.is_dir():
        (pytest.fail if FROM_ENVIRONMENT else pytest.skip)(f"no {folder}: this test needs the shared data")
    return folder
