"""Files of well-known data sets: their format, their columns, and what is odd about them.

A row of `LAYOUTS` is a name after ``--format``; a new data set of texts or pairs with labels is a new row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from guidance.errors import InputError
from pipelines.text.examples import Columns, Layout, Record, columns_of, json_records, read_examples
from pipelines.text.readers import TextFile
from pipelines.text.records import parse_json

UNDECIDED = "-"
"""The gold label of SNLI and MultiNLI where annotators did not agree."""


@dataclass(frozen=True)
class Known:
    """The layout of one data set.

    Attributes:
        base: its format: ``tsv``, ``jsonl``, ``label-text``, or a reader of its own.
        headers: columns by name; the first entry whose columns the header has is taken, its label may be missing.
        numbers: columns by number, for a file without a header; empty if it always has one.
        settings: other settings of the base format.
        encoding: of its files, where that is always the same.
        change: what becomes of a record; None drops it, ``dropped`` says why.
    """

    base: str | Callable[..., Iterator[Record]]
    headers: Sequence[Columns] = ()
    numbers: Columns = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    encoding: str | None = None
    change: Callable[[Record], Record | None] | None = None
    dropped: str = ""

    def read(self, file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
        """The examples of one file; see `pipelines.text.examples.read_examples`."""
        if callable(self.base):
            records = self.base(file, split, layout)
        else:
            columns, has_header = self._columns(file, layout) if self.headers else ({}, layout.header)
            of_tables = {"quoting": False, "header": has_header} if self.headers else {}
            named = {f"{role}_column": name for role, name in columns.items() if role != "source"}
            own = layout.model_copy(update={**of_tables, "format": self.base, **self.settings, **named})
            records = read_examples(
                replace(file, encoding=self.encoding or file.encoding), split, own, columns.get("source")
            )
        for record in records:
            changed = self.change(record) if self.change else record
            if changed is None:
                file.notes.drop(self.dropped, record.place)
            else:
                yield changed

    def _columns(self, file: TextFile, layout: Layout) -> tuple[Columns, bool]:
        """The columns of a file, and whether it has a header."""
        first = file.first_line()
        if self.base == "jsonl":
            record = parse_json(first, repr(file.name)) if first else {}
            known = set(record) if isinstance(record, dict) else set()
        else:
            known = set(first.rstrip("\r\n").split("\t"))
        for columns in self.headers:
            if known.issuperset(name for role, name in columns.items() if role != "label"):
                return columns, True
        if self.numbers:
            return self.numbers, False
        wanted = "; or ".join(", ".join(columns.values()) for columns in self.headers)
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


def _adversarial_glue(task: str, text: str, pair: str | None = None) -> Known:
    columns = {"text_column": text, "pair_column": pair, "label_column": "label", "id_column": "idx"}

    def read(file: TextFile, split: str, layout: Layout) -> Iterator[Record]:
        tasks = parse_json(file.text().strip(), repr(file.name))
        if not isinstance(tasks, dict) or task not in tasks:
            raise InputError(f"{file.name!r}: has no task {task!r}, as AdvGLUE's dev.json does")
        yield from _objects(tasks[task], file, split, layout.model_copy(update=columns))

    return Known(read)


_NODE = re.compile(r"\(([0-4]) ([^()]+)\)|\(([0-4]) |\)")


def _trees(*, fine: bool, phrases: bool) -> Known:
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

    return Known(read)


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


LAYOUTS: Mapping[str, Known] = {
    "glue-cola": Known("tsv", ({"text": "sentence", "label": "label", "id": "index"},), {"text": "4", "label": "2"}),
    "glue-sst2": Known(
        "tsv", ({"text": "sentence", "label": "label", "id": "index"}, {"text": "sentence", "label": "label"})
    ),
    "glue-mrpc": Known("tsv", ({"text": "#1 String", "pair": "#2 String", "label": "Quality"},)),
    "glue-stsb": Known(
        "tsv",
        _pairs("sentence1", "sentence2", "score"),
        {"text": "6", "pair": "7", "label": "5"},
        {"ragged": "keep"},
    ),
    "glue-qqp": Known("tsv", _pairs("question1", "question2", "is_duplicate", "id"), settings={"ragged": "drop"}),
    "glue-mnli": Known(
        "tsv",
        _pairs("sentence1", "sentence2", "gold_label"),
        change=lambda record: None if record.label == UNDECIDED else record,
        dropped="no gold label",
    ),
    "glue-qnli": Known("tsv", _pairs("question", "sentence", "label")),
    "glue-rte": Known("tsv", _pairs("sentence1", "sentence2", "label")),
    "glue-wnli": Known("tsv", _pairs("sentence1", "sentence2", "label")),
    "sick": Known("tsv", _pairs("sentence_A", "sentence_B", "entailment_judgment", "pair_ID")),
    "sick-relatedness": Known("tsv", _pairs("sentence_A", "sentence_B", "relatedness_score", "pair_ID")),
    "paws": Known("tsv", _pairs("sentence1", "sentence2", "label", "id"), change=_without_bytes),
    "americasnli": Known("tsv", ({"text": "premise", "pair": "hypothesis", "label": "label", "source": "language"},)),
    "anli": Known(
        "jsonl",
        _pairs("context", "hypothesis", "label", "uid"),
        change=_relabelled(lambda label: _ANLI.get(label, label)),
    ),
    "advglue-sst2": _adversarial_glue("sst2", "sentence"),
    "advglue-qqp": _adversarial_glue("qqp", "question1", "question2"),
    "advglue-mnli": _adversarial_glue("mnli", "premise", "hypothesis"),
    "advglue-qnli": _adversarial_glue("qnli", "question", "sentence"),
    "advglue-rte": _adversarial_glue("rte", "sentence1", "sentence2"),
    "masakhanews": Known("tsv", ({"text": "text", "label": "category"},), settings={"quoting": True}),
    "trec": Known("label-text", encoding="latin-1", change=_relabelled(lambda label: label.partition(":")[0] or None)),
    "trec-fine": Known("label-text", encoding="latin-1"),
    "sst": _trees(fine=False, phrases=False),
    "sst-phrases": _trees(fine=False, phrases=True),
    "sst-fine": _trees(fine=True, phrases=False),
    "sst-fine-phrases": _trees(fine=True, phrases=True),
    "json": Known(read_json),
    "lines": Known(read_plain),
}
"""By the name after ``--format``."""
