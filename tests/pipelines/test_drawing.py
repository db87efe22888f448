"""Figures of attention fit a page, keep their letters readable, and have the colours of the page of `guide discover`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipelines
from pipelines import drawing

TOKENS = ["[CLS]", "$x", *(f"token{n}" for n in range(22))]


def maps(heads: int) -> dict[str, np.ndarray]:
    return {f"head {n}": np.full((len(TOKENS), len(TOKENS)), 1 / len(TOKENS)) for n in range(heads)}


def drawn(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> Any:
    """The figure of a page, before it is written."""
    figures: list[Any] = []
    monkeypatch.setattr(drawing, "saved", lambda figure, **options: (figures.append(figure), b"")[1])
    drawing.attention_grid(rows, TOKENS, title="attention", caption="of a text", width=drawing.PAGE_WIDTH)
    return figures.pop()


@pytest.mark.every
def test_all_heads_of_a_model_fit_a_page_and_only_letters_that_can_be_read_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rows, columns, has_tokens in ((6, 12, False), (1, 3, True), (1, 1, True)):
        figure = drawn(monkeypatch, {f"layer {n}": maps(columns) for n in range(rows)})
        grid = figure.axes[: rows * columns]
        assert figure.get_size_inches()[0] == drawing.PAGE_WIDTH
        labels = [label for label in grid[0].get_yticklabels() if label.get_text()]
        assert [label.get_text() for label in labels] == (TOKENS if has_tokens else [])
        assert all(label.get_fontsize() >= drawing.SMALLEST_LETTERS for label in labels)
        figure.canvas.draw()
        boxes = [axes.get_tightbbox() for axes in figure.axes]
        assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= figure.bbox.width
        assert figure.get_supxlabel().endswith("square-root scale\nof a text")


def test_a_row_of_heads_with_other_names_than_the_row_above_names_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, first), (_, second) = maps(2).items()
    for after, titles in (("b\nnext 50 %", ["a", "b", "a", "b\nnext 50 %"]), ("b", ["a", "b", "", ""])):
        figure = drawn(monkeypatch, {"before": {"a": first, "b": second}, "after": {"a": first, after: second}})
        assert [axes.get_title() for axes in figure.axes[:4]] == titles


@pytest.mark.parametrize(("kind", "size"), [("svg", rb'width="504pt"'), ("pdf", rb"/MediaBox \[ *0 0 504 ")])
def test_a_figure_for_print_is_seven_inches_wide_and_the_same_bytes_each_time(kind: str, size: bytes) -> None:
    once, again = (
        drawing.attention_grid({"": maps(2)}, TOKENS, title="attention", width=drawing.PAGE_WIDTH, kind=kind)
        for _ in range(2)
    )
    assert once == again
    assert re.search(size, once)


def test_the_page_of_guide_discover_has_the_same_colours() -> None:
    from matplotlib import colormaps

    script = (Path(pipelines.__file__).parent / "explorer/page/colours.js").read_text(encoding="utf-8")
    one_sided, *_ = script.split("];")  # the first of its palettes
    anchors = [tuple(map(int, found)) for found in re.findall(r"\[(\d+), (\d+), (\d+)\]", one_sided)]
    assert anchors
    places = np.linspace(0, 1, len(anchors))
    assert np.abs(255 * colormaps[drawing.PALETTE](places)[:, :3] - anchors).max() < 1.5
