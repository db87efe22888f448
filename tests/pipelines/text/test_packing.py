"""Packing: small cases worked by hand, and a comparison with a slow oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pipelines.text.encoding import Tokens
from pipelines.text.packing import Packer
from pipelines.text.sequence_files import Packed

CLS, SEP = 1000, 2000


def tokens(*sentences: tuple[int, int, int]) -> Tokens:
    """Sentences given as (document, number, length); ids count up from ``10 * number``."""
    ids, documents, numbers = [], [], []
    for document, number, length in sentences:
        ids += range(10 * number, 10 * number + length)
        documents += [document] * length
        numbers += [number] * length
    places = np.arange(len(ids), dtype=np.int64)
    return Tokens(
        np.array(ids, np.int32), np.array(documents, np.int32), np.array(numbers, np.int32), places, places + 1
    )


def rows(*parts: Packed | None) -> list[list[int]]:
    found = []
    for part in parts:
        if part is not None:
            found += [part.tokens.id[a:b].tolist() for a, b in zip(part.offsets, part.offsets[1:], strict=False)]
    return found


def test_whole_sentences_fill_a_sequence_and_documents_are_kept_apart_by_a_separator() -> None:
    packer = Packer(8, CLS, SEP, True)
    given = tokens((0, 0, 2), (0, 1, 2), (1, 2, 1), (1, 3, 3))
    assert rows(packer.add(given), packer.flush()) == [
        [CLS, 0, 1, 10, 11, SEP, 20, SEP],
        [CLS, 30, 31, 32, SEP],
    ]


def test_without_crossing_no_sequence_continues_in_the_next_document() -> None:
    packer = Packer(8, CLS, SEP, False)
    given = tokens((0, 0, 2), (0, 1, 2), (1, 2, 1), (1, 3, 3))
    assert rows(packer.add(given), packer.flush()) == [[CLS, 0, 1, 10, 11, SEP], [CLS, 20, 30, 31, 32, SEP]]


def test_a_long_sentence_is_cut_and_its_rest_shares_a_sequence() -> None:
    packer = Packer(5, CLS, SEP, True)
    assert rows(packer.add(tokens((0, 0, 7), (0, 1, 2))), packer.flush()) == [
        [CLS, 0, 1, 2, SEP],
        [CLS, 3, 4, 5, SEP],
        [CLS, 6, 10, 11, SEP],
    ]
    assert packer.cut == 1


def test_special_tokens_have_no_offsets() -> None:
    packer = Packer(8, CLS, SEP, True)
    assert packer.add(tokens((3, 0, 1), (4, 1, 1))) is None
    packed = packer.flush()
    assert packed is not None
    assert packed.special.tolist() == [True, False, True, False, True]
    assert packed.tokens.document.tolist() == [-1, 3, -1, 4, -1]
    assert packed.tokens.sentence.tolist() == [-1, 0, -1, 1, -1]
    assert packed.tokens.start.tolist() == [-1, 0, -1, 1, -1]
    assert packed.tokens.end.tolist() == [-1, 1, -1, 2, -1]


def oracle(sentences: list[tuple[int, int, int]], length: int, cross: bool) -> list[list[int]]:
    """Packs one sentence at a time, in plain Python."""
    done: list[list[int]] = []
    now: list[int] = []
    last = None
    for document, number, count in sentences:
        ids = list(range(10 * number, 10 * number + count))
        while ids:
            piece, ids = ids[: length - 2], ids[length - 2 :]
            gap = [SEP] if now and document != last else []
            if now and (len(now) + len(gap) + len(piece) > length - 2 or (gap and not cross)):
                done.append(now)
                now, gap = [], []
            now = now + gap + piece
            last = document
    return [[CLS, *row, SEP] for row in [*done, now] if row]


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_packing_agrees_with_a_slow_oracle_for_any_batches(seed: int, cross: bool) -> None:
    random.seed(seed)
    length = random.choice([3, 5, 8, 20])
    document, sentences = 0, []
    for number in range(60):
        document += random.random() < 0.2
        sentences.append((document, number, random.choice([1, 2, 3, 5, 9, 30])))
    packer = Packer(length, CLS, SEP, cross)
    parts, first = [], 0
    while first < len(sentences):
        last = first + random.randint(1, 20)
        parts.append(packer.add(tokens(*sentences[first:last])))
        first = last
    assert rows(*parts, packer.flush()) == oracle(sentences, length, cross)
    assert packer.cut == sum(count > length - 2 for _, _, count in sentences)
