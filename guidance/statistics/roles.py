"""Role columns: what is known about words, as columns over the tokens (pieces) of a tokenizer.

Words and pieces are aligned only by their offsets in the text, so any parser works with any tokenizer.  A piece belongs to
the word with which it shares the most characters.  All arrays are flat: T pieces of S sequences, W words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guidance.patterns.features import FEATURES, RELATIONS, UPOS, relation_id
from guidance.statistics.idf import counted_words
from guidance.statistics.words import is_candidate

Ints = NDArray[np.int64]


COLUMNS: Mapping[str, type[np.generic]] = {
    "word": np.int32,
    "segment": np.int32,
    "idf": np.float32,
    "head": np.int32,
    "relation": np.int8,
    "pos": np.int8,
    "negation": np.bool_,
    "stop_word": np.bool_,
}
"""The role columns by name, with the types in which they are stored.  `FEATURES` says what the values mean, and gives the value
(`fill`) of tokens without a word."""

NEGATIONS = ("not", "n't", "never")
"""Lemmas (or forms without a lemma) of negating adverbs, whose relation is ``neg`` in spaCy's English models, but
``advmod`` in English treebanks."""


class Words(NamedTuple):
    """Words in the order of the text: by document, start and end.

    Attributes:
        document: int64_W.
        start, end: int64_W, code points in the document, end exclusive.
        head: int64_W, index of the syntactic head among these words; a root's is its own, -1 for a word without a tree.
            None if there are no trees at all.
        features: further columns of `COLUMNS` by name, one value per word.
    """

    document: Ints
    start: Ints
    end: Ints
    head: Ints | None
    features: Mapping[str, NDArray[np.generic]]


class Pieces(NamedTuple):
    """The tokens of some sequences, each sequence in the order of the text.

    Attributes:
        bounds: int64 (S + 1,), where each sequence starts, and the end of the last.
        document: int64_T; negative for special tokens, which belong to no word.
        sentence: int64_T, running number in the document.
        start, end: int64_T, code points in the document, end exclusive.
    """

    bounds: Ints
    document: Ints
    sentence: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True)
class Roles:
    """Role columns for pieces, and counts of what was aligned.

    Attributes:
        columns: by name, one value per piece; see `COLUMNS`.
        counts: ``words`` in the sequences (a word cut by a sequence's end counts in both), ``arcs`` to a head, ``cut_arcs``
            to a head outside the sequence, ``silent_words`` that the tokenizer dropped entirely, ``lone_tokens`` that
            belong to no word.
    """

    columns: dict[str, NDArray[np.generic]]
    counts: dict[str, int] = field(default_factory=dict)


def role_columns(pieces: Pieces, words: Words) -> Roles:
    """The role columns of some pieces: ``word`` and ``segment``, ``head`` if there are trees, and the features of words.

    Words are numbered from 0 within a sequence, without those that have no piece.  All pieces of a word are in the segment
    of its last piece.  A head outside the sequence is dropped, never replaced.  A head without pieces is represented by the
    word that has its characters: where the words of a contraction share their span, that is the first of them.
    """
    size = len(words.start)
    is_text = pieces.document >= 0
    sequence = np.repeat(np.arange(len(pieces.bounds) - 1), np.diff(pieces.bounds))
    word = assign(pieces, words)
    has_word = word >= 0
    # one key for each word of each sequence
    keys, numbers = np.unique(sequence[has_word] * size + word[has_word], return_inverse=True)
    firsts = np.searchsorted(keys, np.arange(len(pieces.bounds) - 1) * size)
    key_sequence = keys // max(size, 1)
    number = np.arange(len(keys)) - firsts[key_sequence]
    word_of_key = keys - key_sequence * size

    def spread(name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
        column = np.full(len(word), FEATURES[name].fill, COLUMNS[name])
        column[has_word] = values[numbers]
        return column

    segment = segment_numbers(pieces)
    last = np.zeros(len(keys), np.int64)
    np.maximum.at(last, numbers, np.flatnonzero(has_word))
    # a bare word-start mark (▁) follows the end of the sentence before, but belongs to its word's sentence
    segment[has_word] = segment[last[numbers]]
    columns = {"word": spread("word", number), "segment": segment.astype(COLUMNS["segment"])}
    owner, silent = _owners(pieces, words, word, sequence)
    counts = {"words": len(keys), "lone_tokens": int((is_text & ~has_word).sum()), "silent_words": silent}
    if words.head is not None:
        head = words.head[word_of_key]
        has_head = head >= 0
        wanted = np.where(has_head, owner[head], -1)
        key = np.searchsorted(keys, key_sequence * size + wanted)
        key = np.minimum(key, max(len(keys) - 1, 0))
        in_sequence = (wanted >= 0) & (keys[key] == key_sequence * size + wanted)
        columns["head"] = spread("head", np.where(in_sequence, number[key], -1))
        counts |= {"arcs": int(has_head.sum()), "cut_arcs": int((has_head & ~in_sequence).sum())}
    columns |= {name: spread(name, values[word_of_key]) for name, values in words.features.items()}
    return Roles(columns, counts)


def assign(pieces: Pieces, words: Words) -> Ints:
    """The word of each piece, int64_T: the one that shares the most characters, the first of several; -1 for none.

    A piece that shares no character, such as a word-start mark (▁), belongs to the word that begins where it ends.
    """
    result = np.full(len(pieces.start), -1, np.int64)
    is_text = np.flatnonzero(pieces.document >= 0)
    if not len(is_text) or not len(words.start):
        return result
    base, length = _scale(pieces, words)
    shift = (pieces.document[is_text] - base) * length
    start, end = pieces.start[is_text] + shift, pieces.end[is_text] + shift
    shift = (words.document - base) * length
    word_start, word_end = words.start + shift, words.end + shift
    # pairs of a piece and a word that may share characters; words are sorted by start, but perhaps not by end
    first = np.searchsorted(np.maximum.accumulate(word_end), start, side="right")
    last = np.searchsorted(word_start, end, side="left")
    sizes = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(start)), sizes)
    candidate = np.arange(len(owner)) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
    shared = np.minimum(end[owner], word_end[candidate]) - np.maximum(start[owner], word_start[candidate])
    if len(owner):
        most = np.zeros(len(start), np.int64)
        full = np.flatnonzero(sizes)
        most[full] = np.maximum.reduceat(shared, (np.cumsum(sizes) - sizes)[full])
        best = np.flatnonzero((shared == most[owner]) & (shared > 0))
        best = best[np.diff(owner[best], prepend=-1) != 0]  # the first word of several
        result[is_text[owner[best]]] = candidate[best]
    without_word = np.flatnonzero(result[is_text] < 0)
    piece_end = end[without_word]
    next_word = np.searchsorted(word_start, piece_end, side="left")
    begins = (next_word < len(word_start)) & (word_start[np.minimum(next_word, len(word_start) - 1)] == piece_end)
    result[is_text[without_word[begins]]] = next_word[begins]
    return result


def _scale(pieces: Pieces, words: Words) -> tuple[int, int]:
    """The first document, and a length above that of every document: (document - first) * length + offset orders the text."""
    base = min(int(pieces.document[pieces.document >= 0].min()), int(words.document.min()))
    return base, 2 + max(int(pieces.end.max()), int(words.end.max()))


def _owners(pieces: Pieces, words: Words, word: Ints, sequence: Ints) -> tuple[Ints, int]:
    """For each word the one that represents it: itself if it has pieces, else the word that has its characters, or none (-1).

    Also how many words inside a sequence have no representative.
    """
    owner = np.arange(len(words.start))
    has_piece = np.zeros(len(owner), bool)
    has_piece[word[word >= 0]] = True
    missing = np.flatnonzero(~has_piece)
    owner[missing] = -1
    is_text = np.flatnonzero(pieces.document >= 0)
    if not len(missing) or not len(is_text):
        return owner, 0
    base, length = _scale(pieces, words)
    shift = (pieces.document[is_text] - base) * length
    # searchsorted needs sorted offsets, but a normaliser may have moved a piece by some characters
    start = np.maximum.accumulate(pieces.start[is_text] + shift)
    end = np.maximum.accumulate(pieces.end[is_text] + shift)
    shift = (words.document[missing] - base) * length
    word_start, word_end = words.start[missing] + shift, words.end[missing] + shift
    piece = np.searchsorted(end, word_start, side="right")
    inner = np.minimum(piece, len(is_text) - 1)
    covers = (piece < len(is_text)) & (start[inner] < word_end)
    owner[missing[covers]] = word[is_text[inner[covers]]]
    # inside a sequence: between two pieces of the same document and sequence, with no sentence of another split between them
    before, after = is_text[np.maximum(inner - 1, 0)], is_text[inner]
    inside = (piece > 0) & (piece < len(is_text)) & (sequence[before] == sequence[after])
    inside &= (pieces.document[before] == pieces.document[after]) & (words.document[missing] == pieces.document[after])
    inside &= pieces.sentence[after] - pieces.sentence[before] <= 1
    return owner, int((inside & ~covers).sum())


def segment_numbers(pieces: Pieces) -> Ints:
    """For each piece the number of its sentence within the sequence, from 0, int64_T.

    A special token belongs to the sentence before it, or to the sentence after it at the start of a sequence.
    """
    size = len(pieces.document)
    if not size:
        return np.zeros(0, np.int64)
    positions, starts = np.arange(size), pieces.bounds[:-1]
    lengths = np.diff(pieces.bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    ordinary = pieces.document >= 0
    before = np.maximum.accumulate(np.where(ordinary, positions, -1))
    after = np.minimum.accumulate(np.where(ordinary, positions, size)[::-1])[::-1]
    start, end = np.repeat(starts, lengths), np.repeat(starts + lengths, lengths)
    source = np.where(before >= start, before, np.where(after < end, after, start))
    is_new = np.zeros(size, bool)
    for column in (pieces.document, pieces.sentence):
        is_new[1:] |= column[source[1:]] != column[source[:-1]]
    is_new[starts] = False
    numbers = np.cumsum(is_new)
    return numbers - np.repeat(numbers[starts], lengths)


# words


def relations(labels: Sequence[str], lemmas: Sequence[str]) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """For each word the index of its relation in `guidance.patterns.features.RELATIONS`, or -1; and whether it negates.

    A word negates if its relation is ``advmod:neg`` (spaCy's ``neg``), or ``advmod`` with a lemma of `NEGATIONS`.  The
    latter is changed to ``advmod:neg``, so that treebank and spaCy labels give the same roles.
    """
    known = {label: relation_id(label) for label in set(labels)}
    numbers = np.array([known[label] for label in labels], np.int8)
    adverb, negation = RELATIONS.index("advmod"), RELATIONS.index("advmod:neg")
    negating_lemma = np.fromiter((lemma.lower() in NEGATIONS for lemma in lemmas), bool, len(labels))
    numbers[negating_lemma & (numbers == adverb)] = negation
    return numbers, numbers == negation


def parts_of_speech(tags: Sequence[str]) -> NDArray[np.int8]:
    """The index of each universal part of speech in `guidance.patterns.features.UPOS`, or -1."""
    index = {tag: number for number, tag in enumerate(UPOS)}
    return np.array([index.get(tag, -1) for tag in tags], np.int8)


class Rarity(dict[str, float]):
    """The idf of each word by its lowercased form; 0 for words that cannot count as rare (`words.is_candidate`).

    A form that is not in the table gets the largest idf of its parts (``mother-in-law``).  A part that is not in the table
    gets the largest idf of all.  A form without parts (``n't``, ``...``) gets 0.

    Args:
        table: forms with their idf.
    """

    def __init__(self, table: Iterable[tuple[str, float]]) -> None:
        super().__init__(table)
        self.unseen = max(self.values(), default=0.0)
        for form in self:
            if not is_candidate(form):
                self[form] = 0.0

    def __missing__(self, form: str) -> float:
        if not is_candidate(form):
            return 0.0
        return max((self.get(part, self.unseen) for part in counted_words(form)), default=0.0)
