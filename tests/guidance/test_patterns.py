"""The contract of every pattern and of combinations, and their keys on sentences worked by hand."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from guidance.errors import InputError, PlanError, UnknownName
from guidance.guide import Guide
from guidance.mechanisms import MECHANISMS
from guidance.patterns.catalogue import (
    PATTERNS,
    Columns,
    Conflict,
    Pairs,
    Pattern,
    Predicate,
    Weights,
)
from guidance.patterns.combinations import read_pattern
from guidance.patterns.features import (
    FEATURES,
    RELATIONS,
    TABLES,
    UPOS,
    IdsNotKnown,
    Tokens,
    TokensWithoutIds,
    relation_id,
)
from tests.guidance import pattern_oracle as oracle
from tests.guidance.pattern_oracle import EXAMPLES, SPECS, Example, padded, sentence

every_pattern = pytest.mark.parametrize("spec", [*PATTERNS, *SPECS], ids=lambda spec: str(spec))
BATCH = oracle.tokens(*EXAMPLES)
B, T = BATCH.ids_BT.shape
NEAR_QK = (torch.arange(T)[:, None] - torch.arange(T)[None]).abs() <= 1


def build(spec: Any, batch: Tokens = BATCH) -> Predicate:
    return read_pattern(spec).build(batch)


@every_pattern
def test_the_closed_form_agrees_with_the_matrix(spec: Any) -> None:
    """For scattered (example, query, key) and for a block."""
    generator = torch.Generator().manual_seed(1)
    b, q, k = (torch.randint(0, size, (200,), generator=generator) for size in (B, T, T))
    for predicate in forms(spec):
        dense = predicate.dense()
        assert torch.equal(predicate.value_at(b, q, k), dense[b, q, k])
        block = predicate.value_at(torch.tensor(1), torch.arange(3, 7)[:, None], torch.arange(5))
        assert torch.equal(block.expand(4, 5), dense[1, 3:7, :5])
        assert torch.equal(predicate.written().dense(), dense)


def forms(spec: Any, batch: Tokens = BATCH) -> list[Predicate]:
    """A predicate as its pattern builds it, as a matrix, and restricted to a window."""
    predicate = build(spec, batch)
    dense = predicate.dense()
    written = (Pairs if dense.dtype == torch.bool else Weights)(dense, batch.valid_BT)
    return [predicate, written, predicate.restricted(NEAR_QK.expand(B, T, T))]


# the contract


@every_pattern
def test_the_matrix_of_a_pattern_equals_the_oracle(spec: Any) -> None:
    assert torch.equal(build(spec).dense().double(), oracle.dense(spec, *EXAMPLES))


@every_pattern
def test_padding_is_neither_query_nor_key(spec: Any) -> None:
    for predicate in forms(spec):
        dense = predicate.dense()
        assert not dense[~BATCH.valid_BT].any()
        assert not dense.transpose(1, 2)[~BATCH.valid_BT].any()


@every_pattern
def test_results_have_the_documented_shapes_and_types(spec: Any) -> None:
    is_weighted = read_pattern(spec).weighted
    for predicate in forms(spec):
        dense, attention = predicate.dense(), torch.rand(B, 3, T, T)
        assert dense.dtype == (torch.float32 if is_weighted else torch.bool) and dense.shape == (B, T, T)
        for per_row in (predicate.counts(), predicate.squares()):
            assert per_row.dtype == torch.float32 and per_row.shape == (B, T)
        assert predicate.mass(attention).dtype == torch.float32 and predicate.mass(attention).shape == (B, 3, T)
        rows = predicate.rows(torch.zeros(B, 2, dtype=torch.long))
        assert rows.dtype == torch.float32 and rows.shape == (B, 2, T)
        assert torch.equal(predicate.rows_BQ, BATCH.valid_BT)


@every_pattern
def test_counts_squares_mass_and_its_gradient_agree_with_the_matrix(spec: Any) -> None:
    for predicate in forms(spec):
        dense = predicate.dense().double()
        assert torch.equal(predicate.counts().double(), dense.sum(-1))
        torch.testing.assert_close(predicate.squares().double(), dense.square().sum(-1))
        attention = torch.rand(B, 3, T, T, dtype=torch.float64, requires_grad=True)
        mass = predicate.mass(attention)
        torch.testing.assert_close(mass, (attention * dense[:, None]).sum(-1))
        grad_mass = torch.rand_like(mass)
        (expected,) = torch.autograd.grad((attention * dense[:, None]).sum(-1), attention, grad_mass)
        start = torch.rand(B, 3, T, T, dtype=torch.float64)
        added = start.clone()
        predicate.add_mass_gradient(added, grad_mass)
        torch.testing.assert_close(added - start, expected)


@every_pattern
def test_the_gradient_can_be_added_to_some_heads_of_a_larger_tensor(spec: Any) -> None:
    predicate = build(spec)
    whole = torch.zeros(B, 5, T, T)
    predicate.add_mass_gradient(whole[:, 1:3], torch.ones(B, 2, T))
    assert torch.equal(whole[:, 1:3], predicate.dense()[:, None].float().expand(B, 2, T, T))
    assert not whole[:, [0, 3, 4]].any()


@every_pattern
def test_single_rows_agree_with_the_matrix(spec: Any) -> None:
    rows_BR = torch.randint(0, T, (B, 5), generator=torch.Generator().manual_seed(0))
    for predicate in forms(spec):
        expected = torch.stack([predicate.dense()[b, rows_BR[b]] for b in range(B)]).float()
        assert torch.equal(predicate.rows(rows_BR), expected)
        assert predicate.rows(rows_BR[:, :0]).shape == (B, 0, T)


@every_pattern
def test_a_restricted_predicate_names_only_allowed_keys(spec: Any) -> None:
    whole, _, near = forms(spec)
    assert torch.equal(near.dense(), whole.dense() * NEAR_QK)
    causal_QK = torch.ones(T, T, dtype=torch.bool).tril()
    assert torch.equal(near.restricted(causal_QK.expand(B, T, T)).dense(), whole.dense() * NEAR_QK * causal_QK)


@every_pattern
@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 2])
def test_a_sentence_gives_the_same_alone_and_with_padding(spec: Any, left: int, right: int) -> None:
    for seed in range(20, 25):
        example = sentence(seed, 9)
        alone = build(spec, oracle.tokens(example)).dense()[0]
        neighbour = sentence(seed + 50, left + 9 + right)
        inside = build(spec, oracle.tokens(padded(example, left, right, seed), neighbour)).dense()[0]
        assert torch.equal(inside[left : left + 9, left : left + 9], alone)
        assert inside.sum() == alone.sum()


@pytest.mark.one_in(6)
@every_pattern
def test_looks_ahead_says_whether_later_tokens_can_change_earlier_keys(spec: Any) -> None:
    """It is also True for patterns that read trees or a given matrix, which may depend on the whole sentence."""
    differs, pattern = False, read_pattern(spec)
    for seed in range(60):
        first, other = sentence(seed, 12), sentence(seed + 1000, 12)
        if seed % 2:
            other.columns.update(word=[-1] * 12, delimiter=[False] * 12)
        for cut in (3, 6, 9):
            columns = {name: first.columns[name][:cut] + other.columns[name][cut:] for name in first.columns}
            spliced = Example(first.ids[:cut] + other.ids[cut:], [True] * 12, columns)
            before, after = (build(spec, oracle.tokens(example)).dense()[0, :cut, :cut] for example in (first, spliced))
            differs |= not torch.equal(before, after)
    assert (differs or bool({"head", "matrix", "weight_matrix"} & {*pattern.needs})) == pattern.looks_ahead


@every_pattern
def test_a_single_token_points_at_itself_or_nowhere(spec: Any) -> None:
    for seed in range(5):
        example = sentence(seed, 1)
        predicate = build(spec, oracle.tokens(example))
        assert torch.equal(predicate.dense().double(), oracle.dense(spec, example))
        assert predicate.mass(torch.ones(1, 2, 1, 1)).shape == (1, 2, 1)


@pytest.mark.one_in(16)
@every_pattern
def test_sequences_of_512_tokens_work(spec: Any) -> None:
    predicate = build(spec, oracle.tokens(padded(sentence(9, 500), 0, 12)))
    dense = predicate.dense().double()
    torch.testing.assert_close(predicate.counts().double(), dense.sum(-1))
    assert dense.shape == (1, 512, 512) and not dense[:, 500:].any() and not dense[:, :, 500:].any()
    named = dense.bool() if not read_pattern(spec).weighted else dense
    for query in (0, 1, 250, 499):
        expected = oracle.keys(spec, padded(sentence(9, 500), 0, 12), query)
        assert {k: named[0, query, k].item() for k in named[0, query].nonzero().flatten().tolist()} == {
            k: weight for k, weight in expected.items() if weight
        }


@every_pattern
def test_a_pattern_does_not_modify_its_inputs(spec: Any) -> None:
    batch = copy.deepcopy(BATCH)
    attention = torch.rand(B, 2, T, T)
    original = attention.clone()
    for predicate in forms(spec, batch):
        predicate.dense().fill_(1)
        predicate.counts().fill_(7)
        predicate.squares().fill_(7)
        predicate.mass(attention).fill_(7)
        predicate.rows(torch.zeros(B, 1, dtype=torch.long)).fill_(7)
    assert torch.equal(attention, original)
    assert torch.equal(batch.ids_BT, BATCH.ids_BT) and torch.equal(batch.valid_BT, BATCH.valid_BT)
    for name, column in batch.columns.items():
        assert torch.equal(column.nan_to_num(), BATCH.columns[name].nan_to_num()), name
    assert torch.equal(batch.tables["cooccurrence"].scores_NN, BATCH.tables["cooccurrence"].scores_NN)


@every_pattern
def test_a_pattern_reads_exactly_the_features_that_it_declares(spec: Any) -> None:
    pattern = read_pattern(spec)
    # if they are given, `rare` reads segments, `marked` what was written, and `shuffled` the text
    if_given = {"segment", "written", *(["original"] if "shuffled" in spec else [])}
    needed = {name: BATCH.columns[name] for name in {*pattern.needs, *if_given}}
    bare = Tokens(BATCH.ids_BT, BATCH.valid_BT, needed, {name: BATCH.tables[name] for name in pattern.tables})
    assert torch.equal(pattern.build(bare).dense(), pattern.build(BATCH).dense())
    for need in pattern.needs:
        without = Tokens(BATCH.ids_BT, BATCH.valid_BT, {n: c for n, c in needed.items() if n != need}, BATCH.tables)
        with pytest.raises(InputError, match=f"no feature '{need}'") as raised:
            pattern.build(without)
        assert raised.value.hint == FEATURES[need].source
    for table in pattern.tables:
        with pytest.raises(InputError, match=f"no table '{table}'") as raised:
            pattern.build(Tokens(BATCH.ids_BT, BATCH.valid_BT, BATCH.columns))
        assert raised.value.hint == TABLES[table]


# patterns with the same keys for every query, which also serve queries of another sequence


@every_pattern
def test_patterns_with_the_same_keys_for_every_query_can_be_used_across_sequences(spec: Any) -> None:
    pattern, predicate = read_pattern(spec), build(spec)
    queries_BQ = torch.arange(5) < torch.arange(B)[:, None]
    assert pattern.same_keys == isinstance(predicate, Columns)
    if not pattern.same_keys:
        with pytest.raises(PlanError, match="relates tokens of one sequence; cross-attention has two"):
            predicate.for_queries(queries_BQ)
        return
    across = predicate.for_queries(queries_BQ)
    allowed_BQK = torch.rand(B, 5, T, generator=torch.Generator().manual_seed(1)) < 0.6
    for form, seen in ((across, torch.ones(B, 5, T)), (across.restricted(allowed_BQK), allowed_BQK)):
        # a key is named by all valid queries or by none
        expected = predicate.dense().any(1)[:, None].double() * queries_BQ[:, :, None] * seen
        dense = form.dense().double()
        assert torch.equal(dense, expected)
        assert torch.equal(form.rows_BQ, queries_BQ) and torch.equal(form.valid_BT, BATCH.valid_BT)
        assert torch.equal(form.counts().double(), dense.sum(-1))
        assert torch.equal(form.squares().double(), dense.sum(-1))
        attention, grad_mass = torch.rand(B, 2, 5, T).double(), torch.rand(B, 2, 5).double()
        torch.testing.assert_close(form.mass(attention), (attention * dense[:, None]).sum(-1))
        added = attention.clone()
        form.add_mass_gradient(added, grad_mass)
        torch.testing.assert_close(added - attention, grad_mass[..., None] * dense[:, None])
        assert torch.equal(form.rows(torch.tensor([[4, 0]] * B)).double(), dense[:, [4, 0]])


def test_rows_of_conflict_are_computed_without_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build("conflict")
    dense = whole.dense()

    def forbidden(self: Conflict) -> Tensor:
        raise AssertionError("the matrix was written out")

    monkeypatch.setattr(Conflict, "dense", forbidden)
    rows_BR = torch.tensor([[2, 7, 0]] * B)
    assert torch.equal(whole.rows(rows_BR), dense[:, [2, 7, 0]])
    near = whole.restricted(NEAR_QK.expand(B, T, T)).restricted(torch.ones(B, T, T, dtype=torch.bool).tril())
    assert torch.equal(near.rows(rows_BR), (dense * NEAR_QK.tril())[:, [2, 7, 0]])


def test_a_table_in_half_precision_gives_single_precision_weights() -> None:
    table = BATCH.tables["cooccurrence"]
    halved = type(table)(table.rows_V, table.scores_NN.half())
    batch = Tokens(BATCH.ids_BT, BATCH.valid_BT, BATCH.columns, {"cooccurrence": halved})
    assert torch.equal(build("conflict", batch).dense(), build("conflict").dense())


def test_a_key_column_with_holes_counts_only_valid_keys() -> None:
    valid = torch.tensor([[True, False, True]])
    predicate = Columns(torch.tensor([[True, True, False]]), valid)
    assert predicate.counts().tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("part", ["previous", "same_segment", "marked"])
def test_shuffled_keys_are_as_many_and_differ_between_texts_but_not_between_their_maskings(part: str) -> None:
    ids, valid = torch.arange(2, 26).view(2, 12), torch.ones(2, 12, dtype=torch.bool)
    segment = torch.arange(12).expand(2, -1) // 5
    columns = {"segment": segment, "marked": segment == 1}
    plain = build(part, Tokens(ids, valid, columns)).dense()
    found = build({"shuffled": part}, Tokens(ids, valid, columns)).dense()
    assert torch.equal(found.sum(-1), plain.sum(-1))
    assert not torch.equal(found, plain) and not torch.equal(found[0], found[1])
    for number in range(2):
        masked = ids.masked_fill(torch.rand(2, 12, generator=torch.Generator().manual_seed(number)) < 0.3, 30)
        known = Tokens(masked, valid, {**columns, "original": ids})
        assert torch.equal(build({"shuffled": part}, known).dense(), found)
        unknown = Tokens(masked, valid, columns)
        assert not torch.equal(build({"shuffled": part}, unknown).dense(), found)


def test_shuffled_keys_are_those_of_the_example_without_its_padding() -> None:
    ids, columns = torch.tensor([[7, 8, 9, 10, 11]]), {"segment": torch.tensor([[0, 0, 0, 1, 1]])}
    alone = build({"shuffled": "same_segment"}, Tokens(ids, torch.ones(1, 5, dtype=torch.bool), columns)).dense()
    for left, right in ((0, 4), (4, 0), (2, 2)):
        filled = [torch.nn.functional.pad(x, (left, right), value=1) for x in (ids, columns["segment"])]
        valid = torch.nn.functional.pad(torch.ones(1, 5, dtype=torch.bool), (left, right))
        found = build({"shuffled": "same_segment"}, Tokens(filled[0], valid, {"segment": filled[1]})).dense()
        assert torch.equal(found, torch.nn.functional.pad(alone, (left, right, left, right)))


def test_shuffled_keys_of_embeddings_need_the_text() -> None:
    valid = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(IdsNotKnown):
        build({"shuffled": "next"}, TokensWithoutIds(torch.zeros(1, 4), valid, {}, {})).dense()
    original = torch.tensor([[5, 6, 7, 8]])
    known = TokensWithoutIds(torch.zeros(1, 4), valid, {"original": original}, {})
    found = build({"shuffled": "next"}, known).dense()
    assert torch.equal(found, build({"shuffled": "next"}, Tokens(original, valid)).dense())


def test_conditions_leave_out_mask_tokens() -> None:
    ids = torch.tensor([[5, 9, 5, 9, 6, 5]])
    idf, word = torch.tensor([[1.0, 4.0, 1.0, 3.0, 2.0, 1.0]]), torch.arange(6)[None]
    columns = {"mask_token": ids == 9, "idf": idf, "word": word}
    batch = Tokens(ids, torch.ones(1, 6, dtype=torch.bool), columns)
    same = {"name": "matching_token", "include_self": False, "unique": "none"}
    expected = [[0, 0, 1, 0, 0, 1], [0] * 6, [1, 0, 0, 0, 0, 1], [0] * 6, [0] * 6, [1, 0, 1, 0, 0, 0]]
    assert build(same, batch).dense()[0, 1].tolist() == [False, False, False, True, False, False]
    for spec in (
        {"and": [same, {"where": "not key.mask_token"}]},
        {"where": "matching_token and not self and not key.mask_token"},
    ):
        assert build(spec, batch).dense()[0].int().tolist() == expected
    # the two rarest words are both masked
    assert build("rare", batch).dense()[0, 0].nonzero().flatten().tolist() == [1, 3]
    three = {"name": "rare", "least": 3}
    for spec in ({"and": [three, {"where": "not key.mask_token"}]}, {"and": ["rare", {"where": "not key.mask_token"}]}):
        found = build(spec, batch)
        assert isinstance(found, Columns)
        assert found.dense()[0, 0].nonzero().flatten().tolist() == ([4] if spec["and"][0] == three else [])


def test_what_followed_other_places_of_a_token_by_hand() -> None:
    """Of a b a a c a, with padding that holds a too."""
    tokens = Tokens(torch.tensor([[5, 6, 5, 5, 7, 5, 5]]), torch.tensor([[True] * 6 + [False]]))
    for earlier, expected in (
        (False, ["0001100", "0000000", "0100100", "0101000", "0000000", "0101100", "0000000"]),
        (True, ["0000000", "0000000", "0100000", "0101000", "0000000", "0101100", "0000000"]),
    ):
        found = build({"name": "induction", "earlier": earlier}, tokens).dense()[0]
        assert ["".join(str(int(x)) for x in row) for row in found] == expected
    assert not read_pattern("induction").looks_ahead, "an earlier key is named by the token before it, and by the query"


def test_a_token_that_occurs_once_matches_nothing_where_asked() -> None:
    ids = torch.tensor([[5, 6, 5, 7]])
    spec = {"name": "matching_token", "include_self": False, "unique": "none"}
    rows = build(spec, Tokens(ids, torch.ones(1, 4, dtype=torch.bool))).dense()[0].int().tolist()
    assert rows == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


# the table


RESERVED = {item.name for item in fields(Guide)} | {name for row in MECHANISMS.values() for name in row.option_names()}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_is_described(name: str) -> None:
    pattern = PATTERNS[name]
    assert pattern.name == str(pattern) == name
    assert pattern.summary.endswith(".") and pattern.source
    assert set(pattern.needs) <= FEATURES.keys()
    assert set(pattern.tables) <= TABLES.keys()
    assert not set(pattern.option_names) & RESERVED, "the row of a plan already has this key"
    assert PATTERNS.find(name) is pattern and read_pattern(name) == pattern


def test_every_option_of_every_pattern_is_compared_with_the_oracle() -> None:
    tried = {(spec["name"], option) for spec in SPECS if "name" in spec for option in spec if option != "name"}
    assert tried == {(name, option) for name, pattern in PATTERNS.items() for option in pattern.option_names}


# sentences by hand


def parsed(*rows: tuple[str, int, str, float], pieces: dict[int, int] | None = None) -> Tokens:
    """[CLS] words [SEP], from each word's text, head number, relation and idf.

    ``pieces`` gives the number of tokens of a word, by default one.
    """
    words = [n for n in range(len(rows)) for _ in range((pieces or {}).get(n, 1))]
    size = len(words) + 2

    def column(of_words: list[Any], at_delimiters: Any) -> Tensor:
        return torch.tensor([[at_delimiters, *(of_words[n] for n in words), at_delimiters]])

    return Tokens(
        torch.arange(size)[None],
        torch.ones(1, size, dtype=torch.bool),
        {
            "word": column(list(range(len(rows))), -1),
            "head": column([head for _, head, _, _ in rows], -1),
            "relation": column([relation_id(label) for _, _, label, _ in rows], -1),
            "idf": column([idf for *_, idf in rows], 0.0),
            "character": column([ord(text) if len(text) == 1 else 0 for text, *_ in rows], 0),
            "delimiter": torch.tensor([[position in (0, size - 1) for position in range(size)]]),
        },
    )


APPLE = (
    ("The", 2, "det", 1.0),
    ("old", 2, "amod", 2.0),
    ("man", 4, "nsubj", 2.0),
    ("quickly", 4, "advmod", 5.0),
    ("ate", 4, "root", 3.0),
    ("a", 7, "det", 0.0),
    ("red", 7, "amod", 4.0),
    ("apple", 4, "obj", 5.0),
    (".", 4, "punct", 0.0),
)
"""[CLS] is token 0, "The" token 1, "." token 9, [SEP] token 10."""

CAKE = (
    ("Cakes", 3, "nsubjpass", 3.0),
    ("were", 3, "auxpass", 1.0),
    ("n't", 3, "neg", 1.5),
    ("eaten", 3, "ROOT", 2.0),
    ("quickly", 3, "advmod", 5.0),
)
"""Labels of spaCy.  "Cakes" is two tokens, 1 and 2; "quickly" is token 6, [SEP] token 7."""


def seen(spec: Any, batch: Tokens) -> dict[int, list[int]]:
    dense = build(spec, batch).dense()[0]
    return {query: row.nonzero().flatten().tolist() for query, row in enumerate(dense)}


def test_dependencies_of_a_sentence() -> None:
    assert seen("dependency", parsed(*APPLE)) == {
        0: [0],
        1: [1, 3],
        2: [2, 3],
        3: [1, 2, 3, 5],
        4: [4, 5],
        5: [3, 4, 5, 8, 9],
        6: [6, 8],
        7: [7, 8],
        8: [5, 6, 7, 8],
        9: [5, 9],
        10: [10],
    }


def test_the_pieces_of_a_word_share_its_dependencies_and_see_each_other() -> None:
    rows = seen("dependency", parsed(*CAKE, pieces={0: 2}))
    assert rows[1] == rows[2] == [1, 2, 5]
    assert rows[5] == [1, 2, 3, 4, 5, 6]
    assert rows[3] == [3, 5] and rows[0] == [0] and rows[7] == [7]


def test_major_relations_include_heads_and_all_children_but_not_the_full_stop() -> None:
    rows = seen("major_relation", parsed(*APPLE))
    assert all(row == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10] for row in rows.values())
    objects = seen({"name": "major_relation", "relations": ["obj"]}, parsed(*APPLE))
    assert all(row == [0, 5, 6, 7, 8, 10] for row in objects.values())
    # spaCy's label maps to the same relation
    assert seen({"name": "major_relation", "relations": ["dobj"]}, parsed(*APPLE)) == objects
    square = seen({"name": "major_relation", "relations": ["obj"], "square": True}, parsed(*APPLE))
    assert square == {query: objects[query] if query in objects[0] else [] for query in range(11)}


def test_passive_subjects_and_negations_are_not_major_relations() -> None:
    rows = seen("major_relation", parsed(*CAKE, pieces={0: 2}))
    # "quickly" and its head "eaten" only
    assert rows[0] == [0, 5, 6, 7]
    passive = seen({"name": "major_relation", "relations": ["nsubj:pass"]}, parsed(*CAKE, pieces={0: 2}))
    assert passive[4] == [0, 1, 2, 5, 7]


def test_rare_words_have_the_highest_idf_and_ties_go_to_the_later_word() -> None:
    batch = parsed(*APPLE)
    assert seen("rare", batch)[6] == [4, 8]
    assert seen({"name": "rare", "least": 1}, batch)[0] == [8]
    assert seen({"name": "rare", "fraction": 0.45}, batch)[0] == [4, 5, 7, 8]
    # two candidates too few, since "a" and "." have no idf: the first token fills up
    assert seen({"name": "rare", "fraction": 1.0}, batch)[0] == [0, 1, 2, 3, 4, 5, 7, 8]
    pieces = parsed(*CAKE, pieces={0: 2})
    assert seen("rare", pieces)[0] == [1, 2, 6]


def test_rare_words_are_chosen_in_each_segment() -> None:
    batch = parsed(*APPLE)
    segment = torch.tensor([[-1, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]])
    both = Tokens(batch.ids_BT, batch.valid_BT, {**batch.columns, "segment": segment})
    # "man" has the idf of "old" and comes later
    assert seen("rare", both)[0] == [3, 4, 7, 8]
    # words of no segment are not ranked
    outside = Tokens(both.ids_BT, both.valid_BT, {**both.columns, "segment": segment.where(segment == 1, -1)})
    assert seen("rare", outside)[0] == [7, 8]


def test_a_window_of_words_counts_words_and_not_pieces() -> None:
    rows = seen({"name": "window", "words": True}, parsed(*CAKE, pieces={0: 2}))
    assert rows == {0: [0, 1, 2], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]} | {
        3: [1, 2, 3, 4],
        4: [3, 4, 5],
        5: [4, 5, 6],
        6: [5, 6, 7],
        7: [6, 7],
    }


def test_a_single_delimiter_counts_as_the_word_before_or_after_the_others() -> None:
    batch = parsed(*CAKE[:3])
    for position, expected in ((0, {0: [0, 1], 3: [2, 3], 4: [4]}), (4, {0: [0], 1: [1, 2], 4: [3, 4]})):
        delimiter = torch.arange(5)[None] == position
        only = Tokens(batch.ids_BT, batch.valid_BT, {**batch.columns, "delimiter": delimiter})
        rows = seen({"name": "window", "words": True}, only)
        assert {query: rows[query] for query in expected} == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("next", ["0100", "0010", "0000", "0000"]),
        ("previous", ["0000", "1000", "0100", "0000"]),
        ("self", ["1000", "0100", "0010", "0000"]),
        ("first", ["1000", "1000", "1000", "0000"]),
        ("sink", ["1110", "1110", "1110", "0000"]),
        ({"name": "sink", "size": 2}, ["1100", "1100", "1100", "0000"]),
        ("all", ["1110", "1110", "1110", "0000"]),
        ("none", ["0000", "0000", "0000", "0000"]),
        ("window", ["1100", "1110", "0110", "0000"]),
        ("matching_token", ["1010", "1110", "1010", "0000"]),
        ({"name": "matching_token", "include_self": False}, ["0010", "1110", "1000", "0000"]),
        ({"name": "matching_token", "unique": "self"}, ["1010", "0100", "1010", "0000"]),
        ("induction", ["0000", "0000", "0100", "0000"]),
        ("same_segment", ["1100", "1100", "0010", "0000"]),
        ({"name": "same_segment", "free_first": True}, ["1110", "1100", "0010", "0000"]),
        ({"or": ["next", "previous"]}, ["0100", "1010", "0100", "0000"]),
        ({"not": "same_segment"}, ["0010", "0010", "1100", "0000"]),
        ({"and": ["window", {"not": "self"}]}, ["0100", "1010", "0100", "0000"]),
    ],
    ids=str,
)
def test_three_tokens_and_one_padding_by_hand(spec: Any, expected: list[str]) -> None:
    valid = torch.tensor([[True, True, True, False]])
    batch = Tokens(torch.tensor([[5, 6, 5, 5]]), valid, {"segment": torch.tensor([[0, 0, 1, 0]])})
    assert ["".join(str(int(x)) for x in row) for row in build(spec, batch).dense()[0]] == expected


def test_weights_add_up_and_are_not_clipped() -> None:
    batch = Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    spec = {"sum": ["next", {"name": "first", "weight": 0.5}, {"or": ["self", "first"], "weight": 2}]}
    assert build(spec, batch).dense()[0].tolist() == [[2.5, 1, 0], [2.5, 2, 1], [2.5, 0, 2]]
    assert build(spec, batch).counts().tolist() == [[3.5, 5.5, 4.5]]
    assert build(spec, batch).squares().tolist() == [[7.25, 11.25, 10.25]]


def test_conflicts_by_hand() -> None:
    """Ids 2 to 5 are rows 0 to 3; 6 is not in the table; 0 and 1 are delimiters; row i, column j is (3i + 5j) % 9 / 8."""
    columns = {"delimiter": torch.tensor([[True, False, False, False, False, True]])}
    columns["original"] = torch.tensor([[0, 3, 3, 6, 4, 1]])
    table = {"cooccurrence": BATCH.tables["cooccurrence"]}
    batch = Tokens(torch.tensor([[0, 2, 3, 6, 5, 1]]), torch.ones(1, 6, dtype=torch.bool), columns, table)
    row_of_3, no_keys = [0, 3 / 8, 8 / 8, 0, 0 / 8, 0], [0.0] * 6
    assert build("conflict", batch).dense()[0].tolist() == [
        no_keys,
        [0, 0 / 8, 5 / 8, 0, 6 / 8, 0],
        row_of_3,
        no_keys,
        [0, 0 / 8, 5 / 8, 0, 6 / 8, 0],
        no_keys,
    ]
    # token 1 replaces id 3 of the text
    assert build({"name": "conflict", "truth": True}, batch).dense()[0, 1].tolist() == row_of_3
    assert build({"name": "conflict", "constant": 0.5}, batch).dense()[0, 1].tolist() == [0, 0.5, 0.5, 0, 0.5, 0]


# descriptions


def test_a_combination_has_a_readable_name_and_the_needs_of_its_parts() -> None:
    for spec, name in (
        ({"or": ["next", "previous"]}, "next or previous"),
        ({"not": "same_segment"}, "not same_segment"),
        ({"sum": ["next", {"name": "first", "weight": 0.5}]}, "next + 0.5 first"),
        ({"and": [{"or": ["next", "self"]}, {"name": "window", "size": 5}]}, "(next or self) and window(size=5)"),
    ):
        pattern = read_pattern(spec)
        assert pattern.name == str(pattern) == name
        assert pattern.option_names == () and pattern.summary.endswith(".")
    needy = read_pattern({"sum": ["conflict", "delimiter", {"name": "window", "words": True}]})
    assert set(needy.needs) == {"delimiter", "word"} and needy.tables == ("cooccurrence",) and needy.weighted


@pytest.mark.parametrize(
    ("spec", "positional"),
    [
        ({"or": ["next", "previous"]}, True),
        ({"and": ["next", "first"]}, False),
        ({"not": "next"}, False),
        ({"sum": ["next", "self"]}, True),
        ({"sum": ["next", "first"]}, False),
    ],
    ids=str,
)
def test_a_combination_is_positional_if_all_of_its_parts_are(spec: Any, positional: bool) -> None:
    assert read_pattern(spec).positional == positional


def test_options_can_stand_inside_a_description_or_beside_it() -> None:
    beside = read_pattern("window", {"size": 5})
    inside = read_pattern({"name": "window", "size": 5})
    mixed = read_pattern({"name": "window", "size": 5}, {"words": True})
    assert beside.options == inside.options == {"size": 5}
    assert mixed.options == {"size": 5, "words": True} and mixed.needs == ("word", "delimiter")
    assert beside.name == inside.name == mixed.name == "window" and str(beside) == "window(size=5)"
    assert torch.equal(beside.build(BATCH).dense(), inside.build(BATCH).dense())
    assert read_pattern("conflict", {"truth": True}).needs == ("delimiter", "original")


@pytest.mark.parametrize(
    ("spec", "options", "message", "hint"),
    [
        (5, {}, "neither a name nor a table", "size = 5"),
        (["next"], {}, "neither a name nor a table", "or"),
        ({}, {}, "does not describe", "not"),
        ({"or": ["next"], "and": ["self"]}, {}, "does not describe", "not"),
        ({"xor": ["next", "self"]}, {}, "does not describe", "or"),
        ({"or": []}, {}, r"or = \[\] is not a list", "or"),
        ({"or": "next"}, {}, "or = 'next' is not a list", "or"),
        ({"sum": {"name": "next"}}, {}, "sum = .* is not a list", "or"),
        ({"not": ["next"]}, {}, "neither a name nor a table", "not"),
        ({"name": 3}, {}, "the name of a pattern is 3", "name"),
        ({"or": ["next", "self"]}, {"size": 5}, "a combination has no option 'size'", "parts"),
        ({"name": "window", "size": 5}, {"size": 3}, "'size' of the pattern is given twice", ""),
        ("window", {"size": 4}, "size = 4 is not an odd number", ""),
        ("window", {"size": -1}, "size = -1 is not an odd number", ""),
        ("window", {"size": True}, "size = True", ""),
        ("rare", {"fraction": 1.5}, "fraction = 1.5", ""),
        ("rare", {"least": 0}, "least = 0", ""),
        ("conflict", {"constant": float("nan")}, "constant = nan", ""),
        ("matching_token", {"unique": "some"}, "unique = 'some'", "self"),
        ("separator", {"marks": [";"]}, "marks = ", ""),
        ({"sum": [{"name": "next", "weight": -1}]}, {}, "weight = -1", ""),
        ({"sum": [{"name": "next", "weight": float("nan")}]}, {}, "weight = nan", ""),
        ({"sum": [{"name": "next", "weight": float("inf")}]}, {}, "weight = inf", ""),
        ({"sum": [{"name": "next", "weight": True}]}, {}, "weight = True", ""),
        ({"sum": [{"name": "next", "weight": "1"}]}, {}, "weight = '1'", ""),
        ({"or": ["next", "conflict"]}, {}, "'or' takes patterns without weights; 'conflict' has weights", "sum"),
        ({"and": [{"sum": ["next"]}, "self"]}, {}, "'and' takes patterns without weights", "sum"),
        ({"not": "conflict"}, {}, "'not' takes patterns without weights", "sum"),
    ],
    ids=str,
)
def test_invalid_descriptions_are_refused(spec: Any, options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        read_pattern(spec, options)
    assert hint in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("spec", "guess"),
    [
        ("previus", "previous"),
        ({"or": ["next", "previus"]}, "previous"),
        ({"name": "window", "sise": 3}, "size"),
        ({"name": "major_relation", "relations": ["nsubjj"]}, "nsubj"),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_the_nearest_known_one(spec: Any, guess: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{guess}'"):
        read_pattern(spec)


def test_a_custom_pattern_is_a_function_and_a_row() -> None:
    def capitals(tokens: Tokens, *, wanted: bool = True) -> Predicate:
        """Every token looks at capitals."""
        return Columns(tokens.column("capital") == wanted, tokens.valid_BT)

    pattern = Pattern("capitals", capitals, "here", needs=("capital",)).bound({"wanted": False})
    batch = Tokens(
        torch.zeros(1, 2, dtype=torch.long),
        torch.ones(1, 2, dtype=torch.bool),
        {"capital": torch.tensor([[True, False]])},
    )
    assert pattern.build(batch).dense().tolist() == [[[False, True], [False, True]]]
    assert str(pattern) == "capitals(wanted=False)" and pattern.summary == "Every token looks at capitals."


def test_the_random_sentences_cover_the_important_cases() -> None:
    examples: list[Example] = [*EXAMPLES, *(sentence(seed, 9) for seed in range(20, 25))]
    found = {
        "words of several pieces": any(len(p) > 1 for e in examples for p in e.words.values()),
        "delimiters inside": any(len(e.delimiters) > 2 for e in examples),
        "heads outside the sentence": any(
            e.of_word("head", w) not in {-1, *e.words} for e in examples for w in e.words
        ),
        "tokens that are neither word nor delimiter": any(
            e.columns["word"][k] < 0 and not e.columns["delimiter"][k] for e in examples for k in e.positions
        ),
        "passive subjects": any(
            e.of_word("relation", w) == RELATIONS.index("nsubj:pass") for e in examples for w in e.words
        ),
        "proper nouns": any(e.of_word("pos", w) == UPOS.index("PROPN") for e in examples for w in e.words),
        "ids beyond the table": any(e.ids[k] >= len(oracle.ROWS) for e in examples for k in e.positions),
        "tokens of no segment": any(e.columns["segment"][k] < 0 for e in examples for k in e.positions),
        "mispredictions": any(e.columns["mispredicted"][k] for e in examples for k in e.positions),
    }
    assert all(found.values()), found
