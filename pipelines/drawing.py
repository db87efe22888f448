"""Pictures: learning curves and attention, as PNG bytes that are the same for the same data."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.comparison import Curve

if TYPE_CHECKING:
    import numpy as np

COLOURS = ("#7a7a7a", "#c8452d", "#2d6ac8", "#3a9a5b", "#8a5fbf")


def learning_curves(curves: Sequence[Curve], *, window: int, title: str) -> bytes:
    """Smoothed training loss (lines) and validation loss (dots) over steps; the step at which a run reaches the final
    loss of the first one is marked."""
    figure, axes = _figure(8, 4.5)
    goal = curves[0].smoothed(window)[-1]
    for curve, colour in zip(curves, COLOURS, strict=False):
        smoothed = curve.smoothed(window)
        axes.plot(curve.steps, smoothed, color=colour, linewidth=2, label=curve.label)
        axes.plot(*zip(*curve.valid, strict=True), "o", color=colour, markersize=4) if curve.valid else None
        axes.annotate(
            f"{smoothed[-1]:.2f}",
            (curve.steps[-1], smoothed[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
        )
        reached = curve.first_step_at(goal, window)
        if curve is not curves[0] and reached:
            axes.plot([reached, curves[0].steps[-1]], [goal, goal], ":", color="#444444", linewidth=1)
            axes.annotate(
                f"the same loss {curves[0].steps[-1] / reached:.1f} times sooner",
                (curves[0].steps[-1], goal),
                xytext=(0, -12),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                color="#444444",
            )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("masked-LM loss (nats per token)")
    axes.set_title(title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def attention_grid(rows: Mapping[str, Mapping[str, np.ndarray]], tokens: Sequence[str], *, title: str) -> bytes:
    """Attention maps: ``rows`` by moment, then by head, each (Q, K) with queries downwards; darker is more."""
    columns = list(next(iter(rows.values())))
    figure, grid = _figure(2.1 * len(columns) + 1.2, 2.1 * len(rows) + 1.0, len(rows), len(columns))
    for row, (moment, heads) in enumerate(rows.items()):
        for column, name in enumerate(columns):
            axes = grid[row][column]
            axes.imshow(heads[name], cmap="Reds", vmin=0, vmax=1, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                axes.set_title(name, fontsize=9)
            if column == 0:
                axes.set_ylabel(moment, fontsize=10)
                axes.set_yticks(range(len(tokens)), tokens, fontsize=4)
    figure.suptitle(title, fontsize=11)
    return _png(figure)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=rows * columns == 1)


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    pyplot.close(figure)
    return buffer.getvalue()
