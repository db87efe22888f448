from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from guidance.errors import InputError
from pipelines.training.order import BLOCK, AnyOrder, LengthOrder, MixedOrder, Order, length_groups

LENGTHS = np.random.default_rng(0).integers(3, 129, 500)

ORDERS: dict[str, Callable[[int], AnyOrder]] = {
    "plain": lambda seed: Order(50, 7, seed),
    "by length": lambda seed: LengthOrder(LENGTHS, seed, batch_tokens=1000),
    "buckets": lambda seed: LengthOrder(LENGTHS, seed, batch_size=32),
    "mixed": lambda seed: MixedOrder([30, 5, 100], [2, 1, 1], 16, seed),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_depends_only_on_seed_and_step(kind: str) -> None:
    straight = [ORDERS[kind](3).batch(step) for step in range(90)]
    one = ORDERS[kind](3)
    assert [one.batch(step) for step in (71, 0, 35)] == [straight[step] for step in (71, 0, 35)]
    assert straight != [ORDERS[kind](4).batch(step) for step in range(90)]


@pytest.mark.parametrize("kind", ORDERS)
def test_no_example_comes_twice_in_an_epoch(kind: str) -> None:
    order = ORDERS[kind](3)
    seen = [pair for step in range(200) for pair in order.batch(step)]
    assert len(set(seen)) == len(seen)
    assert min(len(order.batch(step)) for step in range(200)) == order.smallest


@pytest.mark.parametrize("kind", ORDERS)
def test_a_late_step_is_computed_quickly(kind: str) -> None:
    order = ORDERS[kind](3)
    started = time.process_time()
    epochs = [epoch for epoch, _ in order.batch(10**9)]
    assert time.process_time() - started < 0.1
    assert min(epochs) > 10**6


@pytest.mark.parametrize("kind", ORDERS)
def test_every_epoch_has_an_order_of_its_own(kind: str) -> None:
    order = ORDERS[kind](3)
    steps = order.steps(1)
    epochs: dict[tuple[int, bool], list[int]] = {}  # in the mixture, those of the first corpus, and of the others
    for step in range(5 * steps):
        for epoch, example in order.batch(step):
            epochs.setdefault((epoch, example < 30), []).append(example)
    for first in (True, False):
        orders = [tuple(epochs[epoch, first][:20]) for epoch in range(3)]
        assert len(set(orders)) == 3
    assert order.steps(1e-9) == 1 and order.steps(3) == pytest.approx(3 * steps, abs=1)


# every epoch a permutation


def test_every_example_comes_once_in_every_epoch() -> None:
    order = Order(10, 4, seed=3)
    seen = [pair for step in range(10) for pair in order.batch(step)]
    assert sorted(seen) == [(epoch, example) for epoch in range(4) for example in range(10)]


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    assert Order(1, 3, seed=0).batch(1) == [(3, 0), (4, 0), (5, 0)]


def test_epochs_are_counted_in_steps() -> None:
    assert Order(40, 8, seed=0).steps(0.4) == 2


def test_no_examples_are_refused() -> None:
    for make in (
        lambda: Order(0, 4, seed=0),
        lambda: LengthOrder(np.zeros(0, np.int64), 0, batch_size=4),
        lambda: MixedOrder([3, 0], [1, 1], 4, 0),
    ):
        with pytest.raises(InputError, match="no training sequences"):
            make()


# by length


@pytest.mark.parametrize("options", [{"batch_tokens": 1000}, {"batch_tokens": 128}, {"batch_size": 32}])
def test_batches_by_length_keep_the_limit_and_use_every_example_once(options: dict[str, int]) -> None:
    order = LengthOrder(LENGTHS, 5, **options)
    for epoch in range(2):
        steps = range(epoch * order.num_batches, (epoch + 1) * order.num_batches)
        batches = [order.batch(step) for step in steps]
        assert sorted(pair for batch in batches for pair in batch) == [(epoch, n) for n in range(len(LENGTHS))]
        padded = [len(batch) * max(LENGTHS[n] for _, n in batch) for batch in batches]
        if "batch_tokens" in options:
            assert max(padded) <= options["batch_tokens"]
        else:
            assert {len(batch) for batch in batches[:-1]} <= {32, 26} and max(map(len, batches)) == 32
        assert sum(padded) < 1.2 * LENGTHS.sum(), "little padding"


def test_batches_by_length_are_nearly_full() -> None:
    order = LengthOrder(LENGTHS, 5, batch_tokens=1000)
    assert order.num_batches <= 1.2 * LENGTHS.sum() / 1000


def test_sequences_of_one_length_fill_every_batch() -> None:
    order = LengthOrder(np.full(100, 128), 0, batch_tokens=1280)
    assert order.num_batches == order.smallest == 10


def test_the_last_two_batches_of_the_layout_are_equally_large() -> None:
    lengths = np.array([10, 10, 10, 2, 2, 2, 2, 2, 2, 2])
    # 10 10 10 | 2 2 2 2 2 2 2
    assert sorted(len(LengthOrder(lengths, 0, batch_tokens=30).batch(step)) for step in range(2)) == [3, 7]
    order = LengthOrder(lengths, 0, batch_tokens=20)
    assert sorted(len(order.batch(step)) for step in range(3)) == [2, 2, 6]  # 10 10 | 10 2 | 2 2 2 2 2 2
    assert LengthOrder(np.full(33, 5), 0, batch_size=32).smallest == 16  # and not 1


def test_lengths_of_a_group_differ_by_at_most_an_eighth() -> None:
    lengths = np.arange(1, 3000)
    groups, longest = length_groups(lengths)
    shortest = np.array([lengths[groups == group].min() for group in range(len(longest))])
    assert (longest - shortest <= shortest / 8).all() and (np.diff(longest) < 0).all()
    assert (longest == shortest)[longest < 16].all()
    groups, longest = length_groups(np.array([7, 16, 17, 33]))
    assert (groups.tolist(), longest.tolist()) == ([2, 1, 1, 0], [33, 17, 7])


def test_batches_of_an_epoch_are_shuffled_over_lengths() -> None:
    order = LengthOrder(LENGTHS, 5, batch_tokens=1000)
    first = [max(LENGTHS[n] for _, n in order.batch(step)) for step in range(order.num_batches)]
    assert first not in (sorted(first), sorted(first, reverse=True))
    together = [{n for _, n in order.batch(step)} for step in range(2 * order.num_batches)]
    assert not any(batch in together[: order.num_batches] for batch in together[order.num_batches :][:5])


def test_an_example_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(InputError, match="training sequence 1 has 65 tokens, but a batch has at most 64") as caught:
        LengthOrder(np.array([64, 65, 3]), 0, batch_tokens=64)
    assert caught.value.hint == "--batch-tokens 65 or more"


# several corpora


def test_a_mixture_is_exact_in_every_block() -> None:
    sizes = [300, 7, 5000]
    order = MixedOrder(sizes, [0.5, 0.2, 0.3], 10, seed=1)
    for block in (0, 5):
        steps = range(block * BLOCK // 10, (block + 1) * BLOCK // 10)
        examples = np.array([n for step in steps for _, n in order.batch(step)])
        corpora = np.searchsorted(np.cumsum(sizes), examples, side="right")
        assert np.bincount(corpora).tolist() == [500, 200, 300]
        halves = np.bincount(corpora[:500], minlength=3)
        assert (abs(halves - [250, 100, 150]) < 50).all(), "in random order within"


def test_each_corpus_has_its_own_permutations() -> None:
    sizes = [30, 7]
    order = MixedOrder(sizes, [3, 1], 8, seed=1)
    seen: list[list[tuple[int, int]]] = [[], []]
    for step in range(500):
        for epoch, example in order.batch(step):
            seen[example >= 30].append((epoch, example - 30 * (example >= 30)))
    assert (len(seen[0]), len(seen[1])) == (3000, 1000)
    for size, pairs in zip(sizes, seen, strict=True):
        whole = pairs[: len(pairs) // size * size]
        assert [epoch for epoch, _ in pairs] == sorted(epoch for epoch, _ in pairs)
        assert Counter(whole) == Counter((epoch, n) for epoch in range(len(pairs) // size) for n in range(size))


def test_shares_that_do_not_divide_a_block_are_rounded() -> None:
    assert MixedOrder([5, 5], [2, 1], 4, 0).quotas == (667, 333)
    assert MixedOrder([5, 5, 5], [1, 1, 1], 4, 0).quotas == (334, 333, 333)


def test_a_share_of_less_than_one_place_is_refused() -> None:
    with pytest.raises(InputError, match="corpus 2: a share of 1 in 2001 is less than one example in 1000"):
        MixedOrder([5, 5], [2000, 1], 4, 0)
