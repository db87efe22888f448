"""Arguments and flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from cli.completion import artifacts
from cli.output import speaks_unicode

Model = Annotated[str, Argument(help="A model: a name, name@n, an id, or a folder.", autocompletion=artifacts("model"))]
Png = Annotated[Path | None, Option(metavar="FILE", help="PNG file to draw to as well.")]
Svg = Annotated[Path | None, Option(metavar="FILE", help="SVG file, likewise.")]
Pdf = Annotated[Path | None, Option(metavar="FILE", help="PDF file, likewise.")]
Ascii = Annotated[
    bool,
    Option("--ascii", help="Draw with ASCII characters only.", callback=lambda value: value or not speaks_unicode()),
]
"""Also true where the encoding of stdout has no block characters."""
