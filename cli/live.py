"""Commands that put trained models to work on lines of text."""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import Field
from typer import Argument

from cli.arguments import Model
from cli.options import Session, command
from cli.output import say, say_json
from cli.tables import table
from guidance.errors import InputError
from pipelines.engine.stage import Config, check_working_folder
from pipelines.training.objectives.translation import Decoding


class TranslateConfig(Decoding):
    """How to translate."""

    batch_size: int = Field(
        32, ge=1, description="Lines of a file that are translated together; those of stdin are not."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on; auto takes a GPU if there is one."
    )


class FillConfig(Config):
    """How to fill in masks."""

    top: int = Field(5, ge=1, le=10_000, description="Number of tokens to show for each mask.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on; auto takes a GPU if there is one."
    )


@command(
    "translate",
    config=TranslateConfig,
    group="Train",
    examples=[
        "guide translate de-en sentences.de > sentences.en",
        "echo 'Ein Hund läuft.' | guide translate de-en",
        "tail -f log.de | guide translate ./opus-mt-de-en --beams 1 --json",
    ],
)
def translate_command(
    session: Session,
    config: TranslateConfig,
    model: Model,
    file: Annotated[str, Argument(help="A file with one text to a line; - for stdin.")] = "-",
) -> None:
    """Translate lines of text.

    Each line gets one line; an empty line stays empty.  From stdin, a line is translated and written as soon as it arrives.
    The model's plan is applied.  A line that is too long for the model is cut, which is said at the end.
    """
    from pipelines.training.live_text import Translator, read_lines
    from pipelines.training.opening import find_folder

    check_working_folder()
    with ExitStack() as opened:
        stream = sys.stdin.buffer if file == "-" else opened.enter_context(_open(file))
        settings = config.model_dump(exclude={"batch_size"})
        translator = Translator(find_folder(model, session.store), **settings)
        lines = read_lines(stream, _invite(session, file))
        size = 1 if file == "-" else config.batch_size
        while batch := list(itertools.islice(lines, size)):
            for line, translation in zip(batch, translator.translate(batch), strict=True):
                if session.json:
                    say_json({"source": line, "translation": translation})
                else:
                    say(translation)
    if translator.cut:
        session.tell(
            f"warning: {translator.cut:,} lines were longer than the {translator.longest} tokens of the model and were cut"
        )


@command(
    "fill",
    config=FillConfig,
    group="Train",
    examples=[
        'guide fill guided "The old <mask> chased a cat."',
        'guide fill ./bert-base "Paris is the [MASK] of [MASK]." --top 3 --json',
        "guide fill guided --json < sentences.txt | jq -r '.masks[0][0].text'",
    ],
)
def fill_command(
    session: Session,
    config: FillConfig,
    model: Model,
    text: Annotated[str, Argument(help="A text with masks; - for texts from stdin, one to a line.")] = "-",
) -> None:
    """Let a masked language model fill in the masks of a text.

    A mask is written <mask> or [MASK].  Each mask has a table of its most likely tokens, with their probabilities and with the
    text that they make; other masks stay as they are.  With --json each text is one object.  From stdin, a line is answered as
    soon as it arrives.  The model's plan is applied.
    """
    from pipelines.training.live_text import Filler, read_lines
    from pipelines.training.opening import find_folder

    check_working_folder()
    filler = Filler(find_folder(model, session.store), config.device)
    texts = [text] if text != "-" else read_lines(sys.stdin.buffer, _invite(session, text))
    for number, line in enumerate(texts, 1):
        try:
            masks = filler.fill(line, config.top)
        except InputError as error:
            if text == "-":
                error.message = f"stdin, line {number}: {error.message}"
            raise
        if number > 1 and not session.json:
            say()
        rows = [
            (str(number), f"{candidate.score:.4f}", candidate.token, candidate.text)
            for number, mask in enumerate(masks, 1)
            for candidate in mask
        ]
        session.answer(
            {"text": line, "masks": [[vars(candidate) for candidate in mask] for mask in masks]},
            table(("mask", "score", "token", "text"), rows, whole=("mask", "score", "token")),
        )


def _open(file: str) -> BinaryIO:
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise InputError(f"{file!r}: cannot be read ({os.strerror(error.errno or 0)})") from error


def _invite(session: Session, file: str) -> str:
    """The name of the input in messages; says on a terminal that it waits for lines."""
    if file == "-" and sys.stdin.isatty():
        session.tell("reading lines from the terminal; Ctrl-D ends")
    return "stdin" if file == "-" else repr(file)
