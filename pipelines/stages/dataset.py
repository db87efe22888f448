"""Stage ``build-dataset``: turns the labelled examples of a task into a corpus, so that every later stage accepts them.

An example is a document.  Its first block is the text; its second block, if the task has pairs, is the second text.  Pair
and label are also columns of ``documents.parquet``.  ``counts["shape"]`` says what other documents are: of ``summaries`` the
blocks are paragraphs, and the pair is the reference summary; of ``segments`` every block is a section.  Line ends inside a text become spaces.  Parallel text comes in two
files, where line n of one is the translation of line n of the other.
"""

from __future__ import annotations

import contextlib
import itertools
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.command import Command
from pipelines.engine.declaration import Opening, Stage, Take
from pipelines.engine.stage import Files, Result, Run
from pipelines.progress import log
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.text.blocks import BLOCK_LIMIT, Block, Document, Example, Notes, bounded_lines, paragraphs
from pipelines.text.corpus_files import PAIR, SPLITS, text_digest
from pipelines.text.corpus_writer import CorpusWriter, split_of
from pipelines.text.document_formats import FORMATS, Format, find_format
from pipelines.text.examples import Layout, Record, read_parallel
from pipelines.text.layouts import LAYOUTS
from pipelines.text.readers import check_encoding, known_extension
from pipelines.text.records import short_list
from pipelines.text.sentences import check_spec, model_files, splitter
from pipelines.text.sources import expand
from pipelines.text.structured import Columns, Documents, Structured
from pipelines.text.task_formats import FORMATS as TASK_FORMATS
from pipelines.text.task_formats import format_for
from pipelines.training.labels import is_fraction

__all__ = ["STAGE", "Config", "run"]

MOST_LABELS = 100
"""With more distinct labels, they are taken for numbers to predict, not classes: counted, but not listed."""

_LATER = {
    "choices_column",
    "question_column",
    *("summary_column", "sections_column", "separator", "summary_sentences", "min_summary_words", "drop_shared"),
}
"""Settings that stand in a recipe only where they are not the default, because recipes were made before them."""

_GENERAL = ("json", "lines")
"""Layouts that are not those of a data set."""

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal.__getitem__(
        ("csv", "tsv", "jsonl", "parquet", "label-text", *LAYOUTS, *TASK_FORMATS, *FORMATS)
    )


class Config(stage.Config):
    """Where to find the parts of a task's examples."""

    format: FormatName | None = Field(
        None,
        description="format of the files; by default decided by their extension.  label-text: a label, a space and the "
        "text on each line; json: one list of objects; conll: a word and its tag on each line.  Data sets of texts and pairs "
        f"with their own columns: {', '.join(name for name in LAYOUTS if name not in _GENERAL)}.  Multiple choice: dream, hellaswag, "
        "arc.  With summaries: scisummnet, scitldr, presumm, qmsum.  With topic segments: choi (sentences on lines and a "
        "separator line between sections), wiki-727k, wikisection.  Without labels: lines (a text on each line, after a tab its "
        "second text), words (a sentence on each line, for taggers), documents (to summarise)",
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
    choices_column: str | None = Field(
        None,
        description="for multiple choice: field of JSON lines with the list of choices; the label is the number of the right "
        "one from 0, its letter, or its text",
    )
    question_column: str | None = Field(
        None, description="for multiple choice: field with the question, if --text-column holds the passage"
    )
    summary_column: str | None = Field(
        None,
        description="JSON lines of documents with summaries: field with the summary, a text or a list of sentences",
    )
    sections_column: str | None = Field(
        None, description="JSON lines of segmented documents: field with a list of texts, or of lists of sentences"
    )
    separator: str = Field("==========", min_length=1, description="choi: the line between two sections")
    summary_sentences: int | None = Field(
        None, ge=1, description="how many sentences a summary takes from its document; by default 3, in scitldr 1"
    )
    min_summary_words: int = Field(
        0, ge=0, description="drop documents whose summary has fewer words; 50 makes NYT-50 of the New York Times"
    )
    drop_shared: bool = Field(
        False, description="segmented documents: drop test documents that share a sentence with a training document"
    )
    header: bool = Field(True, description="whether the first row of a table names its columns")
    quoting: bool | None = Field(None, description="whether tables use quotes; by default only .csv does")
    ragged: Literal["refuse", "drop", "keep"] = Field(
        "refuse",
        description="what to do with rows whose length differs; keep uses those that have every requested column",
    )
    sentences: str | None = Field(
        None,
        description="sentence splitter: rules (punctuation of all scripts), line, spacy-rules, spacy:NAME_OR_FOLDER, "
        "stanza:LANG or stanza:FOLDER:LANG:PACKAGE; by default rules, or line for parallel files",
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

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result; those added later count where they are not the default."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in super().recipe().items()
            if name not in _LATER or value != fields[name].default
        }

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
    **options: Any,
) -> Result:
    """Run the stage; for each split (train, valid, test) its files, and for parallel text those of the other side."""
    others = {f"{split}{PAIR}": list(found) for split, found in (pairs or {}).items()}
    given: dict[str, Any] = {**files, **others, **options}
    result: Result = STAGE.run(config, store=store, **given)
    return result


