"""Roles: what is known about words, given to the pieces that a tokenizer makes of them.

Words and pieces meet by their places in the text alone, so that it does not matter who divided it how.  A piece belongs
to the word with which it shares most characters.  All arrays are flat; T pieces of S sequences, W words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guidance.patterns.features import RELATIONS, UPOS, relation_id
from guidance.statistics.idf import counted_words
from guidance.statistics.words import is_candidate

__all__ = [
    "NEGATIONS",
    "NOTHING",
    "Pieces",
    "Rarity",
    "Roles",
    "Words",
    "assign",
    "parts_of_speech",
    "relations",
    "role_columns",
    "segment_numbers",
]

Ints = NDArray[np.int64]

NOTHING: Mapping[str, tuple[object, type[np.generic]]] = {
    "word": (-1, np.int32),
    "segment": (-1, np.int32),
    "idf": (0, np.float32),
    "head": (-1, np.int32),
    "relation": (-1, np.int8),
    "pos": (-1, np.int8),
    "negation": (False, np.bool_),
    "stop_word": (False, np.bool_),
}
"""Every column: the value that says nothing, and its type.  What the values mean is in `guidance.patterns.features.FEATURES`."""

NEGATIONS = ("not", "n't", "never")
"""Lemmas, or forms where no lemma is known, of adverbs that negate: spaCy's English models call their relation ``neg``,
English treebanks ``advmod``."""


class Words(NamedTuple):
    """Words in the order of the text: by document, start and end.

    Attributes:
        document: int64_W.
        start, end: int64_W, code points in the document, the end exclusive.
        head: int64_W, place of the syntactic head among these words; a root's is its own, -1 where it has none.  None
            where no tree is known.
        features: further columns of `NOTHING` by name, one value a word.
    """

    document: Ints
    start: Ints
    end: Ints
    head: Ints | None
    features: Mapping[str, NDArray[np.generic]]


class Pieces(NamedTuple):
    """Tokens of some sequences, each sequence in the order of the text.

    Attributes:
        bounds: int64, S + 1: where each sequence starts, and the end of the last.
        document: int64_T; negative at special tokens, which belong to no word.
        sentence: int64_T, running number in the document.
        start, end: int64_T, code points in the document, the end exclusive.
    """

    bounds: Ints
    document: Ints
    sentence: Ints
    start: Ints
    end: Ints


@dataclass(frozen=True)
class Roles:
    """Columns for pieces, and what happened on the way.

    Attributes:
        columns: by name, one value a piece; see `NOTHING`.
        counts: ``words`` in the sequences (one that is cut counts in both), ``arcs`` to a head, ``cut_arcs`` to a head
            outside the sequence, ``silent_words`` of which no piece is left, ``lone_tokens`` that belong to no word.
    """

    columns: dict[str, NDArray[np.generic]]
    counts: dict[str, int] = field(default_factory=dict)


def role_columns(pieces: Pieces, words: Words) -> Roles:
    """The columns of `NOTHING` for which something is known: ``word`` and ``segment`` always.

    Words are numbered within a sequence from 0, those without a piece left out.  All pieces of a word are in the segment
    of its last one.  A head that is not in the sequence is
    dropped, never replaced.  A head that has no piece of its own is stood for by the word that got its letters: the
    first one, where the words of a contraction share their place.
    """
    size = len(words.start)
    is_text = pieces.document >= 0
    sequence = np.repeat(np.arange(len(pieces.bounds) - 1), np.diff(pieces.bounds))
    word = assign(pieces, words)
    found = word >= 0
    # one key for each word of each sequence
    keys, numbers = np.unique(sequence[found] * size + word[found], return_inverse=True)
    firsts = np.searchsorted(keys, np.arange(len(pieces.bounds) - 1) * size)
    key_sequence = keys // max(size, 1)
    number = np.arange(len(keys)) - firsts[key_sequence]
    here = keys - key_sequence * size

    def spread(name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
        nothing, kind = NOTHING[name]
        column = np.full(len(word), nothing, kind)
        column[found] = values[numbers]
        return column

    segment = segment_numbers(pieces)
    last = np.zeros(len(keys), np.int64)
    np.maximum.at(last, numbers, np.flatnonzero(found))
    segment[found] = segment[last[numbers]]  # the bare mark of a word's beginning stands behind the sentence before
    columns: dict[str, NDArray[np.generic]] = {
        "word": spread("word", number),
        "segment": segment.astype(NOTHING["segment"][1]),
    }
    counts = {"words": len(keys), "lone_tokens": int((is_text & ~found).sum())}
    owner, silent = _owners(pieces, words, word, sequence)
    counts["silent_words"] = silent
    if words.head is not None:
        head = words.head[here]
        has_head = head >= 0
        wanted = np.where(has_head, owner[head], -1)
        place = np.searchsorted(keys, key_sequence * size + wanted)
        place = np.minimum(place, max(len(keys) - 1, 0))
        is_here = (wanted >= 0) & (keys[place] == key_sequence * size + wanted)
        columns["head"] = spread("head", np.where(is_here, number[place], -1))
        counts |= {"arcs": int(has_head.sum()), "cut_arcs": int((has_head & ~is_here).sum())}
    for name, values in words.features.items():
        columns[name] = spread(name, values[here])
    return Roles(columns, counts)


def assign(pieces: Pieces, words: Words) -> Ints:
    """The word of each piece, int64_T: the one with which it shares most characters, the first of equals; -1 for none.

    A piece that shares none, such as the mark of a word's beginning, goes with the word that begins where it ends.
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
    # pairs of a piece and a word that may share characters; the ends of words need not be in order
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
        best = best[np.diff(owner[best], prepend=-1) != 0]  # the first of equals
        result[is_text[owner[best]]] = candidate[best]
    lost = np.flatnonzero(result[is_text] < 0)
    next_word = np.searchsorted(word_start, end[lost], side="left")
    begins = (next_word < len(word_start)) & (word_start[np.minimum(next_word, len(word_start) - 1)] == end[lost])
    result[is_text[lost[begins]]] = next_word[begins]
    return result


