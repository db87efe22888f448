"""Commands that look after the store."""

from __future__ import annotations
