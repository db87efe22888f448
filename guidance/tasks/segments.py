"""Scores of text segmentation that forgive near misses.

A document of N units (sentences) is cut by N booleans: True where a segment ends.  The last unit always ends one, so its
boolean says nothing.

Sources: Beeferman, Berger & Lafferty 1999 (Pk); Pevzner & Hearst 2002 (WindowDiff).  The number of windows is N - k; other
implementations have N - k + 1, and other rules for k, so k belongs beside every score.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from guidance.errors import InputError


def window_size(ends: Sequence[bool]) -> int:
    """Half of the mean length of the reference's segments, rounded (halves to even), but at least 2."""
    num_segments = 1 + sum(map(bool, ends[:-1]))
    return max(2, round(len(ends) / num_segments / 2))


def pk(reference: Sequence[bool], predicted: Sequence[bool], k: int | None = None) -> float | None:
    """The share of unit pairs k apart of which only one of both segmentations says that a boundary parts them.

    Args:
        k: by default `window_size` of the reference.

    Returns:
        0 for equal segmentations; None if the document has no more than k units.

    Raises:
        InputError: the two have different lengths, or k is below 1.
    """
    counts = _boundaries_in_windows(reference, predicted, k)
    return None if counts is None else float(np.mean((counts[0] > 0) != (counts[1] > 0)))


def window_diff(reference: Sequence[bool], predicted: Sequence[bool], k: int | None = None) -> float | None:
    """The share of unit pairs k apart between which the two segmentations have different numbers of boundaries.

    Arguments, result and errors are those of `pk`.
    """
    counts = _boundaries_in_windows(reference, predicted, k)
    return None if counts is None else float(np.mean(counts[0] != counts[1]))


def _boundaries_in_windows(
    reference: Sequence[bool], predicted: Sequence[bool], k: int | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """How many boundaries lie between unit i and unit i + k, for every i, in each of both."""
    if len(reference) != len(predicted):
        raise InputError(f"the reference has {len(reference)} units, the prediction {len(predicted)}")
    size = window_size(reference) if k is None else k
    if size < 1:
        raise InputError(f"k = {size}: a window holds at least 1 unit")
    if len(reference) <= size:
        return None
    counts = []
    for ends in (reference, predicted):
        before = np.concatenate([[0], np.cumsum(np.asarray(ends, dtype=bool)[:-1])])
        counts.append(before[size:] - before[:-size])
    return counts[0], counts[1]
