"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Corpus = Annotated[str, typer.Argument(help="A corpus: a name, name@n, an id, or a path.", show_default=False)]
Tokenizer = Annotated[
    str, typer.Argument(help="A tokenizer, likewise, or a folder with tokenizer.json.", show_default=False)
]
