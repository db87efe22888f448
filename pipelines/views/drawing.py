"""Pictures of learning curves, attention and patterns; the same data give the same bytes."""

from __future__ import annotations

import io
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipelines.progress import log

if TYPE_CHECKING:
    import numpy as np

    from pipelines.views.comparison import Comparison, Group
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
    draw_floors(axes, floors, _lowest(curves))
    axes.plot([], [], "o", color="#444444", markersize=5, label="validation")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("masked-LM loss (nats per token)")
    axes.set_title(title)
    smoothed = f", smoothed over {window} steps on either side\nnumbers: means of the last {window} steps"
    caption = f"training loss{smoothed if window > 1 else ''}"
    axes.legend(frameon=False, title=caption, title_fontsize=8, alignment="left")
    axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


def draw_floors(axes: Any, floors: Mapping[str, float], lowest: float) -> None:
    """Draw the floors that are near the lowest loss as dotted lines, with their names at the left; tell the others below."""
    from pipelines.views.comparison_tables import FLOORS

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


def _lowest(curves: Sequence[Curve]) -> float:
    return min(min(map(float, curve.losses)) for curve in curves)


def run_curves(comparison: Comparison, *, form: str = "png") -> bytes:
    """Training loss and validation loss of groups of runs, over steps; over seconds too if their steps were timed in turn.

    Lines are means over seeds of `Curve.trend`, bands their sample standard deviation, markers validation losses.  Seconds are
    steps times the mean over the seeds of what a step takes.

    Args:
        form: ``png`` or ``svg``.
    """
    import matplotlib
    import numpy as np

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
    for axes, unit_name in zip(every_axes, ("optimizer steps", "seconds: steps × the time of a step"), strict=False):
        draw_floors(axes, comparison.floors, _lowest([curve for group in groups for curve in group.curves]))
        axes.set_xlabel(unit_name)
        axes.set_ylabel(f"{comparison.loss} loss (nats)")
        axes.spines[["top", "right"]].set_visible(False)
    names = [group.label for group in groups]
    title = f"{', '.join(names[1:])} compared with {names[0]}" if names[1:] else names[0]
    title = "\n".join(textwrap.wrap(title, 60 * panels))
    figure.suptitle(title, fontsize=11, parse_math=False)
    captions = [f"lines: training, smoothed over {window} steps on either side" if window > 1 else "lines: training"]
    captions += ["bands: standard deviation of seeds"] if any(len(group.curves) > 1 for group in groups) else []
    captions += [
        "markers: validation",
        *(["dotted: what counts of neighbouring tokens reach"] if comparison.floors else []),
    ]
    legend = by_step.legend(
        frameon=False, title="\n".join(captions), fontsize=9, title_fontsize=8, alignment="left", loc="upper right"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    if form == "png":
        return png(figure)
    with matplotlib.rc_context({"svg.hashsalt": "guide"}):
        return _saved(figure, format=form, metadata={"Date": None})


def _shown(steps: int) -> np.ndarray:
    """The places to draw of so many steps, counted from 0: evenly spread, the first and the last one included."""
    import numpy as np

    return np.unique(np.linspace(0, steps - 1, MOST_POINTS).astype(int))


def _validations(group: Group) -> dict[int, float]:
    """The mean validation loss over runs, at steps that all of them have: evenly spaced ones, the last included."""
    runs = [dict(curve.valid) for curve in group.curves]
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    shown = shared[:: -max(1, -(-len(shared) // MOST_MARKERS))]
    return {step: sum(run[step] for run in runs) / len(runs) for step in reversed(shown)}


def attention_grid(rows: Mapping[str, Mapping[str, np.ndarray]], tokens: Sequence[str], *, title: str) -> bytes:
    """Attention maps as PNG, one colour bar for all: ``rows`` by time of training, then by head, each (Q, K).

    Queries go down, keys across; the tokens stand at the left and at the bottom of the grid.
    """
    columns, size = list(next(iter(rows.values()))), len(tokens)
    inches = min(4.0, max(1.8, 0.16 * size))
    font = min(9.0, 52 * inches / size)
    with letters_of_all_scripts():
        width, height = inches * len(columns) + 2.2, inches * len(rows) + 1.6
        figure, grid = figure_of(width, height, len(rows), len(columns))
        for row, (moment, heads) in enumerate(rows.items()):
            for column, name in enumerate(columns):
                axes, is_last = grid[row][column], row == len(rows) - 1
                image = axes.imshow(heads[name], cmap="Reds", vmin=0, vmax=1, interpolation="nearest")
                axes.set_xticks(range(size), tokens if is_last else [""] * size, fontsize=font, rotation=90)
                axes.set_yticks(range(size), [""] * size if column else tokens, fontsize=font)
                for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
                    label.set_parse_math(False)  # a token may be a dollar sign
                axes.tick_params(length=0)
                if row == 0:
                    axes.set_title(name, fontsize=10)
                if column == 0:
                    axes.set_ylabel(moment, fontsize=11, fontweight="bold")
        bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 3 / height), aspect=15)
        bar.set_label("attention probability", fontsize=10)
        figure.supxlabel("keys: what is looked at", fontsize=10, color="#555555")
        figure.supylabel("queries: who looks", fontsize=10, color="#555555")
        figure.suptitle("\n".join(textwrap.wrap(title, max(24, int(width * 9)))), fontsize=12, parse_math=False)
        return png(figure)


def pattern_picture(
    weights_QK: np.ndarray, tokens: Sequence[str], *, title: str, subtitle: str = "", unit: str = "weight"
) -> bytes:
    """The keys (columns) that a pattern selects for each query (row), as PNG; darker is more, white is 0.

    One hue from light to dark, so that it also reads in grey and with any kind of colour vision.
    """
    import numpy as np

    inches = _side(len(tokens))
    with letters_of_all_scripts():
        figure, ((axes,),) = figure_of(inches, inches)
        figure.set_layout_engine("none")
        axes.set_position((0, 0, 1, 1))  # equal cell sizes; the file is cropped to the drawing
        image = _matrix(axes, weights_QK, tokens, inches)
        axes.set_xlabel("keys: what is looked at", fontsize=9, color="#555555", labelpad=6)
        axes.set_ylabel("queries: who looks", fontsize=9, color="#555555", labelpad=6)
        if not np.isin(weights_QK, (0, 1)).all():
            bar_axes = axes.inset_axes((1 + 0.2 / inches, 0, 0.15 / inches, min(1, 3 / inches)))
            figure.colorbar(image, cax=bar_axes).set_label(unit, fontsize=9, color="#555555")
            bar_axes.tick_params(labelsize=8)
        wide = max(40, int(inches * 11))
        axes.set_title("\n".join(textwrap.wrap(title, wide)), fontsize=12, pad=10, parse_math=False)
        below = "\n".join(textwrap.wrap(subtitle, wide + wide // 3))
        axes.annotate(
            below, (0.5, 0), (0, -8), "axes fraction", "offset points", ha="center", va="top", fontsize=8,
            color="#555555", parse_math=False,
        )  # fmt: skip
        return png(figure, bbox_inches="tight", pad_inches=0.15)


def pattern_grid(masks: Mapping[str, np.ndarray], tokens: Sequence[str], *, title: str) -> bytes:
    """Several patterns over one text, side by side, each as `pattern_picture` draws it."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    inches, columns = _side(len(tokens)), min(3, len(masks))
    with letters_of_all_scripts():
        # the longest label determines the gap between pictures
        font = FontProperties(size=_font(len(tokens), inches))
        longest = max(
            (TextPath((0, 0), token, prop=font, usetex=False).get_extents().width for token in tokens), default=0
        )
        gap = longest / 72 + 0.35
        rows = -(-len(masks) // columns)
        width, height = columns * (inches + gap), rows * (inches + gap + 0.4)
        figure, _ = figure_of(width, height)
        figure.clear()
        figure.set_layout_engine("none")
        for number, (name, weights_QK) in enumerate(masks.items()):
            row, column = divmod(number, columns)
            left, bottom = gap + column * (inches + gap), height - (row + 1) * (inches + gap + 0.4)
            axes = figure.add_axes((left / width, bottom / height, inches / width, inches / height))
            _matrix(axes, weights_QK, tokens, inches)
            axes.set_title(name, fontsize=12, pad=8, parse_math=False)
        figure.suptitle(
            "\n".join(textwrap.wrap(title, max(40, int(width * 10)))), fontsize=10, y=1 + 0.1 / height, color="#555555"
        )
        return png(figure, bbox_inches="tight", pad_inches=0.15)


def _side(size: int) -> float:
    """The side of a square picture of ``size`` tokens, in inches."""
    return min(19.2, max(1.6, 0.24 * size))


def _font(size: int, inches: float) -> float:
    return min(9.0, 50 * inches / size)


def _matrix(axes: Any, weights_QK: np.ndarray, tokens: Sequence[str], inches: float) -> Any:
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    size, font = len(tokens), _font(len(tokens), inches)
    shades = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))
    shades.set_bad("white")
    nonzero = np.ma.masked_equal(weights_QK, 0)
    image = axes.imshow(nonzero, cmap=shades, vmin=0, vmax=max(1, weights_QK.max()), interpolation="nearest")
    axes.set_xticks(range(size), tokens, rotation=90, fontsize=font)
    axes.set_yticks(range(size), tokens, fontsize=font)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a token may be a dollar sign
    axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_color("#bbbbbb")
    return image


@contextmanager
def letters_of_all_scripts() -> Iterator[None]:
    """Use installed fonts as fallbacks, and warn once if none of them has a letter."""
    import matplotlib
    from matplotlib import font_manager

    fallbacks = [
        name for name in font_manager.get_font_names() if re.match("Noto Sans|Noto Serif CJK|WenQuanYi|Arial U", name)
    ]
    with (
        matplotlib.rc_context({"font.family": ["DejaVu Sans", *sorted(fallbacks)]}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        yield
    if any("missing from font" in str(warning.message) for warning in caught):
        log.warning("no installed font has some letters of this text; they are drawn as boxes")


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of a size in inches, and its axes as a grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)


def png(figure: Any, **options: Any) -> bytes:
    return _saved(figure, format="png", dpi=130, metadata={"Software": None}, **options)


def _saved(figure: Any, **options: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    pyplot.close(figure)
    return buffer.getvalue()
