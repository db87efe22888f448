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

PALETTE = "viridis"
"""The colours of every map: people with any colour vision can order them, and so can a grey printer.  The page has the same."""

ROOT = 0.5
"""Attention and weights are drawn as this power of them, the square root, so that small ones are told from none; as on the page."""

FORMATS = ("png", "svg", "pdf")
"""Kinds of files of a figure."""

PAGE_WIDTH = 7.0
"""Of a figure that goes into a text, in inches."""

SMALLEST_LETTERS = 4.5
"""In points; labels that would be smaller are left out."""

MOST_CLASSES = 60
"""With more classes no cell of a confusion matrix could be read, and no picture is drawn."""


def attention_grid(
    rows: Mapping[str, Mapping[str, np.ndarray]],
    tokens: Sequence[str],
    *,
    title: str,
    caption: str = "",
    width: float | None = None,
    kind: str = "png",
) -> bytes:
    """Attention maps as a figure, one colour bar for all: ``rows`` by time of training, or layer, then by head, each (Q, K).

    Queries go down, keys across; the tokens stand at the left and at the bottom of the grid.

    Args:
        caption: stands below.
        width: of the figure in inches; its maps become smaller, and their tokens are left out where no one could read them.  By
            default maps are as large as their tokens need.
        kind: one of `FORMATS`.
    """
    columns, size = max(len(heads) for heads in rows.values()), len(tokens)
    inches = min(4.0, max(1.8, 0.16 * size))
    if width is not None:
        inches = min(0.24 * size, (width - 1.7) / columns)
    font = min(9.0, 62 * inches / size)
    labels = list(tokens) if font >= SMALLEST_LETTERS else [""] * size
    with letters_of_all_scripts():
        longest = max((len(line) for heads in rows.values() for name in heads for line in name.splitlines()), default=1)
        names = min(10.0, 18 * inches, 125 * inches / longest)
        figure_width, heading = width or inches * columns + 2.2, "\n".join(_wrapped(title, width, inches * columns))
        below = "\n".join([_KEYS, *_wrapped(caption, width, inches * columns, 1.4)])
        height = inches * len(rows) + 1.2 + 0.14 * (below.count("\n") + heading.count("\n"))
        figure, grid = figure_of(figure_width, height, len(rows), columns)
        figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)
        before: list[str] = []
        for row, (moment, heads) in enumerate(rows.items()):
            for column, axes in enumerate(grid[row]):
                if column >= len(heads):
                    axes.set_axis_off()
                    continue
                name, is_last = list(heads)[column], row == len(rows) - 1
                image = axes.imshow(heads[name], cmap=PALETTE, norm=_scale(1.0), interpolation="nearest")
                axes.set_xticks(range(size), labels if is_last else [""] * size, fontsize=font, rotation=90)
                axes.set_yticks(range(size), [""] * size if column else labels, fontsize=font)
                for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
                    label.set_parse_math(False)  # a token may be a dollar sign
                axes.tick_params(length=0, pad=2)
                axes.spines[:].set_linewidth(0.4)
                if before != list(heads):  # the names of heads are repeated only where they differ from the row above
                    axes.set_title(name, fontsize=names, pad=3)
                if column == 0:
                    axes.set_ylabel(moment, fontsize=min(11.0, 18 * inches), fontweight="bold")
            before = list(heads)
        bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 3 / height), aspect=15, ticks=_TICKS)
        bar.ax.tick_params(labelsize=8)
        bar.set_label("attention probability", fontsize=8 if width else 10)
        figure.supxlabel(below, fontsize=8, color="#555555", parse_math=False)
        figure.supylabel("queries: who looks", fontsize=8, color="#555555")
        figure.suptitle(heading, fontsize=11 if width else 12, parse_math=False)
        return png(figure) if kind == "png" and width is None else printed(figure, kind)


_KEYS = "keys: what is looked at; colours on a square-root scale"
_TICKS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1)


def _scale(highest: float) -> Any:
    """From weights to places in the palette."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(ROOT, 0, highest)


def _wrapped(text: str, width: float | None, maps: float, letters: float = 1.0) -> list[str]:
    """The lines of a text above or below maps of so many inches; ``letters``: how much smaller than those of a title they are."""
    return textwrap.wrap(text, max(24, int(((width or maps + 2.2) * (10 if width else 9)) * letters)))


def pattern_picture(
    weights_QK: np.ndarray, tokens: Sequence[str], *, title: str, subtitle: str = "", unit: str = "weight"
) -> bytes:
    """The keys (columns) that a pattern selects for each query (row), as PNG, in the colours and on the scale of attention."""
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
    size, font = len(tokens), _font(len(tokens), inches)
    image = axes.imshow(weights_QK, cmap=PALETTE, norm=_scale(max(1, weights_QK.max())), interpolation="nearest")
    axes.set_xticks(range(size), tokens, rotation=90, fontsize=font)
    axes.set_yticks(range(size), tokens, fontsize=font)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a token may be a dollar sign
    axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#777777", linewidth=0.4)
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
        image = axes.imshow(shares, cmap=PALETTE, vmin=0, vmax=100)
        axes.set_xticks(range(len(labels)), labels, rotation=90 if max(map(len, labels)) > 3 else 0)
        axes.set_yticks(range(len(labels)), [f"{label} ({n:,})" for label, n in zip(labels, totals, strict=True)])
        if len(labels) <= 20:
            for (row, column), number in np.ndenumerate(shares):
                colour = "black" if number > 60 else "white"
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


def printed(figure: Any, kind: str) -> bytes:
    """A figure of its own size as one of `FORMATS`, for print; it is closed."""
    import matplotlib

    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "guide"}):
        return saved(figure, format=kind, dpi=300, metadata=metadata)


def saved(figure: Any, **options: Any) -> bytes:
    """A figure as a file, with the options of matplotlib; it is closed."""
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    pyplot.close(figure)
    return buffer.getvalue()
