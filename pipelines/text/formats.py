"""The formats of ``build-dataset``: the reader of each, and which shape of dataset it makes.

A row of `LAYOUTS` is a name after ``--format``: the format of a well-known data set, its columns, and what is odd about it.  A
new data set of texts or pairs with labels is a new row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guidance.errors import InputError
from pipelines.text import document_files, task_examples
from pipelines.text.examples import Columns, Layout, Record, columns_of, json_records, read_examples
from pipelines.text.readers import TextFile, format_of, without_gzip
from pipelines.text.records import parse_json

UNDECIDED = "-"
"""The gold label of SNLI and MultiNLI where annotators did not agree."""


Reader = Callable[[TextFile, str, Layout], Iterator[Record]]
"""Gives the examples of one file; see `pipelines.text.examples.read_examples`."""


def _known(
    base: str,
    headers: Sequence[Columns] = (),
    numbers: Columns | None = None,
    *,
    encoding: str | None = None,
    change: Callable[[Record], Record | None] = lambda record: record,
    dropped: str = "",
    **settings: Any,
) -> Reader:
    """A reader of the files of one data set.

    Args:
        base: their format.
        headers: columns by name; the first entry whose columns the header has is taken, its label may be missing.
        numbers: columns by number, for files without a header.
        encoding: of the files, where that is always the same.
        change: what becomes of a record; None drops it, ``dropped`` says why.
        settings: other settings of the base format.
    """

    def read(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
        update: dict[str, Any] = {"format": base, **settings}
        columns = _columns(file, layout, base, headers, numbers) if headers else {}
        if headers:
            update = {"quoting": False, "header": columns is not numbers, **update}
        update |= {f"{role}_column": name for role, name in columns.items() if role != "source"}
        own = replace(file, encoding=encoding or file.encoding)
        for record in read_examples(own, split, layout.model_copy(update=update), columns.get("source")):
            if (changed := change(record)) is not None:
                yield changed
            else:
                file.notes.drop(dropped, record.place)

    return read


def _columns(file: TextFile, layout: Layout, base: str, headers: Sequence[Columns], numbers: Columns | None) -> Columns:
    """The columns of a file, of which the first line tells whether it has a header."""
    first = file.first_line()
    if base == "jsonl":
        record = parse_json(first, repr(file.name)) if first else {}
        known = set(record) if isinstance(record, dict) else set()
    else:
        known = set(first.rstrip("\r\n").split("\t"))
    for columns in headers:
        if known.issuperset(name for role, name in columns.items() if role != "label"):
            return columns
    if numbers is not None:
        return numbers
    wanted = "; or ".join(", ".join(columns.values()) for columns in headers)
    raise InputError(f"{file.name!r}: not --format {layout.format}, whose columns are {wanted}")


def _without_bytes(record: Record) -> Record:
    """Texts that are Python's bytes literals, as text."""
    return replace(record, text=_literal(record.text, record.place), pair=_literal(record.pair, record.place))


