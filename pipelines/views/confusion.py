"""A picture of which classes a classifier takes for which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.views.drawing import figure_of, letters_of_all_scripts, png

MOST_CLASSES = 60
"""With more classes no cell could be read, and no picture is drawn."""


def confusion_picture(counts: Sequence[Sequence[int]], labels: Sequence[str], *, title: str) -> bytes:
    """A confusion matrix as PNG: rows are gold labels, columns predictions; cells are shares of the row.

    Args:
        counts: (labels, labels), how many examples.
    """
    table = np.asarray(counts)
    labels = [label.replace("$", r"\$") for label in labels]  # no formulas
    size = min(12.0, 3.0 + 0.45 * len(labels))
    with letters_of_all_scripts():
        figure, ((axes,),) = figure_of(size, size * 0.9)
        totals = table.sum(1)
        shares = 100 * table / np.maximum(totals[:, None], 1)
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
        axes.set_xticks(range(len(labels)), labels, rotation=90 if max(map(len, labels)) > 3 else 0)
        axes.set_yticks(range(len(labels)), [f"{label} ({n:,})" for label, n in zip(labels, totals, strict=True)])
        if len(labels) <= 20:
            for (row, column), number in np.ndenumerate(shares):
                colour = "white" if number > 50 else "black"
                axes.text(column, row, f"{number:.0f}", ha="center", va="center", color=colour, fontsize=9)
        axes.set_xlabel("prediction")
        axes.set_ylabel("label (examples)")
        figure.suptitle(title, fontsize=10, parse_math=False)
        figure.colorbar(image, shrink=0.8, label="% of the label's examples")
        return png(figure)
