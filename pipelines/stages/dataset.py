"""Stage ``build-dataset``: turns the labelled examples of a task into a corpus, so that every later stage accepts them.

An example is a document.  Its first block is the text; its second block, if the task has pairs, is the second text.  Pair
and label are also columns of ``documents.parquet``.  ``counts["shape"]`` says what other documents are: of ``summaries`` the
blocks are paragraphs, and the pair is the reference summary; of ``segments`` every block is a section.  Line ends inside a text become spaces.  Parallel text comes in two
files, where line n of one is the translation of line n of the other.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from guidance.errors import InputError, counted
from pipelines.engine.declaration import Command, Opening, Stage, Take
from pipelines.engine.stage import Files, Result, Run
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text.blocks import Document, Notes
from pipelines.text.corpus_files import PAIR, SPLITS, split_of, text_digest
from pipelines.text.examples import Layout, document_of, read_parallel
from pipelines.text.formats import FORMATS, LAYOUTS, Format, format_for
from pipelines.text.readers import TextFile, check_encoding, known_extension
from pipelines.text.records import short_list
from pipelines.text.sentences import check_spec, model_files, splitter
from pipelines.text.sources import expand
from pipelines.text.structured import DocumentMaker, Structured
from pipelines.training.labels import is_fraction

MOST_LABELS = 100
"""With more distinct labels, they are taken for numbers to predict, not classes: counted, but not listed."""

_GENERAL = ("json", "lines")
"""Layouts that are not those of a data set."""

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal.__getitem__(("csv", "tsv", "jsonl", "parquet", "label-text", *FORMATS))


class Config(Layout):
    """Where to find the parts of a task's examples."""

    later = frozenset(
        [
            *("choices_column", "question_column", "summary_column", "sections_column"),
            *("separator", "summary_sentences", "min_summary_words", "drop_shared"),
        ]
    )

    format: FormatName | None = Field(
        None,
        description="Format of the files; by default decided by their extension.  label-text: a label, a space or tab, and the "
        "text on each line; json: one list of objects; conll: a word and its tag on each line.  Data sets of texts and pairs "
        f"with their own columns: {', '.join(name for name in LAYOUTS if name not in _GENERAL)}.  Multiple choice: dream, hellaswag, "
        "arc.  With summaries: scisummnet, scitldr, presumm, qmsum.  With topic segments: choi (sentences on lines and a "
        "separator line between sections), wiki-727k, wikisection.  Without labels: lines (a text on each line, after a tab its "
        "second text), words (a sentence on each line, for taggers), documents (to summarise).",
    )
    valid_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Fraction of the training examples for validation; by default 0.05 without a validation file.",
    )
    test_fraction: float = Field(
        0.0, ge=0, lt=1, description="Fraction of the training examples for testing, from 0 to 1."
    )
    license: str | None = Field(None, description="Licence of the text, recorded in everything built from it.")
    source: str | None = Field(None, description="Origin of the text, recorded in everything built from it.")

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
    others = {f"{split}{PAIR}": list(own) for split, own in (pairs or {}).items()}
    named: dict[str, Any] = {**files, **others, **options}
    result: Result = STAGE.run(config, store=store, **named)
    return result


class Examples(Take):
    """Files of a split: of examples, or of one side of parallel text, line by line."""

    def open(self, reference: Sequence[str], opening: Opening[Config]) -> Files:
        config, is_parallel = opening.config, any(role.endswith(PAIR) for role in opening.references)
        kind = FORMATS.get(config.format or "")
        sources = opening.stack.enter_context(
            expand(
                reference,
                any_kind=is_parallel or config.format is not None,
                stdin=opening.stdin,
                in_folders=kind.takes if kind and kind.is_structured else known_extension,
            )
        )
        if sources.builtin:
            raise InputError("the built-in text has no labels", hint="guide build-corpus builtin:python-docs")
        return sources.files(config.source, config.license)


class TrainingExamples(Examples):
    """Files of training examples, given as arguments."""

    def add(self, role: str, reference: Sequence[str], opening: Opening[Config]) -> None:
        super().add("train", reference, opening)


def _check(config: Config, references: Mapping[str, Any]) -> None:
    roles = {role for role, reference in references.items() if reference}
    if "files" in roles and "train" in roles:
        raise InputError(
            "training examples are given twice: as arguments and with --train", hint="leave out one of the two"
        )
    splits = {"train" if role == "files" else role for role in roles if not role.endswith(PAIR)}
    _check_no_fractions(references)
    _check_pairs(splits, {role.removesuffix(PAIR) for role in roles if role.endswith(PAIR)}, config)
    kind = FORMATS.get(config.format or "")
    if config.sentences is not None and kind and kind.has_sentences:
        message = "--sentences %s has no effect: files of --format %s say themselves where sentences end"
        log.warning(message, config.sentences, config.format)
    _check_splits(config, splits)
    check_encoding(config.encoding)
    check_spec(config.sentences or "rules")