class Examples(Take):
    """Files of a split: of examples, or of one side of parallel text, line by line."""

    def open(self, reference: Sequence[str], opening: Opening[Config]) -> Files:
        config, is_parallel = opening.config, any(role.endswith(PAIR) for role in opening.references)
        documents = FORMATS.get(config.format or "")
        found = opening.stack.enter_context(
            expand(
                reference,
                any_kind=is_parallel or config.format is not None,
                stdin=opening.stdin,
                in_folders=documents.takes if documents else known_extension,
            )
        )
        if found.builtin:
            raise InputError("the built-in text has no labels", hint="guide build-corpus builtin:python-docs")
        return found.files(config.source, config.license)


class TrainingExamples(Examples):
    """Files of training examples, given as arguments."""

    def add(self, role: str, reference: Sequence[str], opening: Opening[Config]) -> None:
        super().add("train", reference, opening)


def _check(config: Config, references: Mapping[str, Any]) -> None:
    given = {role: list(found) for role, found in references.items() if found}
    if "files" in given and "train" in given:
        raise InputError(
            "training examples are given twice: as arguments and with --train", hint="leave out one of the two"
        )
    splits = {"train" if role == "files" else role for role in given if not role.endswith(PAIR)}
    _check_pairs(splits, {role.removesuffix(PAIR) for role in given if role.endswith(PAIR)}, config)
    known: Any = FORMATS.get(config.format or "") or TASK_FORMATS.get(config.format or "")
    if config.sentences is not None and known and known.has_sentences:
        log.warning(
            "--sentences %s has no effect: files of --format %s say themselves where sentences end",
            config.sentences,
            config.format,
        )
    _check_splits(config, splits)
    check_encoding(config.encoding)
    check_spec(config.sentences or "rules")


def _check_pairs(splits: Collection[str], pairs: Collection[str], config: Config) -> None:
    """Raise InputError if a split of parallel text lacks one side, or a setting applies only to tables."""
    if not pairs:
        return
    for split in SPLITS:
        if (split in splits) != (split in pairs):
            sides = (f"--{split}", f"--{split}-pair")
            lacks, has = sides[::-1] if split in splits else sides
            raise InputError(f"{has} needs {lacks}", hint="parallel text has two files for every split")
    for name in ("format", "pair_column", "label_column", "id_column"):
        if getattr(config, name) is not None:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is for tables, but parallel files are plain text", hint=f"leave out --{flag}")


def _check_splits(config: Config, given: Collection[str]) -> None:
    """Raise InputError if there are no files, or a split has both files and a fraction."""
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


def _prepare(opening: Opening[Config]) -> None:
    """Fill in the defaults that depend on the files, and check that parallel files belong together."""
    inputs, config = opening.inputs, opening.config
    pairs = [split for split in SPLITS if f"{split}{PAIR}" in inputs]
    if config.valid_fraction is None:
        opening.change(valid_fraction=0.05 if "train" in inputs and "valid" not in inputs else 0.0)
    if config.sentences is None:
        opening.change(sentences="line" if pairs else "rules")
    for split in pairs:
        own, other = (len(inputs[role].names) for role in (split, f"{split}{PAIR}"))
        if own != other:
            raise InputError(
                f"--{split} has {own} files and --{split}-pair has {other}",
                hint="give the same number of files, in the same order",
            )
    if (model := model_files(_sentences(opening.config))) is not None:
        inputs["parser"] = model


def _sentences(config: Config) -> str:
    assert config.sentences is not None, "set by _resolved"
    return config.sentences


