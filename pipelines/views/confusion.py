"""A picture of which classes a classifier takes for which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.views.drawing import figure_of, letters_of_all_scripts, png

MOST_CLASSES = 60
"""With more classes no cell could be read, and no picture is drawn."""


def confusion_picture(counts: Sequence[Sequence[int]], labels: Sequence[str], *, title: str) -> bytes:
    """A confusion matrix as PNG: rows are gold labels, columns predictions; shades are shares of the row.

    Args:
        counts: (labels, labels), how many examples.
    """
    table = np.asarray(counts)
    labels = [label.replace("$", r"\$") for label in labels]  # no formulas
    size = min(12.0, 3.0 + 0.45 * len(labels))
    with letters_of_all_scripts():
        figure, ((axes,),) = figure_of(size, size * 0.9)
        shares = table / np.maximum(table.sum(1, keepdims=True), 1)
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(labels)), labels, rotation=90 if max(map(len, labels)) > 3 else 0)
        axes.set_yticks(range(len(labels)), labels)
        if len(labels) <= 20:
            for (row, column), number in np.ndenumerate(table):
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{number:,}", ha="center", va="center", color=colour, fontsize=9)
        axes.set_xlabel("prediction")
        axes.set_ylabel("label")
        axes.set_title(title)
        figure.colorbar(image, shrink=0.8, label="share of the label's examples")
        return png(figure)
