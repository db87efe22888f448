"""Attention between words, worked by hand."""

from __future__ import annotations

import pytest
import torch

from guidance.probes.words import Mode, word_attention

# the second and third token are one word
ATTENTION = torch.tensor(
    [[[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.1, 0.3], [0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]], dtype=torch.float64
)


@pytest.mark.parametrize(
    ("mode", "row"),
    [("mean", [0.3, 0.4, 0.3]), ("first", [0.5, 0.2, 0.3]), ("max", [0.5 / 1.4, 0.6 / 1.4, 0.3 / 1.4])],
)
def test_columns_are_summed_and_rows_reduced(mode: Mode, row: list[float]) -> None:
    found = word_attention(ATTENTION, [0, 1, 1, 2], mode)
    assert found.shape == (1, 3, 3)
    assert found[0, 0].tolist() == pytest.approx([0.1, 0.5, 0.4])
    assert found[0, 1].tolist() == pytest.approx(row)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 3, dtype=torch.float64))


def test_words_of_one_token_change_nothing() -> None:
    found = word_attention(ATTENTION, [0, 1, 2, 3])
    torch.testing.assert_close(found, ATTENTION)