def _scale(pieces: Pieces, words: Words) -> tuple[int, int]:
    """The first document, and more characters than any of them has: (document - first) * length + place is in order."""
    base = min(int(pieces.document[pieces.document >= 0].min()), int(words.document.min()))
    return base, 2 + max(int(pieces.end.max()), int(words.end.max()))


def _owners(pieces: Pieces, words: Words, word: Ints, sequence: Ints) -> tuple[Ints, int]:
    """For each word the one that stands for it: itself, or where no piece is its own, the word that got its letters, or
    -1; and how many words inside a sequence nothing stands for."""
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
    # searching needs order; a normaliser may have moved a piece by some characters
    start = np.maximum.accumulate(pieces.start[is_text] + shift)
    end = np.maximum.accumulate(pieces.end[is_text] + shift)
    shift = (words.document[missing] - base) * length
    word_start, word_end = words.start[missing] + shift, words.end[missing] + shift
    place = np.searchsorted(end, word_start, side="right")
    inner = np.minimum(place, len(is_text) - 1)
    covers = (place < len(is_text)) & (start[inner] < word_end)
    owner[missing[covers]] = word[is_text[inner[covers]]]
    # between two pieces of one document and one sequence
    before, after = is_text[np.maximum(inner - 1, 0)], is_text[inner]
    inside = (place > 0) & (place < len(is_text)) & (sequence[before] == sequence[after])
    inside &= (pieces.document[before] == pieces.document[after]) & (words.document[missing] == pieces.document[after])
    return owner, int((inside & ~covers).sum())


def segment_numbers(pieces: Pieces) -> Ints:
    """The number of its sentence within the sequence, from 0, for each piece, int64_T.

    Special tokens go with the sentence before them, the first one with the one after it.
    """
    size = len(pieces.document)
    if not size:
        return np.zeros(0, np.int64)
    places, starts = np.arange(size), pieces.bounds[:-1]
    lengths = np.diff(pieces.bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    ordinary = pieces.document >= 0
    before = np.maximum.accumulate(np.where(ordinary, places, -1))
    after = np.minimum.accumulate(np.where(ordinary, places, size)[::-1])[::-1]
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
    """The place of each word's relation in `guidance.patterns.features.RELATIONS`, or -1; and which words negate.

    A word negates whose relation is ``advmod:neg`` (spaCy's ``neg``), or ``advmod`` with a lemma of `NEGATIONS`; that one
    counts as ``advmod:neg`` then, so that the labels of treebanks and of spaCy give the same roles.
    """
    known = {label: relation_id(label) for label in set(labels)}
    numbers = np.array([known[label] for label in labels], np.int8)
    adverb, negation = RELATIONS.index("advmod"), RELATIONS.index("advmod:neg")
    said = np.fromiter((lemma.lower() in NEGATIONS for lemma in lemmas), bool, len(labels))
    numbers[said & (numbers == adverb)] = negation
    return numbers, numbers == negation


def parts_of_speech(tags: Sequence[str]) -> NDArray[np.int8]:
    """The place of each universal part of speech in `guidance.patterns.features.UPOS`, or -1."""
    places = {tag: place for place, tag in enumerate(UPOS)}
    return np.array([places.get(tag, -1) for tag in tags], np.int8)


class Rarity(dict[str, float]):
    """How rare each word is, by its form in small letters; 0 where it cannot be a rare one (`words.is_candidate`).

    A form that was not counted is as rare as the rarest part of it that is (``mother-in-law``), a part that the counted
    text does not have as rare as the rarest word there; a form without such parts (``n't``, ``...``) has 0.

    Args:
        table: forms and idf.
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
