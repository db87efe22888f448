"""Stage ``build-dataset``: turns the labelled examples of a task into a corpus, so that every later stage accepts them.

An example is a document.  Its first block is the text; its second block, if the task has pairs, is the second text.  Pair
and label are also columns of ``documents.parquet``.  Line ends inside a text become spaces.  Parallel text comes in two
files, where line n of one is the translation of line n of the other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Unpack

from pydantic import Field, model_validator

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.stage import Files, Options, Result, Run, Stage, run_stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Example, Notes, bounded_lines, paragraphs
from pipelines.text.corpus_writer import SPLITS, CorpusWriter, split_of
from pipelines.text.readers import Expansion, check_encoding, format_of, looks_like, open_lines
from pipelines.text.records import check_expansion, parse_json, plain_rows, quoted_rows, record_id, short_list
from pipelines.text.sentences import check_spec, model_files, splitter
from pipelines.text.sources import expand

__all__ = ["STAGE", "Config", "run"]

MOST_LABELS = 100
"""With more distinct labels, they are taken for numbers to predict, not classes: counted, but not listed."""

_SHOWN = 5
_PAIR = "_pair"
"""Suffix of a split's name: the role of the input with the other side of parallel text."""


class Config(stage.Config):
    """Where to find the parts of a task's examples."""

    format: Literal["csv", "tsv", "jsonl", "parquet", "label-text"] | None = Field(
        None,
        description="format of the files; by default decided by their extension.  label-text: a label, a space and the "
        "text on each line",
    )
    encoding: str = Field("utf-8", description="encoding of text files; invalid bytes are an error")
    text_column: str = Field(
        "text", min_length=1, description="column or field with the text: its name, or its number from 1"
    )
    pair_column: str | None = Field(None, description="column or field with the second text: name, or number from 1")
    label_column: str | None = Field(
        None, description="column or field with the label; by default `label` if it exists"
    )
    id_column: str | None = Field(
        None, description="column or field with the example's id; by default the id is the number of the line or row"
    )
    header: bool = Field(True, description="whether the first row of a table names its columns")
    quoting: bool | None = Field(None, description="whether tables use quotes; by default only .csv does")
    ragged: Literal["refuse", "drop", "keep"] = Field(
        "refuse",
        description="what to do with rows whose length differs; keep takes those that have all columns asked for",
    )
    sentences: str | None = Field(
        None,
        description="sentence splitter: rules (spaCy's sentencizer), line, spacy:NAME_OR_FOLDER, stanza:LANG or "
        "stanza:FOLDER:LANG:PACKAGE; by default rules, or line for parallel files",
    )
    valid_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="fraction of the training examples for validation; by default 0.05 without a validation file",
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="fraction of the training examples for testing, from 0 to 1"
    )
    license: str | None = Field(None, description="licence of the text, recorded in everything built from it")
    source: str | None = Field(None, description="where the text comes from, recorded in everything built from it")

    @model_validator(mode="after")
    def _check(self) -> Config:
        if (self.valid_fraction or 0) + self.test_fraction >= 1:
            raise ValueError("the fractions must add up to less than 1, to leave examples for training")
        return self


