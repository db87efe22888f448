"""Aligning words and pieces: cases worked by hand, plain loops, and a law about pieces of words."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import RELATIONS, UPOS, Tokens
from guidance.statistics.roles import (
    COLUMNS,
    Pieces,
    Rarity,
    Words,
    assign,
    parts_of_speech,
    relations,
    role_columns,
    segment_numbers,
)


def ints(values: Any) -> Any:
    return np.array(values, np.int64)


def make_words(rows: list[tuple[int, int, int]], head: list[int] | None = None, **features: Any) -> Words:
    """Words from (document, start, end)."""
    columns = ints(rows).reshape(-1, 3).T
    return Words(*columns, None if head is None else ints(head), {k: np.array(v) for k, v in features.items()})


def make_pieces(*sequences: list[tuple[int, int, int, int] | None]) -> Pieces:
    """Pieces from (document, sentence, start, end); None is a special token."""
    rows = [row or (-1, -1, -1, -1) for sequence in sequences for row in sequence]
    return Pieces(ints(np.cumsum([0, *map(len, sequences)])), *ints(rows).reshape(-1, 4).T)


# by hand


def test_a_piece_belongs_to_the_first_word_that_shares_most_characters() -> None:
    #        01234567890123456789
    text = " the don't  ab x"
    words = make_words([(0, 1, 4), (0, 5, 7), (0, 7, 10), (0, 12, 13), (0, 13, 14), (0, 15, 16)])
    spans = [
        ((0, 4), 0),  # includes the space before it, as in byte-level vocabularies
        ((4, 8), 1),  # " don": two letters of `do`, one of `n't`
        ((8, 10), 2),
        ((4, 10), 2),  # " don't": three letters of `n't`, two of `do`
        ((12, 14), 3),  # one letter of each
        ((10, 12), 3),  # white space before a word
        ((10, 11), -1),  # white space before white space
        ((14, 15), 5),
        ((15, 15), 5),  # a bare word-start mark
        ((16, 16), -1),
    ]
    assert text[15] == "x"
    pieces = make_pieces([(0, 0, *span) for span, _ in spans])
    assert assign(pieces, words).tolist() == [word for _, word in spans]


def test_pieces_and_words_of_different_documents_are_never_aligned() -> None:
    words = make_words([(3, 0, 2), (3, 5, 6), (7, 0, 2)])
    pieces = make_pieces([None, (3, 0, 0, 2), (5, 0, 0, 2), (7, 0, 0, 2), (7, 0, 5, 6), None])
    assert assign(pieces, words).tolist() == [-1, 0, -1, 2, -1, -1]


def test_a_bare_word_start_mark_belongs_to_the_sentence_of_its_word() -> None:
    words = make_words([(0, 0, 2), (0, 3, 5)])
    found = role_columns(make_pieces([None, (0, 0, 0, 2), (0, 0, 2, 3), (0, 1, 3, 5), None]), words)
    assert found.columns["word"].tolist() == [-1, 0, 1, 1, -1]
    assert found.columns["segment"].tolist() == [0, 0, 1, 1, 1]


def test_words_that_share_a_span_are_represented_by_the_first() -> None:
    # Vuelve del mar: the words de and el share the span of `del`
    words = make_words([(0, 0, 6), (0, 7, 10), (0, 7, 10), (0, 11, 14)], head=[0, 3, 3, 2])
    found = role_columns(make_pieces([None, (0, 0, 0, 6), (0, 0, 7, 10), (0, 0, 11, 14), None]), words)
    assert found.columns["word"].tolist() == [-1, 0, 1, 2, -1]
    assert found.columns["head"].tolist() == [-1, 0, 2, 1, -1]
    assert found.counts == {"words": 3, "lone_tokens": 0, "silent_words": 0, "arcs": 3, "cut_arcs": 0}


def test_arcs_out_of_a_sequence_are_dropped_and_counted() -> None:
    words = make_words([(0, 0, 2), (0, 3, 5), (0, 6, 8)], head=[2, 0, 2])
    found = role_columns(make_pieces([(0, 0, 0, 2), (0, 0, 3, 5)], [(0, 0, 6, 7)], [(0, 0, 7, 8), None]), words)
    assert found.columns["word"].tolist() == [0, 1, 0, 0, -1]
    assert found.columns["head"].tolist() == [-1, 0, 0, 0, -1]
    assert (found.counts["words"], found.counts["arcs"], found.counts["cut_arcs"]) == (4, 4, 1)


def test_a_word_without_pieces_is_counted_and_does_not_shift_others() -> None:
    # the tokenizer drops the second word; the fourth lies beyond the sequence
    words = make_words([(0, 0, 2), (0, 3, 4), (0, 5, 7), (0, 8, 9)], head=[0, 0, 1, 0])
    found = role_columns(make_pieces([None, (0, 0, 0, 2), (0, 0, 5, 7), None]), words)
    assert found.columns["word"].tolist() == [-1, 0, 1, -1]
    assert found.columns["head"].tolist() == [-1, 0, -1, -1]
    assert (found.counts["silent_words"], found.counts["cut_arcs"]) == (1, 1)


def test_empty_words_and_pieces_are_accepted() -> None:
    no_words = make_words([], head=[], idf=np.zeros(0, np.float32))
    found = role_columns(make_pieces([None, (0, 0, 0, 2), None], [None]), no_words)
    assert found.columns["word"].tolist() == found.columns["head"].tolist() == [-1, -1, -1, -1]
    assert found.columns["idf"].tolist() == [0, 0, 0, 0]
    assert found.counts["lone_tokens"] == 1
    empty = role_columns(make_pieces([]), make_words([(0, 0, 1)]))
    assert {len(column) for column in empty.columns.values()} == {0}


def test_segments_are_numbered_within_a_sequence_and_special_tokens_join_the_sentence_before() -> None:
    a, b, c = (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)
    pieces = make_pieces([None, a, a, None, b, b, None], [None, b, c, None], [None, None], [], [c])
    assert segment_numbers(pieces).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0]


def test_treebank_and_spacy_labels_give_the_same_relations() -> None:
    pairs = [
        ("nsubj", "nsubj", "dog"),
        ("obj", "dobj", "cat"),
        ("iobj", "dative", "him"),
        ("nsubj:pass", "nsubjpass", "mouse"),
        ("aux:pass", "auxpass", "be"),
        ("advmod", "advmod", "often"),
        ("advmod", "neg", "not"),
        ("advmod", "neg", "n't"),
        ("advmod", "neg", "Never"),
        ("amod", "amod", "not"),
        ("ROOT", "root", "run"),
        ("acl:relcl", "relcl", "be"),
    ]
    lemmas = [lemma for *_, lemma in pairs]
    ours, theirs = (relations([pair[side] for pair in pairs], lemmas) for side in (0, 1))
    assert [RELATIONS[n] for n in ours[0]] == [RELATIONS[n] for n in theirs[0]]
    assert (
        ours[1].tolist()
        == theirs[1].tolist()
        == [lemma in ("not", "n't", "Never") for lemma in lemmas[:9]] + [*(False, False, False)]
    )
    assert RELATIONS[ours[0][6]] == "advmod:neg" != RELATIONS[ours[0][5]]
    assert relations(["nonsense"], [""])[0].tolist() == [-1]
    assert parts_of_speech(["NOUN", "", "noun"]).tolist() == [UPOS.index("NOUN"), -1, -1]


def test_the_idf_of_words_split_by_parsers() -> None:
    table = Rarity([("the", 1.0), ("mother", 3.0), ("law", 4.0), ("in", 2.0), ("don", 2.5), ("42", 6.0), ("x1", 5.0)])
    found = {form: table[form] for form in ("the", "42", "a", "x1", "mother-in-law", "don't", "n't", "...", "unseen")}
    assert found == {
        "the": 1.0,
        "42": 0.0,
        "a": 0.0,
        "x1": 5.0,
        "mother-in-law": 4.0,
        "don't": 2.5,
        "n't": 0.0,
        "...": 0.0,
        "unseen": 6.0,
    }
    assert "unseen" not in table
    assert Rarity([])["word"] == 0


# against loops


def plain_join(pieces: Pieces, words: Words) -> dict[str, list[Any]]:
    """The definition with plain loops, one piece at a time, without binary search."""
    size = len(words.start)
    rows = list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True))
    spans = list(zip(words.document.tolist(), words.start.tolist(), words.end.tolist(), strict=True))

    def word_of(document: int, start: int, end: int) -> int:
        if document < 0:
            return -1
        shared = [min(end, e) - max(start, s) if d == document else 0 for d, s, e in spans]
        best = max(shared, default=0)
        if best > 0:
            return shared.index(best)
        return next((n for n, (d, s, _) in enumerate(spans) if d == document and s == end), -1)

    belongs = [word_of(*row) for row in rows]
    owner = list(range(size))
    for number, (document, start, end) in enumerate(spans):
        if number not in belongs:
            owner[number] = next(
                (belongs[n] for n, (d, s, e) in enumerate(rows) if d == document and s < end and e > start), -1
            )
    found: dict[str, list[Any]] = {"word": [], "head": [], "idf": []}
    for first, last in zip(pieces.bounds[:-1].tolist(), pieces.bounds[1:].tolist(), strict=True):
        present = sorted({word for word in belongs[first:last] if word >= 0})
        number = {word: place for place, word in enumerate(present)}
        assert words.head is not None
        for word in belongs[first:last]:
            head = int(words.head[word]) if word >= 0 else -1
            found["word"].append(number.get(word, -1))
            found["head"].append(number.get(owner[head], -1) if head >= 0 else -1)
            found["idf"].append(float(words.features["idf"][word]) if word >= 0 else 0.0)
    return found


@st.composite
def joins(draw: st.DrawFn) -> tuple[Pieces, Words]:
    rows: list[tuple[int, int, int]] = []
    pieces: list[tuple[int, int, int, int] | None] = []
    for document in draw(st.lists(st.integers(0, 5), max_size=3, unique=True).map(sorted)):
        length = draw(st.integers(1, 24))
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=10)))
        for start, end in itertools.pairwise(cuts):
            rows += [(document, start, end)] * draw(st.sampled_from([0, 1, 1, 1, 2]))
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=14)))
        for start, end in itertools.pairwise(cuts):
            pieces += [(document, 0, start, end)] * draw(st.sampled_from([0, 1, 1, 1, 2]))
    pieces = [None if draw(st.integers(0, 9)) == 0 else piece for piece in pieces]
    cuts = sorted(draw(st.lists(st.integers(0, len(pieces)), max_size=3)))
    parts = [pieces[a:b] for a, b in zip([0, *cuts], [*cuts, len(pieces)], strict=True)]
    heads = [draw(st.integers(-1, len(rows) - 1)) for _ in rows]
    rarity = np.arange(1, len(rows) + 1, dtype=np.float32)
    return make_pieces(*parts), make_words(rows, heads, idf=rarity)


@settings(max_examples=400, deadline=None)
@given(joins())
def test_role_columns_match_plain_loops(case: tuple[Pieces, Words]) -> None:
    pieces, words = case
    found, expected = role_columns(pieces, words), plain_join(pieces, words)
    for name, values in expected.items():
        assert found.columns[name].tolist() == values, name
        assert found.columns[name].dtype == COLUMNS[name]


@settings(max_examples=100, deadline=None)
@given(joins())
def test_sequences_do_not_affect_each_other(case: tuple[Pieces, Words]) -> None:
    pieces, words = case
    together = role_columns(pieces, words)
    alone = []
    for first, last in zip(pieces.bounds[:-1], pieces.bounds[1:], strict=True):
        part = Pieces(ints([0, last - first]), *(column[first:last] for column in pieces[1:]))
        alone.append(role_columns(part, words))
    for name in ("word", "segment", "idf"):
        assert together.columns[name].tolist() == [v for part in alone for v in part.columns[name].tolist()]
    assert together.counts["words"] == sum(part.counts["words"] for part in alone)


# the law: the mask of two pieces is the mask of their words


@st.composite
def sentences(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[float], list[int]]:
    """Length, head, relation and idf of each word, and the lengths of all pieces."""
    size = draw(st.integers(1, 9))
    lengths = [draw(st.integers(1, 5)) for _ in range(size)]
    heads = [draw(st.integers(-1, size - 1)) for _ in range(size)]
    labels = [draw(st.sampled_from(["nsubj", "obj", "amod", "advmod", "det", "root"])) for _ in range(size)]
    rarity = [draw(st.sampled_from([0.0, 1.0, 2.0, 3.5])) for _ in range(size)]
    pieces = []
    for length in lengths:
        while length:
            pieces.append(draw(st.integers(1, length)))
            length -= pieces[-1]
    return lengths, heads, [RELATIONS.index(label) for label in labels], rarity, pieces


def tokens_of(lengths: list[int], words: Words, sentence_of: list[int]) -> tuple[Tokens, list[int]]:
    """A batch of one sequence between two delimiters, and the word of each token."""
    ends = np.cumsum(lengths).tolist()
    rows = [(0, sentence, end - length, end) for length, end, sentence in zip(lengths, ends, sentence_of, strict=True)]
    columns = {
        n: torch.from_numpy(c)[None] for n, c in role_columns(make_pieces([None, *rows, None]), words).columns.items()
    }
    ids = torch.arange(len(rows) + 2)[None]
    delimiter = torch.zeros_like(ids, dtype=torch.bool)
    delimiter[0, 0] = delimiter[0, -1] = True
    tokens = Tokens(ids, torch.ones_like(ids, dtype=torch.bool), columns | {"delimiter": delimiter})
    return tokens, columns["word"][0].tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        "dependency",
        "major_relation",
        {"name": "major_relation", "square": True},
        {"name": "window", "words": True},
        {"name": "window", "words": True, "size": 5},
        "rare",
        {"name": "rare", "fraction": 0.5, "least": 1},
    ],
    ids=str,
)
@settings(max_examples=60, deadline=None)
@given(case=sentences(), cut=st.integers(0, 9))
def test_masks_of_pieces_equal_the_masks_of_their_words(pattern: Any, case: Any, cut: int) -> None:
    lengths, heads, labels, rarity, piece_lengths = case
    ends = np.cumsum(lengths).tolist()
    rows = [(0, end - length, end) for length, end in zip(lengths, ends, strict=True)]
    words = make_words(rows, heads, relation=np.array(labels, np.int8), idf=np.array(rarity, np.float32))
    whole, _ = tokens_of(lengths, words, [int(n >= cut) for n in range(len(lengths))])
    bounds = np.cumsum(piece_lengths)
    sentence_of = [int(np.searchsorted(ends, end) >= cut) for end in bounds]
    cut_up, word_of = tokens_of(piece_lengths, words, sentence_of)
    keep_w = read_pattern(pattern).build(whole).dense()[0]
    keep_t = read_pattern(pattern).build(cut_up).dense()[0]
    # the special tokens at both ends map to themselves; word w is token w + 1 of `whole`
    place = torch.tensor([0, *(word + 1 for word in word_of[1:-1]), len(lengths) + 1])
    expected = keep_w[place][:, place]
    assert torch.equal(keep_t, expected)


def test_words_of_a_sentence_that_a_sequence_leaves_out_are_not_silent() -> None:
    words = make_words([(0, 0, 3), (0, 4, 7), (0, 8, 11)])
    pieces = make_pieces([(0, 0, 0, 3), (0, 2, 8, 11)])  # sentence 1 belongs to another split
    assert role_columns(pieces, words).counts["silent_words"] == 0
    pieces = make_pieces([(0, 0, 0, 3), (0, 0, 8, 11)])
    assert role_columns(pieces, words).counts["silent_words"] == 1