def _literal(text: str | None, place: str) -> str | None:
    if text is None or not re.match(r"""b['"]""", text):
        return text
    try:
        value = ast.literal_eval(text)
        return value.decode() if isinstance(value, bytes) else text
    except (ValueError, SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{place}: neither text nor a bytes literal in UTF-8") from error


def _relabelled(change: Callable[[str], str | None]) -> Callable[[Record], Record]:
    return lambda record: replace(record, label=change(record.label) if record.label else record.label)


_ANLI = {"e": "entailment", "n": "neutral", "c": "contradiction"}

# readers


def read_json(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """The examples of one JSON file: a list of objects, or an object of numbered objects, in the order of the numbers."""
    yield from _objects(parse_json(file.text().strip(), repr(file.name)), file, split, layout)


def _objects(value: Any, file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    if isinstance(value, dict) and all(isinstance(key, str) and key.isdecimal() for key in value):
        value = [value[key] for key in sorted(value, key=int)]
    if not isinstance(value, list):
        raise InputError(f"{file.name!r}: expected a JSON list of objects, or an object of numbered objects")
    numbered = ((number, f"{file.name!r}, example {number}", record) for number, record in enumerate(value, 1))
    yield from json_records(numbered, split, layout, columns_of(layout))


def _adversarial_glue(task: str, text: str, pair: str | None = None) -> Reader:
    columns = {"text_column": text, "pair_column": pair, "label_column": "label", "id_column": "idx"}

    def read(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
        tasks = parse_json(file.text().strip(), repr(file.name))
        if not isinstance(tasks, dict) or task not in tasks:
            raise InputError(f"{file.name!r}: has no task {task!r}, as AdvGLUE's dev.json does")
        yield from _objects(tasks[task], file, split, layout.model_copy(update=columns))

    return read


_NODE = re.compile(r"\(([0-4]) ([^()]+)\)|\(([0-4]) |\)")


def _trees(*, fine: bool, phrases: bool) -> Reader:
    """The Stanford Sentiment Treebank: labels 0 to 4, or negative and positive without neutral ones.  With ``phrases`` the
    training split has every phrase; others have sentences."""

    def read(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
        for number, line in file.lines():
            if not line.strip():
                continue
            place = file.place(number)
            nodes = _nodes(line.strip(), place)
            for node, (label, text) in enumerate(nodes if phrases and split == "train" else nodes[:1]):
                id_ = f"{number}-{node}" if phrases and split == "train" else None
                if fine:
                    yield Record(number, place, text, label=str(label), id=id_)
                elif label == 2:
                    file.notes.drop("a neutral text", place)
                else:
                    yield Record(number, place, text, label=("negative", "positive")[label > 2], id=id_)

    return read


def _nodes(line: str, place: str) -> list[tuple[int, str]]:
    """The label and the words of each node of a bracketed tree, the root first."""
    opened, words, nodes = list[tuple[int, int]](), list[str](), list[tuple[int, int, int]]()
    position = 0
    while position < len(line):
        match = _NODE.match(line, position)
        if match is None or (not opened and position and match[0] != ")"):
            raise InputError(f"{place}: not a tree of phrases with labels from 0 to 4")
        if match[2] is not None:
            nodes.append((int(match[1]), len(words), len(words) + 1))
            words.append(match[2])
        elif match[3] is not None:
            opened.append((int(match[3]), len(words)))
        else:
            if not opened:
                raise InputError(f"{place}: a bracket too many")
            label, start = opened.pop()
            nodes.append((label, start, len(words)))
        position = match.end()
        while position < len(line) and line[position] == " ":
            position += 1
    if opened or not nodes:
        raise InputError(f"{place}: a bracket is missing")
    plain = [word.replace("-LRB-", "(").replace("-RRB-", ")") for word in words]
    return [(label, " ".join(plain[start:end])) for label, start, end in reversed(nodes)]


def read_plain(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
    """A text on each line, and after a tab its second text; no labels."""
    for number, line in file.lines():
        text, tab, pair = line.rstrip("\r\n").partition("\t")
        if line.strip():
            yield Record(number, file.place(number), text, pair=pair if tab else None)


# the table


def _pairs(text: str, pair: str, label: str, id_: str = "index") -> Sequence[Columns]:
    """Columns by name, with or without an id."""
    columns = {"text": text, "pair": pair, "label": label}
    return ({**columns, "id": id_}, columns)


LAYOUTS: Mapping[str, Reader] = {
    "glue-cola": _known("tsv", ({"text": "sentence", "label": "label", "id": "index"},), {"text": "4", "label": "2"}),
    "glue-sst2": _known(
        "tsv", ({"text": "sentence", "label": "label", "id": "index"}, {"text": "sentence", "label": "label"})
    ),
    "glue-mrpc": _known("tsv", _pairs("#1 String", "#2 String", "Quality")),
    "glue-stsb": _known(
        "tsv",
        _pairs("sentence1", "sentence2", "score"),
        {"text": "6", "pair": "7", "label": "5"},
        ragged="keep",
    ),
    "glue-qqp": _known("tsv", _pairs("question1", "question2", "is_duplicate", "id"), ragged="drop"),
    "glue-mnli": _known(
        "tsv",
        _pairs("sentence1", "sentence2", "gold_label"),
        change=lambda record: None if record.label == UNDECIDED else record,
        dropped="no gold label",
    ),
    "glue-qnli": _known("tsv", _pairs("question", "sentence", "label")),
    "glue-rte": _known("tsv", _pairs("sentence1", "sentence2", "label")),
    "glue-wnli": _known("tsv", _pairs("sentence1", "sentence2", "label")),
    "sick": _known("tsv", _pairs("sentence_A", "sentence_B", "entailment_judgment", "pair_ID")),
    "sick-relatedness": _known("tsv", _pairs("sentence_A", "sentence_B", "relatedness_score", "pair_ID")),
    "paws": _known("tsv", _pairs("sentence1", "sentence2", "label", "id"), change=_without_bytes),
    "americasnli": _known("tsv", ({"text": "premise", "pair": "hypothesis", "label": "label", "source": "language"},)),
    "anli": _known(
        "jsonl",
        _pairs("context", "hypothesis", "label", "uid"),
        change=_relabelled(lambda label: _ANLI.get(label, label)),
    ),
    "advglue-sst2": _adversarial_glue("sst2", "sentence"),
    "advglue-qqp": _adversarial_glue("qqp", "question1", "question2"),
    "advglue-mnli": _adversarial_glue("mnli", "premise", "hypothesis"),
    "advglue-qnli": _adversarial_glue("qnli", "question", "sentence"),
    "advglue-rte": _adversarial_glue("rte", "sentence1", "sentence2"),
    "masakhanews": _known("tsv", ({"text": "text", "label": "category"},), quoting=True),
    "trec": _known("label-text", encoding="latin-1", change=_relabelled(lambda label: label.partition(":")[0] or None)),
    "trec-fine": _known("label-text", encoding="latin-1"),
    "sst": _trees(fine=False, phrases=False),
    "sst-phrases": _trees(fine=False, phrases=True),
    "sst-fine": _trees(fine=True, phrases=False),
    "sst-fine-phrases": _trees(fine=True, phrases=True),
    "json": read_json,
    "lines": read_plain,
}
"""By the name after ``--format``: those of data sets, and of files without columns."""


# all formats


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
        name = without_gzip(name)
        return name.endswith(tuple(filter(None, self.endings))) or ("" in self.endings and "." not in name)


FORMATS: Mapping[str, Format] = {
    **{name: Format(read) for name, read in LAYOUTS.items()},
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