def run(
    files: Mapping[str, Sequence[str]],
    config: Config,
    *,
    pairs: Mapping[str, Sequence[str]] | None = None,
    store: Store,
    stdin: BinaryIO | None = None,
    **options: Unpack[Options],
) -> Result:
    """Build a corpus of examples.

    Args:
        files: for each split (train, valid, test) its files, as arguments of `pipelines.text.sources.expand`.
        pairs: for parallel text the files with the other side, in the same order.  All files are then read as plain text,
            line by line.

    Raises:
        InputError: a file is not in its format or lacks a column (the message names file and line), or parallel files
            have different numbers of lines.
        MachineError: the model for sentences is not installed, or the disk is full.
    """
    files = {split: list(files.get(split) or ()) for split in SPLITS}
    pairs = {split: list(given) for split in SPLITS if (given := (pairs or {}).get(split))}
    _check_pairs(files, pairs, config)
    config = _resolved(config, {split for split in files if files[split]}, parallel=bool(pairs))
    check_encoding(config.encoding)
    check_spec(_sentences(config))
    with contextlib.ExitStack() as stack:
        inputs: dict[str, stage.Input] = {}
        any_kind = bool(pairs) or config.format is not None
        for role, sources in (*files.items(), *((f"{split}{_PAIR}", found) for split, found in pairs.items())):
            if not sources:
                continue
            found = stack.enter_context(expand(sources, any_kind=any_kind, stdin=stdin))
            if found.builtin:
                raise InputError("the built-in text has no labels", hint="guide build-corpus builtin:python-docs")
            shown = config.source or ", ".join(found.names[:3]) + (" ..." if len(found.names) > 3 else "")
            digests = tuple(found.digests.get(path) or stage.file_digest(path) for path in found.paths)
            about = [{"source": shown, "license": config.license}]
            inputs[role] = Files(tuple(found.paths), tuple(found.names), digests, about)
        for split in pairs:
            own, other = (len(inputs[role].names) for role in (split, f"{split}{_PAIR}"))  # type: ignore[attr-defined]
            if own != other:
                raise InputError(
                    f"--{split} has {own} files and --{split}-pair has {other}",
                    hint="give the same number of files, in the same order",
                )
        if (model := model_files(_sentences(config))) is not None:
            inputs["parser"] = model
        return run_stage(STAGE, config, inputs, store=store, **options)


def is_parallel(made: Artifact) -> bool:
    """Whether a dataset was built from parallel files."""
    return any(role.endswith(_PAIR) for role in made.manifest["inputs"])


def _check_pairs(files: Mapping[str, Sequence[str]], pairs: Mapping[str, Sequence[str]], config: Config) -> None:
    """Raise InputError if a split of parallel text lacks one side, or a setting applies only to tables."""
    if not pairs:
        return
    for split, found in files.items():
        if bool(found) != (split in pairs):
            sides = (f"--{split}", f"--{split}-pair")
            lacks, has = sides[::-1] if found else sides
            raise InputError(f"{has} needs {lacks}", hint="parallel text has two files for every split")
    for name in ("format", "pair_column", "label_column", "id_column"):
        if getattr(config, name) is not None:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is for tables, but parallel files are plain text", hint=f"leave out --{flag}")


def _sentences(config: Config) -> str:
    assert config.sentences is not None, "set by _resolved"
    return config.sentences


def _resolved(config: Config, given: set[str], *, parallel: bool) -> Config:
    """The configuration with the defaults of ``valid_fraction`` and ``sentences`` filled in."""
    if not given:
        raise InputError(
            "no files were given", hint="guide build-dataset FILE, or --train FILE --valid FILE --test FILE"
        )
    for split, fraction in (("valid", config.valid_fraction), ("test", config.test_fraction)):
        if fraction and split in given:
            raise InputError(
                f"--{split} and --{split}-fraction exclude each other",
                hint="give a file, or a fraction of the training examples",
            )
        if fraction and "train" not in given:
            raise InputError(f"--{split}-fraction splits off training examples, but there are none")
    defaults: dict[str, Any] = {}
    if config.valid_fraction is None:
        defaults["valid_fraction"] = 0.05 if "train" in given and "valid" not in given else 0.0
    if config.sentences is None:
        defaults["sentences"] = "line" if parallel else "rules"
    return config.model_copy(update=defaults)


