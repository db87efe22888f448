"""The formats of ``build-dataset``: which shape of examples each one has, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from guidance.errors import InputError
from pipelines.text import choice_examples, tagged_examples
from pipelines.text.examples import Layout, Record, read_examples
from pipelines.text.layouts import LAYOUTS
from pipelines.text.readers import format_of

Reader = Callable[..., Iterator[Record]]


@dataclass(frozen=True)
class Format:
    """A format that is not a table of texts and labels.

    Attributes:
        shape: of its examples: ``tags``, one for each word; ``choices``, of which one is right; ``segments``, sections whose
            boundaries are to be found; ``summaries``, documents with a summary.
        is_dialogue: whether the end of a text matters more than its beginning, so that long ones lose their beginning.
        has_sentences: whether its files say themselves where sentences end.
    """

    shape: str
    read: Reader
    is_dialogue: bool = False
    has_sentences: bool = False


FORMATS: Mapping[str, Format] = {
    "conll": Format("tags", tagged_examples.read_conll, has_sentences=True),
    "words": Format("tags", tagged_examples.read_words, has_sentences=True),
    "dream": Format("choices", choice_examples.read_dream, is_dialogue=True),
    "hellaswag": Format("choices", choice_examples.read_hellaswag),
    "arc": Format("choices", choice_examples.read_arc),
}
"""By the name after ``--format``."""


def format_for(layout: Layout, names: list[str]) -> Format:
    """The format of files, from the settings and their names.

    Raises:
        InputError: a setting belongs to another format.
    """
    if (layout_of := LAYOUTS.get(layout.format or "")) is not None:
        return Format("examples", layout_of.read)
    if (known := FORMATS.get(layout.format or "")) is not None:
        return known
    if layout.choices_column is not None:
        for name in names:
            if format_of(name, layout.format) != "jsonl":
                raise InputError(f"{name!r}: --choices-column reads JSON lines", hint="--format jsonl")
        return Format("choices", choice_examples.read_own)
    return Format("examples", read_examples)