def _check_no_fractions(references: Mapping[str, Any]) -> None:
    """Raise InputError if a fraction is given for ``--valid`` or ``--test``, which are fractions in `guide build-corpus`, but files
    here."""
    for split in ("valid", "test"):
        for name in references.get(split) or ():
            if re.fullmatch(r"\d*\.\d+", name) and not Path(name).exists():
                raise InputError(
                    f"--{split} takes files, not {name}",
                    hint=f"--{split}-fraction {name} holds out a part of the training examples",
                )


def _check_pairs(splits: Collection[str], pairs: Collection[str], config: Config) -> None:
    """Raise InputError if a split of parallel text lacks one side, or a setting applies only to tables."""
    for split in SPLITS if pairs else ():
        if (split in splits) != (split in pairs):
            sides = (f"--{split}", f"--{split}-pair")
            lacks, has = sides[::-1] if split in splits else sides
            raise InputError(f"{has} needs {lacks}", hint="parallel text has two files for every split")
    for name in ("format", "pair_column", "label_column", "id_column") if pairs else ():
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


_OF_SHAPES = {
    "drop_shared": "segments",
    "separator": "segments",
    "summary_sentences": "summaries",
    "min_summary_words": "summaries",
    "choices_column": "choices",
    "question_column": "choices",
}
"""Settings that only files of one shape have."""


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
                f"--{split} has {counted(own, 'file')} and --{split}-pair has {other}",
                hint="give the same number of files, in the same order",
            )
    if (model := model_files(opening.config.sentences or "rules")) is not None:
        inputs["parser"] = model
    names = [name for role in SPLITS if role in inputs for name in inputs[role].names]
    kind = format_for(opening.config, names)
    for name, shape in _OF_SHAPES.items():
        if kind.shape != shape and getattr(config, name) != Config.model_fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            log.warning("%s has no effect: it is for %s, and these files have %s", flag, shape, kind.shape)
    if kind.is_structured:
        # long sentences of documents are divided; all others are as in version 3
        opening.stage = replace(STAGE, version=4)


def build(run: Run[Config]) -> None:
    """Build a corpus of examples.  Raises InputError if a file is not in its format or lacks a column (the message names file
    and line), or parallel files have different numbers of lines."""
    from pipelines.text.corpus_writer import write_corpus
    from pipelines.text.drafts import draft_writer

    config, notes = run.config, Notes()
    files = _files(run, notes)
    kind = format_for(config, [file.name for split in SPLITS for file in files.get(split, ())])
    valid, test = config.valid_fraction or 0.0, config.test_fraction
    split_sentences = splitter(config.sentences or "rules")
    of_text = functools.partial(split_of, valid=valid, test=test)
    structured = DocumentMaker(kind.shape, kind.has_gold, config, split_sentences, of_text, notes)
    if kind.is_structured:
        documents = _structured(run, kind, files, structured)
    else:
        documents = _examples(run, kind, files, of_text, notes)
    labels: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    draft, counts = run.out.path / "draft.parquet", run.out.counts
    with draft_writer(draft, split_sentences, Notes()) as writer:
        for document in documents:
            writer.add(document)
            split, label = document.split or "train", document.label
            texts[split].append(text_digest(block.text for block in document.blocks))
            if label is not None:
                labels[split].update(label.split() if kind.shape == "tags" else [label])
    if config.drop_shared and structured.shared and structured.shared == structured.tested:
        raise InputError(
            f"{counted(structured.tested, 'test document shares', 'test documents share')} a sentence with a training document, so "
            "--drop-shared leaves no test document",
            hint="give test documents of other texts with --test, or leave --drop-shared out",
        )
    apart = files.keys() - {"train"}
    names = short_list([file.name for some in files.values() for file in some])
    counts |= write_corpus(
        [draft], run.out, notes, valid=valid, test=test, apart=apart, of_examples=True, sources=names
    )
    draft.unlink()
    counts |= {"shape": kind.shape} if kind.shape != "examples" else {}
    counts |= {"dialogues": True} if kind.is_dialogue else {}
    counts["dropped"] = dict(sorted(notes.dropped.items()))
    if kind.shape == "summaries":
        counts["summary_sentences"] = config.summary_sentences or kind.summary_sentences
        counts |= {} if kind.has_gold else {"unlabelled": True}
    if not kind.is_structured:
        kinds = {label for counter in labels.values() for label in counter}
        counts["labels"] = len(kinds)
        if len(kinds) <= MOST_LABELS:
            counts["examples"] = {split: dict(sorted(labels[split].items())) for split in SPLITS if labels[split]}
        elif any(map(is_fraction, kinds)):
            counts["fractions"] = True
    run.warn(*notes.lines(), *_unknown_labels(labels, "word" if kind.shape == "tags" else "example"))
    _count_shared_texts(run, texts)
    if structured.tested:
        counts["sharing_test_documents"] = 0 if config.drop_shared else structured.shared
        if structured.shared and not config.drop_shared:
            share = counted(structured.shared, "shares", "share", of=f"{structured.tested:,} test documents")
            run.warn(
                f"{share} a sentence with a training document: scores are contaminated; --drop-shared leaves out such documents"
            )


