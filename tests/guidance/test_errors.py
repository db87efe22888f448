"""Words that messages share."""

from __future__ import annotations

from guidance.errors import counted


def test_one_thing_is_singular_and_any_other_number_is_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [counted(n, "text was", "texts were") for n in (1, 3)] == ["1 text was", "3 texts were"]