def build(run: Run[Config]) -> None:
    """Build a corpus of examples.

    Raises:
        InputError: a file is not in its format or lacks a column (the message names file and line), or parallel files
            have different numbers of lines.
        MachineError: the model for sentences is not installed, or the disk is full.
    """
    config: Config = run.config
    first = next(run.inputs[split].names[0] for split in SPLITS if split in run.inputs)
    documents = find_format(config.format, _columns(config), first)
    if documents is not None:
        return _build_documents(run, documents)
    layout = Layout(
        **{field.name: getattr(config, field.name) for field in fields(Layout) if hasattr(config, field.name)}
    )
    notes = Notes()
    labels: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    given = {split: run.inputs[split] for split in SPLITS if split in run.inputs}
    kind = format_for(layout, [name for files in given.values() for name in files.names])
    total = sum(path.stat().st_size for files in given.values() for path in files.paths)
    with contextlib.closing(CorpusWriter(run.out, splitter(_sentences(config)), notes)) as writer:
        with run.progress.task("dataset", total=total or None, unit="B") as bar:
            for split, files in given.items():
                others = run.inputs.get(f"{split}{PAIR}")
                for number, (path, name) in enumerate(zip(files.paths, files.names, strict=True)):
                    prefix = [split] if len(given) > 1 else []
                    prefix += [name] if len(files.paths) > 1 else []
                    if others is None:
                        records = kind.read(path, name, split, layout, notes)
                    else:
                        other = others.paths[number], others.names[number]
                        records = read_parallel((path, name), other, config.encoding, notes)
                    for record in records:
                        document = _document(record, name, split, "/".join(prefix), config, notes)
                        if document is not None and document.example is not None:
                            writer.add(document)
                            texts[document.example.split].append(_digest(document))
                            if document.example.label is not None:
                                own = document.example.label
                                labels[document.example.split].update(own.split() if kind.shape == "tags" else [own])
                    bar.advance(path.stat().st_size, note=name.encode("unicode_escape").decode()[-30:])
        run.out.counts |= writer.finish(valid=config.valid_fraction or 0.0, test=config.test_fraction)
    if kind.shape != "examples":
        run.out.counts |= {"shape": kind.shape, **({"dialogues": True} if kind.is_dialogue else {})}
    run.out.counts["dropped"] = dict(sorted(notes.dropped.items()))
    kinds = {label for counter in labels.values() for label in counter}
    run.out.counts["labels"] = len(kinds)
    if len(kinds) <= MOST_LABELS:
        run.out.counts["examples"] = {split: dict(sorted(labels[split].items())) for split in SPLITS if labels[split]}
    run.warn(*notes.lines(), *_unknown_labels(labels))
    _count_shared_texts(run, texts)


def _columns(config: Config) -> Columns:
    return Columns(**{field.name: getattr(config, field.name) for field in fields(Columns)})


def _build_documents(run: Run[Config], layout: Format) -> None:
    """Build the artifact of documents with summaries or sections."""
    config: Config = run.config
    notes = Notes()
    split_sentences = splitter(_sentences(config))
    given = {split: run.inputs[split] for split in SPLITS if split in run.inputs}

    def read(notes: Notes) -> Iterator[tuple[str, Structured]]:
        for split, files in given.items():
            for document in layout.read(files.paths, files.names, _columns(config), notes):
                yield split, document

    texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    made = Documents(
        layout.shape,
        split_sentences,
        lambda key: split_of(key, config.valid_fraction or 0.0, config.test_fraction),
        notes,
        config.sentences == "line",
        config.min_summary_words,
        config.drop_shared,
        layout.has_gold,
    )
    if layout.shape == "segments":
        made.survey(read(Notes()))
        made.finish_survey()
    with (
        contextlib.closing(CorpusWriter(run.out, split_sentences, notes)) as writer,
        run.progress.task("dataset", unit="documents") as bar,
    ):
        for split, found in read(notes):
            prefix = [split] if len(given) > 1 else []
            prefix += [found.name] if len(given[split].paths) > 1 or found.id is None else []
            document = made.document(split, found, "/".join(prefix))
            if document is not None and document.example is not None:
                writer.add(document)
                texts[document.example.split].append(_digest(document))
            bar.advance(1)
        run.out.counts |= writer.finish(valid=config.valid_fraction or 0.0, test=config.test_fraction)
    run.out.counts |= {"dropped": dict(sorted(notes.dropped.items())), "shape": layout.shape}
    if layout.shape == "summaries":
        run.out.counts["summary_sentences"] = config.summary_sentences or layout.summary_sentences
        run.out.counts |= {} if layout.has_gold else {"unlabelled": True}
    run.warn(*notes.lines())
    _count_shared_texts(run, texts)
    if made.tested:
        run.out.counts["sharing_test_documents"] = made.shared
        if made.shared and not config.drop_shared:
            run.warn(
                f"{made.shared:,} of {made.tested:,} test documents share a sentence with a training document: scores are "
                "contaminated; --drop-shared leaves these documents out"
            )


