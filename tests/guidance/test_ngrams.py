"""n-gram floors against a slow oracle, cases worked by hand, and laws."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from guidance.statistics import ngrams
from guidance.statistics.ngrams import FLOORS, Places, count, fit_weights, floors, level

EDGE = 9
"""The id outside of sequences; ids below it are tokens, and 0 is special."""


def places(rows: list[list[int]], words: list[list[int]] | None = None) -> Places:
    """Places of sequences; ``words`` has the id to predict, or -100; by default every token but 0."""
    words = words or [[w or -100 for w in row] for row in rows]
    bounds = np.cumsum([0, *map(len, rows)])
    seen, labels = (np.concatenate([np.array(row, np.int64) for row in each]) for each in (rows, words))
    return Places.of(seen, labels, bounds, labels != -100, EDGE)


def drawn(seed: int, number: int, length: int = 9) -> list[list[int]]:
    """Sequences in which a token is mostly its predecessor plus one."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        body = [int(random.integers(1, 6))]
        while len(body) < length:
            body.append(int(random.integers(1, 6)) if random.random() < 0.3 else body[-1] % 5 + 1)
        rows.append([0, *body, 0])
    return rows


def masked(rows: list[list[int]], seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """What a model sees of sequences in which some tokens became 8, and the tokens at these places."""
    random = np.random.default_rng(seed)
    chosen = [[bool(w) and random.random() < 0.3 for w in row] for row in rows]
    both = [list(zip(row, mine, strict=True)) for row, mine in zip(rows, chosen, strict=True)]
    return [[8 if c else w for w, c in row] for row in both], [[w if c else -100 for w, c in row] for row in both]


# the oracle: dictionaries, one place after the other


def context_of(row: list[int], place: int, offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(row[place + o] if 0 <= place + o < len(row) else EDGE for o in offsets)


def tables(rows: list[list[int]], offsets: tuple[int, ...]) -> tuple[Counter[Any], Counter[Any]]:
    seen: Counter[Any] = Counter()
    joint: Counter[Any] = Counter()
    for row in rows:
        for place, word in enumerate(row):
            if word:
                context = context_of(row, place, offsets)
                seen[context] += 1
                joint[context, word] += 1
    return seen, joint


def asked(rows: list[list[int]], labels: list[list[int]], offsets: tuple[int, ...]) -> list[tuple[Any, int]]:
    return [
        (context_of(row, place, offsets), word)
        for row, mine in zip(rows, labels, strict=True)
        for place, word in enumerate(mine)
        if word != -100
    ]


def slow_floors(rows: list[list[int]], held: list[bool], fitted: Any, read: Any, num_words: int) -> dict[str, float]:
    others = [row for row, is_held in zip(rows, held, strict=True) if not is_held]
    found = {}
    for name, chain in FLOORS.items():
        before = [1 / num_words] * len(asked(*fitted, ()))
        estimates = [1 / num_words] * len(asked(*read, ()))
        for offsets in chain:
            fit_seen, fit_joint = tables(others, offsets)
            fit_places = asked(*fitted, offsets)
            weights = {}
            for bucket in range(12):
                pairs = [
                    (fit_joint[context, word] / fit_seen[context], p)
                    for (context, word), p in zip(fit_places, before, strict=True)
                    if fit_seen[context] and int(math.log2(fit_seen[context])) == bucket
                ]
                if not pairs:  # seen more often than any context of the fitted text: as reliable as the next lower ones
                    weights[bucket] = weights.get(bucket - 1, 0.0)
                    continue
                pairs += [(0.0, 1.0)]
                result = minimize_scalar(
                    lambda a, pairs=pairs: -sum(math.log(a * f + (1 - a) * p) for f, p in pairs),
                    bounds=(0.0, 1 - 1e-9),
                    method="bounded",
                    options={"xatol": 1e-12},
                )
                weights[bucket] = result.x

            def mixed(places: list[Any], p: list[float], seen: Any, joint: Any, weights: Any) -> list[float]:
                out = []
                for (context, word), before_it in zip(places, p, strict=True):
                    n = seen[context]
                    a = weights[int(math.log2(n))] if n else 0.0
                    out.append(a * joint[context, word] / max(n, 1) + (1 - a) * before_it)
                return out

            before = mixed(fit_places, before, fit_seen, fit_joint, weights)
            estimates = mixed(asked(*read, offsets), estimates, *tables(rows, offsets), weights)
        found[name] = -sum(map(math.log, estimates)) / len(estimates)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_floors_are_those_of_a_slow_oracle(seed: int) -> None:
    rows = drawn(seed, 150)
    held = [number % 10 == 9 for number in range(150)]
    fitted = masked([row for row, is_held in zip(rows, held, strict=True) if is_held], seed)
    read = masked(drawn(seed + 100, 8), seed)
    is_held = np.array([h for row, h in zip(rows, held, strict=True) for w in row if w])
    found = floors(places(rows), is_held, places(*fitted), places(*read), 5)
    expected = slow_floors(rows, held, fitted, read, 5)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["unigram"] > found["previous"] > found["neighbours"]


@pytest.mark.parametrize("context", sorted({context for chain in FLOORS.values() for context in chain}))
def test_counts_are_those_of_dictionaries(context: tuple[int, ...]) -> None:
    rows, read = drawn(7, 30), masked(drawn(8, 6), 8)
    seen, joint = tables(rows, context)
    counts, with_word = count(places(rows), places(*read), context)
    expected = asked(*read, context)
    assert counts.tolist() == [seen[c] for c, _ in expected]
    assert with_word.tolist() == [joint[c, w] for c, w in expected]
    assert (with_word <= counts).all()


def test_counts_with_keys_that_do_not_fit_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, read = places(drawn(1, 30)), places(*masked(drawn(2, 9), 1))
    expected = [count(rows, read, context) for context in FLOORS["ngrams"]]
    monkeypatch.setattr("guidance.statistics.ngrams._DENSE", 1)
    for context, (seen, with_word) in zip(FLOORS["ngrams"], expected, strict=True):
        again = count(rows, read, context)
        assert again[0].tolist() == seen.tolist() and again[1].tolist() == with_word.tolist()


def test_a_corpus_worked_by_hand() -> None:
    # 1 2 1 2: after 1 comes 2 (twice), 1 stands alone at the beginning once and after 2 once
    text = places([[0, 1, 2, 1, 2, 0]])
    read = places([[0, 1, 8, 0]], [[-100, -100, 2, -100]])
    assert [int(n[0]) for n in count(text, read, (-1,))] == [2, 2]
    assert [int(n[0]) for n in count(text, read, ())] == [4, 2]
    assert [int(n[0]) for n in count(text, read, (-1, 1))] == [1, 1]
    assert [int(n[0]) for n in count(text, read, (-2, -1))] == [1, 1]


def test_the_context_is_what_the_model_sees() -> None:
    text = places(drawn(3, 20))
    masked_neighbour = places([[0, 8, 8, 0]], [[-100, -100, 2, -100]])  # 8, the mask, never stands in the text
    assert count(text, masked_neighbour, (-1,))[0].tolist() == [0]


def test_no_context_crosses_sequences() -> None:
    assert count(places([[1], [2]]), places([[1, 8]], [[-100, 2]]), (-1,))[1].tolist() == [0]


def test_weights_follow_the_held_out_text() -> None:
    # 98 words that only the specific estimate knows, and the one that only the other knows: 98 of 99
    weights = fit_weights(np.ones(98), np.full(98, 1e-12), np.zeros(98, np.int64))
    assert weights[0] == pytest.approx(98 / 99, abs=1e-9)
    assert weights[1] == weights[9] == weights[0], "contexts that were seen more often are no less reliable"
    weights = fit_weights(np.ones(98), np.full(98, 1e-12), np.full(98, 3))
    assert weights[2] == 0 and weights[4] == weights[3], "nothing speaks for contexts that were seen less often"


@pytest.mark.parametrize("number", [100, 114, 116, 128])  # 9 tokens each: 900, 1026 (924 of them fitted), 1044, 1152
def test_word_frequencies_tell_something_whatever_the_size_of_the_text(number: int) -> None:
    rows = [[0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0]] * number
    held = np.arange(number) % 10 == 9
    is_held = np.repeat(held, 9)
    nats = floors(places(rows), is_held, places(rows[:10]), places(rows[:10]), 5)
    entropy = -(8 / 9 * math.log(8 / 9) + 1 / 9 * math.log(1 / 9))
    assert nats["unigram"] == pytest.approx(entropy, abs=0.03), "and not log 5"


def test_levels_are_powers_of_two() -> None:
    assert level(np.array([1, 2, 3, 4, 7, 8, 1023, 1024])).tolist() == [0, 1, 1, 2, 2, 3, 9, 10]


def test_inputs_are_not_changed_and_nothing_to_predict_is_an_error() -> None:
    rows, read = places(drawn(1, 12)), masked(drawn(2, 3), 1)
    before = rows.seen.copy()
    floors(rows, np.arange(len(rows)) % 10 == 0, places(*read), places(*read), 5)
    assert (rows.seen == before).all()
    with pytest.raises(ValueError, match="no place"):
        floors(rows, np.zeros(len(rows), bool), places(*read), places([[1]], [[-100]]), 5)


def test_word_frequencies_alone_are_the_first_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight is fitted to the last tenth.  The id 0 is special, and does not count."""
    rows, read, ordinary = drawn(1, 40), drawn(2, 8), np.arange(1, 9)
    counted = np.concatenate([np.array(row) for row in rows])
    is_word = counted > 0
    is_held = np.arange(len(counted)) >= len(counted) - len(counted) // 10
    every = Places.of(counted, counted, np.array([0, len(counted)]), is_word, EDGE)
    fitted = Places.of(counted, counted, np.array([0, len(counted)]), is_word & is_held, EDGE)
    expected = floors(every, is_held[is_word], fitted, places(read), len(ordinary))["unigram"]
    asked_for = np.concatenate([np.array(row) for row in read])
    assert ngrams.unigram_nats(counted, asked_for, ordinary) == pytest.approx(expected)
    monkeypatch.setattr(ngrams, "_PART", 50)
    assert ngrams.unigram_nats(counted, asked_for, ordinary) == pytest.approx(expected)
    assert ngrams.unigram_nats(counted[:0], asked_for, ordinary) is None
