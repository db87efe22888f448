"""The formats of ``build-dataset``: the reader of each, and which shape of dataset it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guidance.errors import InputError
from pipelines.text import document_files, task_examples
from pipelines.text.examples import Layout, read_examples
from pipelines.text.layouts import LAYOUTS
from pipelines.text.readers import format_of


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        read: gives the examples of a file, as `pipelines.text.examples.read_examples` does; of ``summaries`` and ``segments``
            the documents of the files of a split, as `pipelines.text.document_files.choi` does.
        shape: of the dataset: ``examples``, texts or pairs with labels; ``tags``, one for each word; ``choices``, of which one
            is right; ``segments``, sections whose boundaries are to be found; ``summaries``, documents with a summary.
        is_dialogue: whether the end of a text matters more than its beginning, so that long ones lose their beginning.
        has_sentences: whether its files say themselves where sentences end.
        endings: of the names of its files in a folder, besides those with ``.gz`` behind; an empty one stands for names
            without a dot.
        summary_sentences: how many sentences of a document make a summary, where the format is that of one data set.
        has_gold: whether every document has a summary, if that is its shape.
    """

    read: Callable[..., Iterator[Any]]
    shape: str = "examples"
    is_dialogue: bool = False
    has_sentences: bool = False
    endings: tuple[str, ...] = ()
    summary_sentences: int = 3
    has_gold: bool = True

    @property
    def is_structured(self) -> bool:
        """Whether an example is a document with structure, not just some texts."""
        return self.shape in ("summaries", "segments")

    def takes(self, name: str) -> bool:
        """Whether a file in a folder is of this format, by its name."""
        name = name.lower().removesuffix(".gz")
        return name.endswith(tuple(filter(None, self.endings))) or ("" in self.endings and "." not in name)


FORMATS: Mapping[str, Format] = {
    **{name: Format(layout.read) for name, layout in LAYOUTS.items()},
    "conll": Format(task_examples.read_conll, "tags", has_sentences=True),
    "words": Format(task_examples.read_words, "tags", has_sentences=True),
    "dream": Format(task_examples.read_dream, "choices", is_dialogue=True),
    "hellaswag": Format(task_examples.read_hellaswag, "choices"),
    "arc": Format(task_examples.read_arc, "choices"),
    "scisummnet": Format(document_files.scisummnet, "summaries", endings=(".xml", ".txt"), has_sentences=True),
    "scitldr": Format(
        document_files.scitldr, "summaries", endings=(".jsonl",), summary_sentences=1, has_sentences=True
    ),
    "presumm": Format(document_files.presumm, "summaries", endings=(".json",), has_sentences=True),
    "qmsum": Format(document_files.qmsum, "summaries", endings=(".jsonl",)),
    "documents": Format(document_files.unlabelled, "summaries", endings=(".txt", ".jsonl", ".ndjson"), has_gold=False),
    "choi": Format(document_files.choi, "segments", endings=(".ref", ".txt"), has_sentences=True),
    "wiki-727k": Format(document_files.wiki_727k, "segments", endings=("",), has_sentences=True),
    "wikisection": Format(document_files.wikisection, "segments", endings=(".json",)),
}
"""By the name after ``--format``, besides those of `read_examples`."""

_OF_COLUMN = {
    "--summary-column": Format(document_files.summarized, "summaries"),
    "--sections-column": Format(document_files.sectioned, "segments"),
}


def format_for(layout: Layout, names: Sequence[str]) -> Format:
    """The format of files, from the settings and their names.  Raises InputError if a setting belongs to another format."""
    columns = {"--summary-column": layout.summary_column, "--sections-column": layout.sections_column}
    flags = [flag for flag, column in columns.items() if column is not None]
    if len(flags) == 2:
        raise InputError(f"{' and '.join(flags)} exclude each other", hint="a dataset is for one task")
    if flags:
        if format_of(names[0], layout.format) != "jsonl":
            raise InputError(f"{flags[0]} is for JSON lines", hint="leave it out, or set --format jsonl")
        return _OF_COLUMN[flags[0]]
    if known := FORMATS.get(layout.format or ""):
        return known
    if layout.choices_column is not None:
        for name in names:
            if format_of(name, layout.format) != "jsonl":
                raise InputError(f"{name!r}: --choices-column reads JSON lines", hint="--format jsonl")
        return Format(task_examples.read_own, "choices")
    return Format(read_examples)
