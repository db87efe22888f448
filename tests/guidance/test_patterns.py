"""The contract of every row of `PATTERNS`, and what each says on sentences worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guidance.errors import InputError, UnknownName
from guidance.features import Tokens, Vocabulary
from guidance.patterns import PATTERNS, Columns, Pairs, Predicate, find_pattern
from tests.guidance.models import pattern_keys

FEATURES = ("delimiter", "period")
every_pattern = pytest.mark.parametrize("name", PATTERNS)


def tokens(valid: list[list[int]], marked: list[list[int]] | None = None) -> Tokens:
    valid_BT = torch.tensor(valid, dtype=torch.bool)
    marked_BT = torch.tensor(marked, dtype=torch.bool) if marked else torch.zeros_like(valid_BT)
    return Tokens(torch.arange(valid_BT.numel()).view(valid_BT.shape), valid_BT, dict.fromkeys(FEATURES, marked_BT))


PADDED = tokens(
    [
        [1, 1, 1, 1, 1, 1],  # full
        [1, 1, 1, 0, 0, 0],  # padded on the right
        [0, 0, 1, 1, 1, 1],  # padded on the left
        [0, 0, 1, 0, 0, 0],  # one token
        [0, 0, 0, 0, 0, 0],  # nothing
        [1, 1, 1, 1, 1, 1],  # full, and nothing is marked
    ],
    [
        [1, 0, 0, 1, 0, 1],
        [1, 0, 1, 1, 1, 1],  # marks at padding
        [1, 1, 0, 0, 1, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ],
)


def dense_oracle(name: str, batch: Tokens) -> Tensor:
    """The predicate by loops over examples, queries and keys."""
    B, T = batch.ids_BT.shape
    dense = torch.zeros(B, T, T, dtype=torch.bool)
    for b in range(B):
        valid, marked = batch.valid_BT[b].tolist(), batch.columns["period"][b].tolist()
        for query in range(T):
            if valid[query]:
                for key in pattern_keys(name, valid, marked, query):
                    dense[b, query, key] = True
    return dense


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("next", ["0100", "0010", "0000", "0000"]),
        ("previous", ["0000", "1000", "0100", "0000"]),
        ("self", ["1000", "0100", "0010", "0000"]),
        ("first", ["1000", "1000", "1000", "0000"]),
        ("delimiter", ["1010", "1010", "1010", "0000"]),
        ("period", ["1010", "1010", "1010", "0000"]),
    ],
)
def test_four_places_of_which_three_are_tokens_worked_by_hand(name: str, expected: list[str]) -> None:
    batch = tokens([[1, 1, 1, 0]], [[1, 0, 1, 1]])
    rows = ["".join(str(int(x)) for x in row) for row in find_pattern(name).build(batch).dense()[0]]
    assert rows == expected


@every_pattern
def test_written_out_a_pattern_is_what_loops_find(name: str) -> None:
    assert torch.equal(find_pattern(name).build(PADDED).dense(), dense_oracle(name, PADDED))


@every_pattern
def test_padding_is_neither_query_nor_key(name: str) -> None:
    dense = find_pattern(name).build(PADDED).dense()
    assert not dense[~PADDED.valid_BT].any()
    assert not dense.transpose(1, 2)[~PADDED.valid_BT].any()


@every_pattern
def test_shapes_and_types(name: str) -> None:
    predicate = find_pattern(name).build(PADDED)
    assert predicate.dense().dtype == torch.bool and predicate.dense().shape == (6, 6, 6)
    assert predicate.counts().dtype == torch.float32 and predicate.counts().shape == (6, 6)
    assert predicate.mass(torch.rand(6, 3, 6, 6)).shape == (6, 3, 6)


def forms(name: str, batch: Tokens) -> list[Predicate]:
    """A predicate as its pattern builds it, written out, and within a window."""
    B, T = batch.ids_BT.shape
    near = (torch.arange(T)[:, None] - torch.arange(T)[None]).abs() <= 1
    predicate = find_pattern(name).build(batch)
    return [predicate, Pairs(predicate.dense(), batch.valid_BT), predicate.restricted(near.expand(B, T, T))]


@every_pattern
def test_counts_mass_and_its_gradient_agree_with_the_matrix(name: str) -> None:
    for predicate in forms(name, PADDED):
        dense = predicate.dense().double()
        assert torch.equal(predicate.counts().double(), dense.sum(-1))
        attention = torch.rand(6, 3, 6, 6, dtype=torch.float64, requires_grad=True)
        mass = predicate.mass(attention)
        torch.testing.assert_close(mass, (attention * dense[:, None]).sum(-1))
        grad_mass = torch.rand_like(mass)
        (expected,) = torch.autograd.grad((attention * dense[:, None]).sum(-1), attention, grad_mass)
        start = torch.rand(6, 3, 6, 6, dtype=torch.float64)
        added = start.clone()
        predicate.add_mass_gradient(added, grad_mass)
        torch.testing.assert_close(added - start, expected)


@every_pattern
def test_the_gradient_can_be_added_to_some_heads_of_a_larger_tensor(name: str) -> None:
    predicate = find_pattern(name).build(PADDED)
    whole = torch.zeros(6, 5, 6, 6)
    predicate.add_mass_gradient(whole[:, 1:3], torch.ones(6, 2, 6))
    assert torch.equal(whole[:, 1:3], predicate.dense()[:, None].float().expand(6, 2, 6, 6))
    assert not whole[:, [0, 3, 4]].any()


@every_pattern
def test_within_a_window_a_query_keeps_only_the_keys_it_may_see(name: str) -> None:
    whole, _, near = forms(name, PADDED)
    window = (torch.arange(6)[:, None] - torch.arange(6)[None]).abs() <= 1
    assert torch.equal(near.dense(), whole.dense() & window)


@every_pattern
@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 2])
def test_a_sentence_gives_the_same_alone_and_among_padding(name: str, left: int, right: int) -> None:
    marks = [0, 1, 0, 1, 0]
    alone = find_pattern(name).build(tokens([[1] * 5], [marks])).dense()[0]
    around = tokens(
        [[0] * left + [1] * 5 + [0] * right, [1] * (left + 5 + right)],
        [[1] * left + marks + [1] * right, [1] * (left + 5 + right)],
    )
    inside = find_pattern(name).build(around).dense()[0]
    assert torch.equal(inside[left : left + 5, left : left + 5], alone)
    assert inside.sum() == alone.sum()


@every_pattern
def test_a_single_token_has_neither_successor_nor_predecessor(name: str) -> None:
    predicate = find_pattern(name).build(tokens([[1]], [[1]]))
    assert predicate.counts().item() == (0 if name in ("next", "previous") else 1)
    assert predicate.mass(torch.ones(1, 2, 1, 1)).shape == (1, 2, 1)


@every_pattern
def test_sequences_of_512_tokens_work(name: str) -> None:
    marks = [0] * 512
    marks[17] = marks[500] = 1
    predicate = find_pattern(name).build(tokens([[1] * 512], [marks]))
    assert torch.equal(predicate.counts(), predicate.dense().sum(-1).float())


@every_pattern
def test_a_pattern_leaves_its_inputs_alone(name: str) -> None:
    before = (PADDED.ids_BT.clone(), PADDED.valid_BT.clone(), PADDED.columns["period"].clone())
    attention = torch.rand(6, 2, 6, 6)
    kept = attention.clone()
    for predicate in forms(name, PADDED):
        predicate.dense().fill_(True)
        predicate.counts().fill_(7)
        predicate.mass(attention).fill_(7)
    assert torch.equal(attention, kept)
    assert all(map(torch.equal, before, (PADDED.ids_BT, PADDED.valid_BT, PADDED.columns["period"])))


@every_pattern
def test_every_row_of_the_table_says_what_it_is(name: str) -> None:
    pattern = PATTERNS[name]
    assert pattern.name == name
    assert pattern.summary.endswith(".") and pattern.source
    assert all(need in FEATURES for need in pattern.needs)


@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if pattern.needs])
def test_a_missing_feature_is_named_with_its_source(name: str) -> None:
    bare = Tokens(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(InputError, match=name) as raised:
        find_pattern(name).build(bare)
    assert raised.value.hint and "tokenizer" in raised.value.hint


def test_a_feature_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"period has shape \(1, 4\), the ids have \(1, 3\)"):
        Tokens(
            torch.zeros(1, 3, dtype=torch.long),
            torch.ones(1, 3, dtype=torch.bool),
            {"period": torch.zeros(1, 4, dtype=torch.bool)},
        )


def test_unknown_patterns_get_near_names() -> None:
    with pytest.raises(UnknownName, match="did you mean 'previous'") as raised:
        find_pattern("previus")
    assert "period" in str(raised.value.hint)


def test_a_key_column_with_holes_counts_only_valid_keys() -> None:
    valid = torch.tensor([[True, False, True]])
    predicate = Columns(torch.tensor([[True, True, False]]), valid)
    assert predicate.counts().tolist() == [[1, 0, 1]]


class _Words:
    """As much of a tokenizer as features need; ids leave a gap."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = 0, 2, None, 2

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def test_delimiters_and_periods_are_read_off_the_tokenizer() -> None:
    vocabulary = Vocabulary.from_tokenizer(
        _Words({"[CLS]": 0, "[SEP]": 2, ".": 3, "##.": 4, "Ġ.": 5, "▁.": 6, "..": 7, "a.": 8, "b": 12})
    )
    ids = torch.tensor([[0, 2, 3, 4, 5, 6, 7, 8, 12]])
    columns = vocabulary.columns(ids)
    assert columns["delimiter"].tolist() == [[True, True] + [False] * 7]
    assert columns["period"].tolist() == [[False, False, True, True, True, True, False, False, False]]