_Files = Mapping[str, Sequence[TextFile]]


def _files(run: Run[Config], notes: Notes) -> _Files:
    """The files of each split, and of the other side of parallel text."""
    return {
        role: [TextFile(path, name, run.config.encoding, notes) for path, name in zip(g.paths, g.names, strict=True)]
        for role, g in run.inputs.items()
        if role.removesuffix(PAIR) in SPLITS
    }


def _examples(
    run: Run[Config], kind: Format, files: _Files, split_of_text: Callable[[str], str], notes: Notes
) -> Iterator[Document]:
    """The examples of all files."""
    splits = {split: files[split] for split in SPLITS if split in files}
    total = sum(file.path.stat().st_size for own in splits.values() for file in own)
    with run.progress.task("dataset", total=total or None, unit="B") as bar:
        for split, own in splits.items():
            for number, file in enumerate(own):
                prefix = [split] if len(splits) > 1 else []
                prefix += [file.name] if len(own) > 1 else []
                if f"{split}{PAIR}" in files:
                    records = read_parallel(file, files[f"{split}{PAIR}"][number])
                else:
                    records = kind.read(file, split, run.config)
                for record in records:
                    of_file = (file.name, split, "/".join(prefix), run.config)
                    if document := document_of(record, *of_file, split_of_text, notes):
                        yield document
                bar.advance(file.path.stat().st_size, note=file.name.encode("unicode_escape").decode()[-30:])


def _structured(run: Run[Config], kind: Format, files: _Files, structured: DocumentMaker) -> Iterator[Document]:
    """The documents of all files."""

    splits = [split for split in SPLITS if split in files]

    def read(files: _Files) -> Iterator[tuple[str, Structured]]:
        return ((split, document) for split in splits for document in kind.read(files[split], run.config))

    if kind.shape == "segments":
        structured.survey(read(_files(run, Notes())))
    with run.progress.task("dataset", unit="documents") as bar:
        for split, own in read(files):
            prefix = [split] if len(splits) > 1 else []
            prefix += [own.name] if len(files[split]) > 1 or own.id is None else []
            if document := structured.document(split, own, "/".join(prefix)):
                yield document
            bar.advance(1)


def _unknown_labels(labels: Mapping[str, Counter[str]], unit: str) -> Iterator[str]:
    """Warnings about labels of valid and test that no training example has; none for labels that are numbers to predict."""
    known = labels["train"]
    if not known or any(is_fraction(label) for label in known):
        return
    for split in ("valid", "test"):
        unknown = sorted(set(labels[split]) - set(known))
        if unknown:
            count = sum(labels[split][label] for label in unknown)
            have = counted(count, f"{unit} has a label", f"{unit}s have labels")
            yield f"{split}: {have} that no training example has: {short_list(unknown)}"


def _count_shared_texts(run: Run[Config], texts: Mapping[str, Sequence[bytes]]) -> None:
    """Count and tell how many examples of valid and test have the text of a training example."""
    known = set(texts["train"])
    for split in ("valid", "test"):
        if shared := sum(own in known for own in texts[split]):
            run.out.counts.setdefault("sharing_text", {})[split] = shared
            have = counted(shared, "has", "have", of=f"{len(texts[split]):,} examples")
            run.warn(f"{split}: {have} the text of a training example")


def _side(split: str) -> Examples:
    help = "Translations of --train, line by line (repeatable, in the same order)."
    return Examples(
        help if split == "train" else f"Translations of --{split}, likewise.", optional=True, many=True, option=True
    )


def _next(made: Artifact, _: Store) -> str:
    """Train with it, if it has training examples."""
    if "train" not in made.counts["splits"]:
        return "guide show {}"
    return "guide finetune {}" if made.counts.get("labels") or made.counts.get("shape") else "guide build-tokenizer {}"


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
        next=_next,
    ),
)
