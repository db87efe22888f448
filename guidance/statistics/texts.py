"""Features of new texts: the columns that ``guide build-masks`` writes for a corpus, for a few texts at inference."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guidance.errors import InputError, counted
from guidance.patterns.features import FEATURES
from guidance.statistics.roles import COLUMNS, Pieces, Rarity, Words, parts_of_speech, relations, role_columns
from guidance.statistics.words import word_spans


@dataclass(frozen=True)
class Word:
    """A word of a text, as a parser gives it.

    Attributes:
        start, end: code points in the text, end exclusive.
        head: the index of its syntactic head among the words of the text, its own for a root; None if it has no tree.
        relation: the label of the relation to the head, of Universal Dependencies or of spaCy's English models.
        pos: universal part of speech.
        lemma: for negation; by default the word itself.
        sentence: the number of its sentence in the text.
        form: the word that a part of a multi-word token stands for (``de`` in *du*), for idf and stop words; by default the
            word as written.
    """

    start: int
    end: int
    head: int | None = None
    relation: str = ""
    pos: str = ""
    lemma: str = ""
    sentence: int = 0
    form: str = ""


def word_features(
    encoding: Any,
    texts: str | Sequence[str],
    words: Sequence[Sequence[Word]] | None = None,
    *,
    idf: Mapping[str, float] | None = None,
    stop_words: AbstractSet[str] | None = None,
    parsed: bool | None = None,
) -> dict[str, Tensor]:
    """The features of the words of some texts, by name, each (B, T); `Handle.guide` takes them as they are.

    They are ``word`` and ``segment``; with trees ``head``, ``relation``, ``pos`` and ``negation``; and what is asked for by
    ``idf`` and ``stop_words``.

    Args:
        encoding: what a fast tokenizer of Hugging Face gives for the texts, padded to one length.
        words: of each text, in their order; by default the text is split without a parser, as one sentence.
        idf: how rare a lowercased word is, in nats, as ``guide build-idf`` counts it.
        stop_words: lowercased.
        parsed: whether the words have trees; by default if any has a head.  With a parser give True, since it may fail on every text.

    Raises:
        InputError: the encoding is not of these texts, or a word lies outside of its text.

    Example:
        >>> encoding = tokenizer(texts, padding=True, return_tensors="pt")
        >>> model(**encoding, **handle.at_inference(**encoding, **word_features(encoding, texts)))
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if words is None:
        words = [[Word(*span) for span in word_spans(text)] for text in texts]
    pieces, length = _pieces(encoding, texts, words)
    columns = role_columns(pieces, _words(texts, words, idf, stop_words, parsed)).columns
    return {
        name: torch.from_numpy(column.reshape(len(texts), length)).to(FEATURES[name].dtype)
        for name, column in columns.items()
    }


def _pieces(encoding: Any, texts: Sequence[str], words: Sequence[Sequence[Word]]) -> tuple[Pieces, int]:
    """The tokens of all texts, and the length to which they are padded."""
    encodings = getattr(encoding, "encodings", None)
    if encodings is None:
        raise InputError("the encoding does not say where its tokens are in the text", hint="use a fast tokenizer")
    if not len(encodings) == len(texts) == len(words):
        raise InputError(f"{len(texts)} texts, {len(encodings)} encodings of texts and words of {len(words)}")
    lengths = {len(each.ids) for each in encodings}
    if len(lengths) > 1:
        raise InputError("the encodings differ in length", hint="tokenizer(texts, padding=True)")
    rows = []
    for number, (each, mine) in enumerate(zip(encodings, words, strict=True)):
        sentences = itertools.groupby(mine, key=lambda word: word.sentence)
        starts = [next(group).start for _, group in sentences]
        for part, (start, end) in zip(each.sequence_ids, each.offsets, strict=True):
            if part not in (None, 0):
                raise InputError("the encoding is of pairs of texts", hint="word_features takes single texts")
            sentence = max(int(np.searchsorted(starts, max(start, end - 1), side="right")) - 1, 0)
            rows.append((number, sentence, start, end) if part == 0 else (-1, -1, -1, -1))
    length = lengths.pop() if lengths else 0
    bounds = np.arange(len(texts) + 1, dtype=np.int64) * length
    return Pieces(bounds, *np.array(rows, np.int64).reshape(-1, 4).T), length


def _words(
    texts: Sequence[str],
    words: Sequence[Sequence[Word]],
    idf: Mapping[str, float] | None,
    stop_words: AbstractSet[str] | None,
    parsed: bool | None,
) -> Words:
    """The words of all texts as one table."""
    heads, forms, every, first = [], [], [], 0
    for number, (text, mine) in enumerate(zip(texts, words, strict=True)):
        least = 0
        for index, word in enumerate(mine):
            if not least <= word.start < word.end <= len(text):
                raise InputError(
                    f"text {number}: word {index} has the place {word.start} to {word.end}, in a text of {len(text)}",
                    hint="code points from 0, end exclusive, in the order of the text",
                )
            least = word.start
            if word.head is not None and not 0 <= word.head < len(mine):
                raise InputError(
                    f"text {number}: the head of word {index} is {word.head}, of {counted(len(mine), 'word')}"
                )
            heads.append(-1 if word.head is None else first + word.head)
            forms.append((word.form or text[word.start : word.end]).lower())
            every.append(word)
        first += len(mine)
    documents = np.repeat(np.arange(len(texts)), [len(mine) for mine in words])
    starts, ends = (np.array([getattr(word, name) for word in every], np.int64) for name in ("start", "end"))
    has_trees = any(head >= 0 for head in heads) if parsed is None else parsed
    features: dict[str, Any] = {}
    if has_trees:
        lemmas = [word.lemma or form for word, form in zip(every, forms, strict=True)]
        features["relation"], features["negation"] = relations([word.relation for word in every], lemmas)
        features["pos"] = parts_of_speech([word.pos for word in every])
    if idf is not None:
        rarity = idf if isinstance(idf, Rarity) else Rarity(idf.items())
        features["idf"] = np.array([rarity[form] for form in forms], COLUMNS["idf"])
    if stop_words is not None:
        features["stop_word"] = np.array([form in stop_words for form in forms], bool)
    return Words(documents, starts, ends, np.array(heads, np.int64) if has_trees else None, features)