def _unknown_labels(labels: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Warnings about labels of valid and test that no training example has; none for labels that are numbers to predict."""
    known = labels["train"]
    if not known or any(is_fraction(label) for label in known):
        return
    for split in ("valid", "test"):
        unknown = sorted(set(labels[split]) - set(known))
        if unknown:
            count = sum(labels[split][label] for label in unknown)
            yield f"{split}: {count:,} examples have labels that no training example has: {short_list(unknown)}"


def _digest(document: Document) -> bytes:
    return text_digest(block.text for block in document.blocks)


def _count_shared_texts(run: Run[Config], texts: Mapping[str, Sequence[bytes]]) -> None:
    """Count and tell how many examples of valid and test have the text of a training example."""
    known = set(texts["train"])
    for split in ("valid", "test"):
        if shared := sum(own in known for own in texts[split]):
            run.out.counts.setdefault("sharing_text", {})[split] = shared
            run.warn(f"{split}: {shared:,} of {len(texts[split]):,} examples have the text of a training example")


def _document(record: Record, name: str, split: str, prefix: str, config: Config, notes: Notes) -> Document | None:
    """A record as a document of one or two blocks; None if it has no text.

    Args:
        prefix: put before the record's id, to make ids unique among files and splits.
    """
    blocks, pair = [], record.pair
    if record.parts:
        blocks = [block for part in record.parts if (block := _part(part, record, name, config, notes))]
        if len(blocks) < len(record.parts):
            notes.drop("empty text", record.place)
            return None
    elif (block := _block(record.text or "", record, name, config, notes)) is not None:
        blocks = [block]
    else:
        notes.drop("null text" if record.text is None else "empty text", record.place)
        return None
    if not record.parts and (config.pair_column is not None or record.pair is not None):
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
        split = split_of(
            digest([block.text for block in blocks] if record.parts else [blocks[0].text, pair]),
            config.valid_fraction or 0.0,
            config.test_fraction,
        )
    own = record.id if record.id is not None else str(record.number)
    id_ = f"{prefix}/{own}" if prefix else own
    return Document(id_, record.source or name, record.place, blocks, Example(split, pair, label))


def _part(part: str | tuple[str, ...], record: Record, name: str, config: Config, notes: Notes) -> Block | None:
    """A block of a record: a text, or given sentences."""
    if isinstance(part, str):
        return _block(part, record, name, config, notes)
    sentences = [text for sentence in part if (text := " ".join(unicodedata.normalize("NFC", sentence).split()))]
    ends = list(itertools.accumulate(len(sentence) + 1 for sentence in sentences))
    spans = [(end - 1 - len(sentence), end - 1) for sentence, end in zip(sentences, ends, strict=True)]
    return Block(" ".join(sentences), record.number, spans) if sentences else None


def _block(text: str, record: Record, name: str, config: Config, notes: Notes) -> Block | None:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = ((record.number, line) for _, line in bounded_lines([text]) if line)
    found = list(
        itertools.islice(paragraphs(lines, source=name, notes=notes, keep_lines=config.sentences == "line"), 2)
    )
    if len(found) > 1:
        notes.warn(f"a text over {BLOCK_LIMIT:,} characters was cut off", record.place)
    return Block(found[0].text, record.number, found[0].sentences) if found else None


def _side(split: str) -> Examples:
    help = "Translations of --train, line by line (repeatable, in the same order)."
    return Examples(
        help if split == "train" else f"Translations of --{split}, likewise.", optional=True, many=True, option=True
    )


STAGE = Stage(
    "build-dataset",
    "corpus",
    3,
    Config,
    build,
    takes={
        "files": TrainingExamples(
            "Files of training examples; --valid-fraction and --test-fraction hold some of them out.",
            optional=True,
            many=True,
        ),
        "train": Examples("File of training examples (repeatable).", optional=True, many=True, option=True),
        "valid": Examples("File of validation examples (repeatable).", optional=True, many=True, option=True),
        "test": Examples("File of test examples (repeatable).", optional=True, many=True, option=True),
        **{f"{split}{PAIR}": _side(split) for split in SPLITS},
    },
    check=_check,
    prepare=_prepare,
    command=Command(
        "build-dataset",
        """Read the labelled examples of a task, each with one or two texts and perhaps a label; or parallel text.

        Documents with summaries or topic segments are examples too.  The result is a corpus, which every command for a corpus
        accepts.  Each example is a document.
        """,
        examples=(
            "guide build-dataset reviews.csv --text-column review --label-column stars --name reviews",
            "guide build-dataset --train train.tsv --valid dev.tsv --test test.tsv --text-column sentence1 --pair-column sentence2",
            "guide build-dataset --train in_domain_train.tsv --no-header --text-column 4 --label-column 2",
            "guide build-dataset rt-polarity.all --format label-text --encoding latin-1 --test-fraction 0.1",
            "guide build-dataset --train train.de.gz --train-pair train.en.gz --valid val.de --valid-pair val.en",
            "guide build-dataset papers.jsonl --summary-column summary --test-fraction 0.2",
            "guide build-dataset texts/ --format choi --test-fraction 0.2 --drop-shared --name topics",
        ),
        next=lambda made, _: (
            "guide finetune {}" if made.counts.get("labels") or made.counts.get("shape") else "guide build-tokenizer {}"
        ),
    ),
)