def build(run: Run) -> None:
    """Build the artifact; see `run`."""
    config: Config = run.config
    notes = Notes()
    labels: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    given = {split: run.inputs[split] for split in SPLITS if split in run.inputs}
    total = sum(path.stat().st_size for files in given.values() for path in files.paths)
    with contextlib.closing(CorpusWriter(run.out, splitter(_sentences(config)), notes)) as writer:
        with run.progress.task("dataset", total=total or None, unit="B") as bar:
            for split, files in given.items():
                others = run.inputs.get(f"{split}{_PAIR}")
                for number, (path, name) in enumerate(zip(files.paths, files.names, strict=True)):
                    prefix = [split] if len(given) > 1 else []
                    prefix += [name] if len(files.paths) > 1 else []
                    if others is None:
                        records = _records(path, name, split, config, notes)
                    else:
                        records = _parallel((path, name), (others.paths[number], others.names[number]), config, notes)
                    for record in records:
                        document = _document(record, name, split, "/".join(prefix), config, notes)
                        if document is not None and document.example is not None:
                            writer.add(document)
                            if document.example.label is not None:
                                labels[document.example.split][document.example.label] += 1
                    bar.advance(path.stat().st_size, note=name.encode("unicode_escape").decode()[-30:])
        run.out.counts |= writer.finish(valid=config.valid_fraction or 0.0, test=config.test_fraction)
    run.out.counts["dropped"] = dict(sorted(notes.dropped.items()))
    kinds = {label for counter in labels.values() for label in counter}
    run.out.counts["labels"] = len(kinds)
    if len(kinds) <= MOST_LABELS:
        run.out.counts["examples"] = {split: dict(sorted(labels[split].items())) for split in SPLITS if labels[split]}
    run.warn(*notes.lines(), *_unknown_labels(labels))


