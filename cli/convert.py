"""``guide convert``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument

from cli.next_commands import newest
from cli.options import Session, command


@command(
    "convert",
    group="Train",
    examples=["guide convert ./old-bert ./old-bert-safetensors", "M=$(guide convert ./old-bert ./new-bert)"],
)
def convert_command(
    session: Session,
    folder: Annotated[Path, Argument(help="A model folder with pytorch_model.bin.")],
    out: Annotated[Path, Argument(help="The folder to write; it must not exist yet.")],
) -> None:
    """Copy a model folder, converting pickled weights to safetensors.

    A separate process reads the pickle; it accepts tensors and refuses everything else.
    """
    from pipelines.tools.convert import convert

    done = convert(folder, out)
    session.tell(f"done: {done.tensors:,} tensors, {done.numbers:,} numbers")
    if corpus := newest("corpus", session.store):  # sequences for a model are made with its tokenizer
        session.suggest(f"guide build-sequences {corpus} {shlex.quote(os.fspath(done.path))}")
    session.answer({"path": os.fspath(done.path), "tensors": done.tensors, "numbers": done.numbers}, [done.path])
