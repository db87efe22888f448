"""Splits text into sentences by rules, with a spaCy model or with a Stanza model; gives spans in code points.

spaCy and Stanza are imported only if they split; importing them takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError
from pipelines.engine.stage import Files, require
from pipelines.text.blocks import Span
from pipelines.text.parsing import model_folder
from pipelines.text.sentence_rules import split_sentences
from pipelines.text.spacy_models import guarded, load_spacy, spacy_folder
from pipelines.text.stanza_models import find_stanza, load_stanza, stanza_files

Splitter = Callable[[Sequence[str]], list[list[Span]]]

_RELOAD_AFTER = 400_000


def check_spec(spec: str) -> None:
    """Raise InputError unless ``spec`` is ``rules``, ``spacy-rules``, ``line``, ``spacy:...`` or ``stanza:...``."""
    kind, _, rest = spec.partition(":")
    if spec not in ("rules", "spacy-rules", "line") and not (kind in ("spacy", "stanza") and rest):
        raise InputError(
            f"unknown sentence splitter: {spec!r}",
            hint="use rules, line, spacy-rules, spacy:NAME_OR_FOLDER, stanza:LANG, stanza:FOLDER or "
            "stanza:FOLDER:LANG:PACKAGE",
        )


def model_files(spec: str) -> Files | None:
    """The files of the model that splits sentences, an input of the stage since they affect its result; None for rules."""
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "spacy":
        return model_folder(spacy_folder(rest))
    if kind == "stanza":
        return stanza_files(*find_stanza(rest), ("tokenize", "mwt"))
    return None


def splitter(spec: str) -> Splitter:
    """A function from texts to the spans of their sentences, without white space at the ends of a sentence.

    With ``line`` the readers take lines as sentences, and the rules are left with text that has no lines.
    """
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "stanza":
        return _stanza_splitter(*find_stanza(rest))
    if kind == "spacy" or spec == "spacy-rules":
        return _SpacySplitter(rest or None)
    return lambda texts: [split_sentences(text) for text in texts]


class _SpacySplitter:
    """Splits with a spaCy model, or with spaCy's rules for all languages if ``name`` is None.  Its vocabulary grows with every new word, so the model is reloaded from time to time."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._model: Any = None

    def _load(self) -> None:
        if self._name is None:
            self._model = require("spacy", "spacy").blank("xx")
            self._model.add_pipe("sentencizer")
        else:
            self._model = load_spacy(self._name)
            wanted = ("tok2vec", "transformer", "parser", "senter", "sentencizer")
            if not {"parser", "senter", "sentencizer"}.intersection(self._model.pipe_names):
                raise InputError(
                    f"the spaCy model {self._name!r} cannot split sentences",
                    hint="use a model with a parser, senter or sentencizer",
                )
            self._model.select_pipes(enable=[pipe for pipe in wanted if pipe in self._model.pipe_names])
        self._model.tokenizer = guarded(self._model.tokenizer)
        self._limit = len(self._model.vocab.strings) + _RELOAD_AFTER

    def __call__(self, texts: Sequence[str]) -> list[list[Span]]:
        if self._model is None or len(self._model.vocab.strings) > self._limit:
            self._load()
        tables = (doc.to_array(["SENT_START", "IDX"]) for doc in self._model.pipe(texts))
        return [
            list(_stripped(text, table[table[:, 0] == 1, 1].tolist()))
            for text, table in zip(texts, tables, strict=True)
        ]


def _stripped(text: str, starts: list[int]) -> Iterator[Span]:
    if not starts or starts[0] != 0:
        starts = [0, *starts]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        sentence = text[start:end]
        bare = sentence.strip()
        if bare:
            start += len(sentence) - len(sentence.lstrip())
            yield start, start + len(bare)


def _stanza_splitter(folder: Path, language: str, package: str | None) -> Splitter:
    stanza = require("stanza", "stanza")
    pipeline = load_stanza(folder, language, package, "tokenize", use_gpu=False)

    def split(texts: Sequence[str]) -> list[list[Span]]:
        documents = pipeline.bulk_process([stanza.Document([], text=text) for text in texts])
        return [
            list(_stripped(document.text, [s.tokens[0].start_char for s in document.sentences if s.tokens]))
            for document in documents
        ]

    return split
