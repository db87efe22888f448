"""Pictures of learning curves; the same data give the same bytes."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipelines.drawing import figure_of, png, printed
from pipelines.views.comparison import Comparison, Group
from pipelines.views.comparison_tables import FLOORS, unit_of
from pipelines.views.curves import Curve

COLOURS = ("#7a7a7a", "#c8452d", "#2d6ac8", "#3a9a5b", "#8a5fbf")
LINES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = "osD^vPX*<>h"
"""Line styles and markers distinguish runs even without colours."""

NEAR = 1.0
"""Floors that are more nats below the lowest loss are not drawn."""

MOST_POINTS, MOST_MARKERS = 500, 40
"""Points and markers per line; more could not be seen and would make an SVG large."""


def learning_curves(
    curves: Sequence[Curve], *, window: int, title: str, floors: Mapping[str, float] = MappingProxyType({})
) -> bytes:
    """Training loss (lines, see `Curve.trend`) and validation loss (dots) over steps, as PNG.

    Args:
        floors: losses of trivial models by name, drawn as dotted lines.
    """
    figure, ((axes,),) = figure_of(8, 4.5)
    for curve, colour in zip(curves, COLOURS, strict=False):
        shown = _shown(len(curve.losses))
        axes.plot(shown + 1, curve.trend(window, shown), color=colour, linewidth=2, label=curve.label)
        axes.plot(*zip(*curve.valid, strict=True), "o", color=colour, markersize=5) if curve.valid else None
        final = curve.smoothed(window)[-1]
        axes.annotate(
            f"{final:.2f}", (curve.steps[-1], final), (6, 0), textcoords="offset points", va="center", color=colour
        )
    axes.plot([], [], "o", color="#444444", markersize=5, label="validation")
    kind = "next-token" if curves[0].loss == "clm" else "masked-LM"
    _finish(axes, curves, floors, "optimizer steps", f"{kind} loss (nats per token)")
    axes.set_title(title)
    smoothed = f", smoothed over {window} steps on either side\nnumbers: means of the last {window} steps"
    caption = f"training loss{smoothed if window > 1 else ''}"
    axes.legend(frameon=False, title=caption, title_fontsize=8, alignment="left")
    return png(figure)


def _finish(axes: Any, curves: Sequence[Curve], floors: Mapping[str, float], unit: str, loss: str) -> None:
    """Add what all pictures of curves have: floors, and names of the axes."""
    draw_floors(axes, floors, min(min(map(float, curve.losses)) for curve in curves))
    axes.set_xlabel(unit)
    axes.set_ylabel(loss)
    axes.spines[["top", "right"]].set_visible(False)


def draw_floors(axes: Any, floors: Mapping[str, float], lowest: float) -> None:
    """Draw the floors that are near the lowest loss as dotted lines, with their names at the left; tell the others below."""
    if far := [f"{FLOORS.get(name, name)} {nats:.2f}" for name, nats in floors.items() if nats < lowest - NEAR]:
        note = f"below this picture: {', '.join(far)}"
        axes.annotate(note, (0.01, 0.01), xycoords="axes fraction", fontsize=8, color="#444444")
    for name, nats in floors.items():
        if nats < lowest - NEAR:
            continue
        axes.axhline(nats, color="#444444", linewidth=0.9, linestyle=":", zorder=0)
        axes.annotate(
            FLOORS.get(name, name),
            (0.01, nats),
            (0, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=8,
            color="#444444",
        )


def run_curves(comparison: Comparison, *, form: str = "png") -> bytes:
    """Training loss and validation loss of groups of runs, over steps; over seconds too if their steps were timed in turn.

    Lines are means over seeds of `Curve.trend`, bands their sample standard deviation, markers validation losses.  Seconds are
    steps times the mean over the seeds of what a step takes.

    Args:
        form: ``png``, ``svg`` or ``pdf``.
    """
    costs = [row.summary["step_seconds"].mean or 0.0 for row in comparison.rows]
    panels = 2 if all(costs) else 1
    figure, (every_axes,) = figure_of(3 + 4 * panels, 4.8, 1, panels)
    by_step = every_axes[0]
    shown, window = _shown(comparison.steps), comparison.window
    groups = [row.group for row in comparison.rows]
    styles = zip(
        groups, costs, itertools.cycle(COLOURS), itertools.cycle(LINES), itertools.cycle(MARKERS), strict=False
    )
    for group, cost, colour, line, marker in styles:
        losses = np.stack([curve.trend(window, shown) for curve in group.curves])
        mean, spread = losses.mean(axis=0), losses.std(axis=0, ddof=1) if len(losses) > 1 else None
        valid = _validations(group)
        dots = {"color": colour, "marker": marker, "markersize": 5, "markeredgecolor": "black"}
        for axes, unit in zip(every_axes, (1, cost), strict=False):
            positions = unit * np.arange(1, comparison.steps + 1)
            axes.plot(positions[shown], mean, color=colour, linestyle=line, linewidth=1.8)
            if spread is not None:
                axes.fill_between(positions[shown], mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
            axes.plot([positions[step - 1] for step in valid], list(valid.values()), linestyle="none", **dots)
        seeds = f" ({len(group.curves)} seeds)" if len(group.curves) > 1 else ""
        by_step.plot([], [], linestyle=line, linewidth=1.8, label=group.label + seeds, **dots)
    curves = [curve for group in groups for curve in group.curves]
    for axes, unit_name in zip(every_axes, ("optimizer steps", "seconds: steps × the time of a step"), strict=False):
        _finish(axes, curves, comparison.floors, unit_name, f"{comparison.loss} loss ({unit_of(comparison.loss)})")
    names = [group.label for group in groups]
    title = f"{', '.join(names[1:])} compared with {names[0]}" if names[1:] else names[0]
    title = "\n".join(textwrap.wrap(title, 60 * panels))
    figure.suptitle(title, fontsize=11, parse_math=False)
    captions = [f"lines: training, smoothed over {window} steps on either side" if window > 1 else "lines: training"]
    captions += ["bands: standard deviation of seeds"] if any(len(group.curves) > 1 for group in groups) else []
    captions.append("markers: validation")
    captions += ["dotted: what counts of neighbouring tokens reach"] if comparison.floors else []
    legend = by_step.legend(
        frameon=False, title="\n".join(captions), fontsize=9, title_fontsize=8, alignment="left", loc="upper right"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return png(figure) if form == "png" else printed(figure, form)


def _shown(steps: int) -> np.ndarray:
    """Which steps to draw, counted from 0: evenly spread, the first and the last one included."""
    return np.unique(np.linspace(0, steps - 1, MOST_POINTS).astype(int))


def _validations(group: Group) -> dict[int, float]:
    """The mean validation loss over runs, at steps that all of them have: evenly spaced ones, the last included."""
    runs = [dict(curve.valid) for curve in group.curves]
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    shown = shared[:: -max(1, -(-len(shared) // MOST_MARKERS))]
    return {step: sum(run[step] for run in runs) / len(runs) for step in reversed(shown)}
