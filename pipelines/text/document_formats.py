"""The formats of documents with structure: which reader each has, and which shape of dataset it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from guidance.errors import InputError
from pipelines.text import segment_files, summary_files
from pipelines.text.blocks import Notes
from pipelines.text.readers import format_of
from pipelines.text.structured import Columns, Structured

Reader = Callable[[Sequence[Path], Sequence[str], Columns, Notes], Iterator[Structured]]
"""Reads the files of a split, given as paths and names."""


@dataclass(frozen=True)
class Format:
    """A format of structured documents.

    Attributes:
        read: gives the documents.
        shape: of the dataset.
        endings: of the names of its files in a folder, besides those with ``.gz`` behind; an empty one stands for names
            without a dot.
        summary_sentences: how many sentences of a document make a summary, where the format is that of one data set.
        has_gold: whether every document has a summary, if that is its shape.
        has_sentences: whether its files say themselves where sentences end.
    """

    read: Reader
    shape: Literal["summaries", "segments"]
    endings: tuple[str, ...]
    summary_sentences: int = 3
    has_gold: bool = True
    has_sentences: bool = False

    def takes(self, name: str) -> bool:
        """Whether a file in a folder is of this format, by its name."""
        name = name.lower().removesuffix(".gz")
        return name.endswith(tuple(filter(None, self.endings))) or ("" in self.endings and "." not in name)


def find_format(name: str | None, columns: Columns, file: str) -> Format | None:
    """The format with a name; or that of JSON lines with ``--summary-column`` or ``--sections-column``; else None.

    Args:
        file: name of the first file.

    Raises:
        InputError: a column is named for a format that has none.
    """
    given = {"--summary-column": columns.summary_column, "--sections-column": columns.sections_column}
    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) == 2:
        raise InputError(f"{' and '.join(flags)} exclude each other", hint="a dataset is for one task")
    if not flags:
        return FORMATS.get(name or "")
    if format_of(file, name) != "jsonl":
        raise InputError(f"{flags[0]} is for JSON lines", hint="leave it out, or set --format jsonl")
    return _GENERIC[flags[0]]


FORMATS: Mapping[str, Format] = {
    "scisummnet": Format(summary_files.scisummnet, "summaries", (".xml", ".txt"), has_sentences=True),
    "scitldr": Format(summary_files.scitldr, "summaries", (".jsonl",), summary_sentences=1, has_sentences=True),
    "presumm": Format(summary_files.presumm, "summaries", (".json",), has_sentences=True),
    "qmsum": Format(summary_files.qmsum, "summaries", (".jsonl",)),
    "documents": Format(summary_files.unlabelled, "summaries", (".txt", ".jsonl", ".ndjson"), has_gold=False),
    "choi": Format(segment_files.choi, "segments", (".ref", ".txt"), has_sentences=True),
    "wiki-727k": Format(segment_files.wiki_727k, "segments", ("",), has_sentences=True),
    "wikisection": Format(segment_files.wikisection, "segments", (".json",)),
}
_GENERIC = {
    "--summary-column": Format(summary_files.json_lines, "summaries", (".jsonl", ".ndjson")),
    "--sections-column": Format(segment_files.json_lines, "segments", (".jsonl", ".ndjson")),
}
