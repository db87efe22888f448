"""Extractive summaries: which sentences of a document to take, by a reference summary or by a model's scores.

Source: Liu & Lapata 2019, *Text Summarization with Pretrained Encoders*, published code.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any, Literal

_NOT_ASCII = re.compile(r"[^a-zA-Z0-9 ]")


def greedy_oracle(
    sentences: Sequence[str], summary: Sequence[str], size: int = 3, letters: Literal["ascii", "any"] = "ascii"
) -> list[int]:
    """The sentences that one after the other raise ROUGE-1 F + ROUGE-2 F with the reference summary most.

    N-grams are sets.  Those of the document never cross sentences, those of the summary may.  The search ends when no
    sentence makes the value better; of equal ones the first is taken.

    Args:
        sentences, summary: their words parted by white space.
        size: how many sentences at most.
        letters: which characters count: the published code drops all but ASCII letters and digits, which leaves nothing of
            most scripts; ``any`` keeps those of all scripts.

    Returns:
        Indices: in order of the document if ``size`` were taken, else in the order of the search; empty if no sentence
        shares a word with the summary.
    """
    document = [_grams(_words(sentence, letters)) for sentence in sentences]
    reference = _grams([word for sentence in summary for word in _words(sentence, letters)])
    chosen: list[int] = []
    taken: tuple[set[str], set[tuple[str, str]]] = (set(), set())
    best = 0.0
    while len(chosen) < size:
        index = -1
        for candidate, (words, pairs) in enumerate(document):
            if candidate not in chosen:
                value = _f1(taken[0] | words, reference[0]) + _f1(taken[1] | pairs, reference[1])
                if value > best:
                    best, index = value, candidate
        if index < 0:
            return chosen
        chosen.append(index)
        taken = (taken[0] | document[index][0], taken[1] | document[index][1])
    return sorted(chosen)


def _words(sentence: str, letters: str) -> list[str]:
    if letters == "ascii":
        return _NOT_ASCII.sub("", sentence).split()
    # marks are letters too: the vowels of many scripts are written with them
    return "".join(c for c in sentence if c == " " or unicodedata.category(c)[0] in "LMN").split()


def _grams(words: list[str]) -> tuple[set[str], set[tuple[str, str]]]:
    return set(words), set(pairwise(words))


def _f1(found: AbstractSet[Any], wanted: AbstractSet[Any]) -> float:
    common = len(found & wanted)
    precision = common / len(found) if found else 0.0
    recall = common / len(wanted) if wanted else 0.0
    return 2 * precision * recall / (precision + recall + 1e-8)


def select(scores: Sequence[float], sentences: Sequence[str], size: int = 3, block_trigrams: bool = True) -> list[int]:
    """The sentences with the highest scores, best first; of equal ones the first in the document.

    Args:
        scores: one for each sentence.
        sentences: the original text, with its case.
        size: how many sentences at most.
        block_trigrams: skip a sentence that shares three successive words with one that was taken.
    """
    chosen: list[int] = []
    seen: set[tuple[str, ...]] = set()
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        words = sentences[index].split()
        trigrams = set(zip(words, words[1:], words[2:], strict=False))
        if block_trigrams and trigrams & seen:
            continue
        chosen.append(index)
        seen |= trigrams
        if len(chosen) == size:
            break
    return chosen


def normalised_gain(score: float, baseline: float, oracle: float) -> float | None:
    """How much of the way from a baseline to the oracle a score goes: 0 at the baseline, 1 at the oracle; None if both are
    equal.

    Source: Li et al. 2022 give no formula for "normalised by the oracle"; this one reproduces the gains that they state.
    """
    return None if oracle == baseline else (score - baseline) / (oracle - baseline)
