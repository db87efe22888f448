"""The words of texts that belong to no corpus, and the features of them that plans read.

Rules find the words, or a parser.  The features are those that ``guide build-masks`` writes for the same text in a corpus that was
split into sentences alike.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor

from guidance.errors import InputError
from guidance.statistics.texts import Word, word_features
from guidance.statistics.words import word_spans
from pipelines.text.blocks import Span
from pipelines.text.parsers import MODELS, MOST_WORDS, NAMES, SYNTAX, kind_meant, stop_words
from pipelines.text.sentence_rules import split_sentences

Split = Callable[[str], list[Span]]
"""Where the sentences of a text begin and end."""


def lines_of(text: str) -> list[Span]:
    """The lines of a text as its sentences, without white space at their ends; empty lines are none."""
    return [match.span() for match in re.finditer(r"\S(?:[^\r\n]*\S)?", text)]


class TextParser:
    """Parses texts.

    Args:
        split: where sentences end; by default the rules of ``guide build-corpus`` say so.

    Attributes:
        stop_words: of the parser's language; None if they are not known.

    Raises:
        InputError: the name is not one of `NAMES`, or the parser cannot be opened.
        MachineError: the library or the model is not installed.
    """

    def __init__(self, name: str, device: str = "auto", split: Split = split_sentences) -> None:
        self._split = split
        kind, _, rest = name.partition(":")
        if kind not in MODELS or not rest:
            unknown = f"{name} has the trees of a corpus, and parses no other text"
            raise InputError(unknown if kind == "conllu" else f"unknown parser {name!r}{kind_meant(name)}", hint=NAMES)
        self._model = MODELS[kind][0](rest, device, MOST_WORDS)
        words = stop_words(self._model.language or "xx")
        self.stop_words: AbstractSet[str] | None = None if words is None else frozenset(words)

    def words(self, text: str) -> list[Word]:
        """The words of a text.  A sentence without a tree, because it is too long or cannot be parsed, is split by rules."""
        spans, words = self._split(text), list[Word]()
        trees = self._model([text[start:end] for start, end in spans])
        for sentence, ((start, end), tree) in enumerate(zip(spans, trees, strict=True)):
            first = len(words)
            if len(tree):
                columns = (tree.start, tree.end, tree.head, tree.relation, tree.upos, tree.lemma, tree.form)
                for a, b, head, relation, pos, lemma, form in zip(*columns, strict=True):
                    words.append(Word(start + a, start + b, first + head, relation, pos, lemma, sentence, form))
            else:
                words += [Word(start + a, start + b, sentence=sentence) for a, b in word_spans(text[start:end])]
        return words


def words_of(text: str, split: Split = split_sentences) -> list[Word]:
    """The words of a text by rules, each with the number of its sentence."""
    starts = [start for start, _ in split(text)]
    return [Word(a, b, sentence=max(bisect.bisect_right(starts, a) - 1, 0)) for a, b in word_spans(text)]


class TextWords:
    """Computes the features of the words of a text.

    Attributes:
        names: the features that it computes.
        tables: what a plan looks up by token, such as co-occurrence counts, by name.

    Args:
        parser: for syntax; None for the words that rules find.
        idf: how rare a lowercased word is; see `guidance.word_features`.
        split: where sentences end, without a parser.
    """

    def __init__(
        self,
        parser: TextParser | None = None,
        idf: Mapping[str, float] | None = None,
        split: Split = split_sentences,
        tables: Mapping[str, Any] | None = None,
    ) -> None:
        self._parser, self._idf, self._split, self.tables = parser, idf, split, tables or {}
        self._stop_words = None if parser is None else parser.stop_words
        found = {
            "word": True,
            "segment": True,
            **dict.fromkeys(SYNTAX, parser is not None),
            "stop_word": self._stop_words is not None,
            "idf": idf is not None,
        }
        self.names = tuple(name for name, is_found in found.items() if is_found)

    def features(self, encoding: Any, text: str) -> dict[str, Tensor]:
        """The features of a text, by name, each (1, T); the encoding is of this text alone, by a fast tokenizer."""
        words = words_of(text, self._split) if self._parser is None else self._parser.words(text)
        known: Any = {"idf": self._idf, "stop_words": self._stop_words, "parsed": self._parser is not None}
        return word_features(encoding, text, [words], **known)
