"""Pictures of attention, patterns and classes; the same data give the same bytes."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pipelines.progress import log

MOST_CLASSES = 60
"""With more classes no cell of a confusion matrix could be read, and no picture is drawn."""


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
    """A figure as PNG; it is closed."""
    return saved(figure, format="png", dpi=130, metadata={"Software": None}, **options)


def saved(figure: Any, **options: Any) -> bytes:
    """A figure as a file, with the options of matplotlib; it is closed."""
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    pyplot.close(figure)
    return buffer.getvalue()