def _unknown_labels(labels: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Warnings about labels of valid and test that no training example has; none for labels that are numbers to predict."""
    known = labels["train"]
    if not known or any(_is_fraction(label) for label in known):
        return
    for split in ("valid", "test"):
        unknown = sorted(set(labels[split]) - set(known))
        if unknown:
            count = sum(labels[split][label] for label in unknown)
            yield f"{split}: {count:,} examples have labels that no training example has: {short_list(unknown)}"


def _is_fraction(label: str) -> bool:
    try:
        value = float(label)
    except ValueError:
        return False
    return math.isfinite(value) and not value.is_integer()


# from records to documents


@dataclass(frozen=True)
class _Record:
    """One example as written in a file; ``number`` is its line or row, from 1."""

    number: int
    place: str
    text: str | None
    pair: str | None = None
    label: str | None = None
    id: str | None = None


def _document(record: _Record, name: str, split: str, prefix: str, config: Config, notes: Notes) -> Document | None:
    """A record as a document of one or two blocks; None if it has no text.

    Args:
        prefix: put before the record's id, to make ids unique among files and splits.
    """
    block = _block(record.text or "", record, name, config, notes)
    if block is None:
        notes.drop("null text" if record.text is None else "empty text", record.place)
        return None
    blocks, pair = [block], None
    if config.pair_column is not None or record.pair is not None:
        second = _block(record.pair or "", record, name, config, notes)
        if second is None:
            notes.warn("an example has an empty pair", record.place)
        pair = second.text if second else ""
        blocks += [second] if second else []
    label = (record.label or "").strip() or None
    if label is None and record.label is not None:
        notes.warn("an example has an empty label", record.place)
    if split == "train":
        # keyed by the text, so that equal examples get the same split
        split = split_of(digest([block.text, pair]), config.valid_fraction or 0.0, config.test_fraction)
    own = record.id if record.id is not None else str(record.number)
    id_ = f"{prefix}/{own}" if prefix else own
    return Document(id_, name, record.place, blocks, Example(split, pair, label))


def _block(text: str, record: _Record, name: str, config: Config, notes: Notes) -> Block | None:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = ((record.number, line) for _, line in bounded_lines([text]) if line)
    found = list(
        itertools.islice(paragraphs(lines, source=name, notes=notes, keep_lines=config.sentences == "line"), 2)
    )
    if len(found) > 1:
        notes.warn(f"a text over {BLOCK_LIMIT:,} characters was cut off", record.place)
    return Block(found[0].text, record.number, found[0].sentences) if found else None


# from files to records


def _records(path: Path, name: str, split: str, config: Config, notes: Notes) -> Iterator[_Record]:
    kind = format_of(name, config.format)
    if kind not in _READERS:
        raise InputError(
            f"{name!r}: examples cannot be read from {kind} files",
            hint=f"name the format with --format: {', '.join(_READERS)}",
        )
    yield from _READERS[kind](path, name, split, config, notes)


def _parallel(text: tuple[Path, str], pair: tuple[Path, str], config: Config, notes: Notes) -> Iterator[_Record]:
    """The examples of two parallel files, each given as path and name; pairs with an empty second side are dropped.

    Raises:
        InputError: the files have different numbers of lines.
    """
    lines = [open_lines(path, name, config.encoding, notes, any_end=False) for path, name in (text, pair)]
    counts = [0, 0]
    for own, other in itertools.zip_longest(*lines):
        for side, found in enumerate((own, other)):
            counts[side] += found is not None
        if own is None or other is None:
            continue  # count to the end, so that the message has both numbers of lines
        place = f"{text[1]!r}, line {own[0]}"
        if own[1].strip() and not other[1].strip():
            notes.drop("empty pair", place)
        else:
            yield _Record(own[0], place, own[1], pair=other[1])
    if counts[0] != counts[1]:
        raise InputError(
            f"{text[1]!r} has {counts[0]:,} lines and {pair[1]!r} has {counts[1]:,}: they are not parallel",
            hint="line n of one must be the translation of line n of the other",
        )


def _label_first(path: Path, name: str, split: str, config: Config, notes: Notes) -> Iterator[_Record]:
    for number, line in open_lines(path, name, config.encoding, notes):
        if line.strip():
            label, _, text = line.strip().partition(" ")
            yield _Record(number, f"{name!r}, line {number}", text, label=label)


def _table(path: Path, name: str, split: str, config: Config, notes: Notes, *, delimiter: str) -> Iterator[_Record]:
    lines = open_lines(path, name, config.encoding, notes)
    quoting = config.quoting if config.quoting is not None else delimiter == ","
    rows = quoted_rows(lines, name, delimiter) if quoting else plain_rows(lines, delimiter)
    first = next(rows, None)
    if first is None:
        return
    width = len(first[1])
    columns = _columns(first[1] if config.header else None, width, f"{name!r}, line {first[0]}", split, config, notes)
    if not config.header:
        rows = itertools.chain([first], rows)
    for number, row in rows:
        place = f"{name!r}, line {number}"
        if len(row) != width:
            if config.ragged == "refuse":
                _refuse_ragged(name, width, itertools.chain([(number, row)], rows), config.header, quoting)
            if config.ragged == "drop" or len(row) <= max(columns.values()):
                notes.drop("a row of another length", place)
                continue
        yield _Record(number, place, **{role: row[column] for role, column in columns.items()})


def _refuse_ragged(name: str, width: int, rows: Iterable[tuple[int, list[str]]], header: bool, quoting: bool) -> None:
    wrong = [(number, len(row)) for number, row in rows if len(row) != width]
    shown = ", ".join(f"line {number} ({size})" for number, size in wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    raise InputError(
        f"{name!r}: {'the header' if header else 'the first row'} has {width} fields, other rows do not: {shown}{more}",
        hint=("if quotes are plain letters here: --no-quoting" if quoting else "if the file uses quotes: --quoting")
        + "\n--ragged drop leaves such rows out, --ragged keep takes those that have all columns asked for",
    )


def _columns(
    names: Sequence[str] | None, width: int, place: str, split: str, config: Config, notes: Notes
) -> dict[str, int]:
    """The column of each part of an example.  A test file may lack the label column."""
    found = {}
    for role, wanted in _wanted(config).items():
        same = [column for column, known in enumerate(names or ()) if known == wanted]
        if len(same) > 1:
            raise InputError(
                f"{place}: {len(same)} columns are called {wanted!r}", hint="give the column's number instead, from 1"
            )
        if same:
            found[role] = same[0]
        elif wanted.isdecimal() and 1 <= int(wanted) <= width:
            found[role] = int(wanted) - 1
        elif role == "label" and config.label_column is None:
            continue
        elif role == "label" and split == "test":
            notes.warn("a test file has no labels", place)
        else:
            if names is not None:
                found_columns = f"it has {short_list(names)}"
            elif wanted.isdecimal():
                found_columns = f"its rows have {width}"
            else:
                found_columns = "without a header columns are numbers from 1"
            raise InputError(
                f"{place}: no column {wanted!r}; {found_columns}",
                hint=f"name it with --{role}-column; the delimiter is a comma in .csv and a tab in .tsv",
            )
    return found


def _wanted(config: Config) -> dict[str, str]:
    wanted = {
        "text": config.text_column,
        "pair": config.pair_column,
        "label": config.label_column or "label",
        "id": config.id_column,
    }
    return {role: name for role, name in wanted.items() if name is not None}


def _json_lines(path: Path, name: str, split: str, config: Config, notes: Notes) -> Iterator[_Record]:
    wanted = _wanted(config)
    for number, line in open_lines(path, name, config.encoding, notes):
        if not line.strip(" \t\n\r"):
            continue
        place = f"{name!r}, line {number}"
        record = parse_json(line, place)
        if not isinstance(record, dict):
            raise InputError(f"{place}: expected a JSON object, found {type(record).__name__}")
        values = {}
        for role, key in wanted.items():
            if key in record:
                values[role] = _plain(record[key], role, key, place)
            elif role == "label" and (config.label_column is None or split == "test"):
                values[role] = None
            else:
                raise InputError(
                    f"{place}: no field {key!r}; it has {short_list(record)}", hint=f"name it with --{role}-column"
                )
        yield _Record(number, place, **values)


def _plain(value: Any, role: str, key: str, place: str) -> str | None:
    """A value as text.  Labels and ids may be numbers, which are written as in JSON."""
    if value is None:
        return None
    if role == "id" and isinstance(value, str | int) and not isinstance(value, bool):
        value = record_id(value)
    if role == "label" and isinstance(value, bool | int | float):
        value = json.dumps(value)
    if not isinstance(value, str):
        wanted = "a string or a number" if role == "label" else "a string"
        raise InputError(f"{place}: {key!r} must be {wanted}, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: half a surrogate pair in {key!r}, character {error.start}") from error
    return value


def _parquet(path: Path, name: str, split: str, config: Config, notes: Notes) -> Iterator[_Record]:
    import pyarrow as pa

    number = 0
    with path.open("rb") as raw:
        head = raw.read(16)
        if looks_like(head) != "Parquet":
            raise InputError(f"{name!r}: not Parquet; it looks like {looks_like(head) or 'plain text'}")
        size = path.stat().st_size
        try:
            names = open_parquet(raw).schema_arrow.names
            columns = _columns(names, len(names), repr(name), split, config, notes)
            text = names[columns["text"]]
            raw.seek(0)
            # read as a dictionary, so that a bomb that repeats one string is not expanded
            file = open_parquet(raw, page_checksum_verification=True, read_dictionary=[text])
            check_expansion(file.metadata, name, size)
            expansion = Expansion(name)
            wanted = list(dict.fromkeys(names[column] for column in columns.values()))
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in range(batch.num_rows):
                    number += 1
                    place = f"{name!r}, row {number}"
                    values = {
                        role: _plain(batch.column(names[column])[row].as_py(), role, names[column], place)
                        for role, column in columns.items()
                    }
                    expansion.add(len(values["text"] or ""), size)
                    yield _Record(number, place, **values)
        except UnicodeDecodeError as error:
            raise InputError(f"{name!r}, row {number}: not UTF-8 ({error.reason})") from error
        except (pa.ArrowException, OSError, MemoryError) as error:
            detail = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise InputError(f"{name!r}, after row {number}: damaged Parquet ({detail!r})") from error


_READERS: Mapping[str, Any] = {
    "csv": functools.partial(_table, delimiter=","),
    "tsv": functools.partial(_table, delimiter="\t"),
    "jsonl": _json_lines,
    "parquet": _parquet,
    "label-text": _label_first,
}

STAGE = Stage("build-dataset", "corpus", 1, Config, build)
