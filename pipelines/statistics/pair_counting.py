"""Counts pairs of tokens in units of text (sentences or blocks), row by row, with compiled code.

For each token of the vocabulary, the code visits all its occurrences and counts the tokens around them in one row, which
fits the processor's L1 cache.  Each pair is visited twice, once from either side.  This is still faster than adding to a
table of all pairs, where most additions wait for main memory, and needs no such table.

Compiled code is cached in the user's cache folder, never beside the sources.  If that folder is not writable, every process
compiles again.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

MOST_ROWS = 65_000
"""Rows are uint16; the number after the last row stands for all tokens that are not counted."""

CAPACITY = 1 << 18
"""Pairs per part that `count_pairs` gives, about."""

OCCURRENCES = 1 << 21
"""Occurrences in memory at once, 12 bytes each."""


def most_frequent(counts_V: Any, number: int, exclude: Iterable[int] = ()) -> Any:
    """The ids of the ``number`` most frequent tokens, most frequent first; ties are ordered by id.

    Fewer if fewer tokens occur at all.

    Args:
        counts_V: how often each token id occurs.
        exclude: ids to leave out, such as special tokens.
    """
    counts = np.array(counts_V, np.int64)
    counts[list(exclude)] = 0
    order = np.argsort(-counts, kind="stable")[:number]
    return order[counts[order] > 0]


def count_pairs(
    rows: Any, offsets: Any, size: int, *, window: int | None = None, presence: bool = False
) -> Iterator[tuple[Any, Any, Any]]:
    """How often two tokens occur together: parts (i, j, count) of the upper triangle with its diagonal, sorted.

    Counts ordered pairs of distinct positions: for a unit with token counts c that is c cᵀ - diag(c).  So a token that
    occurs twice in a unit forms two pairs with itself; with ``presence``, where c is 0 or 1, none.

    Args:
        rows: uint16 (tokens,), the row of each token of the text; ``size`` for tokens that are not counted, which still
            take up a position.
        offsets: int64 (units + 1,), where each unit of text begins; pairs do not cross units.
        size: number of rows.
        window: number of positions to either side that count as together; None for the whole unit.
        presence: count each pair at most once per unit; only without a window.
    """
    if size > MOST_ROWS:
        raise ValueError(f"no more than {MOST_ROWS} rows can be counted")
    weights = np.empty(0, np.int32)
    if window is None:
        rows, offsets, weights = _compiled(_distinct)(rows, offsets, size, presence)
    if len(rows) >= 2**32:
        raise ValueError("count fewer tokens at once")
    reach = len(rows) if window is None else min(window, len(rows))
    bounds, self_pairs = _compiled(_frequencies)(rows, weights, size)
    counts = np.zeros(size + 1, np.int64)
    i, j = np.empty((2, CAPACITY + size), np.int32)
    numbers = np.empty(CAPACITY + size, np.int64)
    row = 0
    while row < size:
        last = max(row + 1, int(np.searchsorted(bounds, bounds[row] + OCCURRENCES, side="right")) - 1)
        occurrences = (bounds - bounds[row], *_compiled(_occurrences)(rows, offsets, weights, bounds, row, last, reach))
        while row < last:
            row, length = _compiled(_fill)(rows, weights, *occurrences, self_pairs, row, last, counts, i, j, numbers)
            if length:
                yield i[:length].copy(), j[:length].copy(), numbers[:length].copy()


def cache_folder() -> Path | None:
    """The folder for compiled code, or None if there is no safe one.

    Only the user may write to it, since code from there is executed.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "attention-guide" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_ours = about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if is_ours and os.access(folder, os.W_OK) else None


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    """One of the functions below as machine code."""
    import numba

    folder, config = cache_folder(), cast("Any", numba.config)
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(folder or "")
        return numba.njit(function, cache=folder is not None)
    finally:
        config.CACHE_DIR = before


# plain loops in the subset of Python that numba compiles


def _distinct(rows, offsets, size, presence):
    """Each unit as its distinct tokens in order of appearance, where units begin, and how often each token occurs."""
    kept = np.empty(len(rows), np.uint16)
    weights = np.empty(len(rows), np.int32)
    bounds = np.zeros(len(offsets), np.int64)
    kept_at = np.full(size, -1, np.int64)
    length = 0
    for unit in range(len(offsets) - 1):
        first = length
        for position in range(offsets[unit], offsets[unit + 1]):
            row = rows[position]
            if row >= size:
                continue
            if kept_at[row] >= first:
                if not presence:
                    weights[kept_at[row]] += 1
            else:
                kept_at[row] = length
                kept[length] = row
                weights[length] = 1
                length += 1
        bounds[unit + 1] = length
    return kept[:length], bounds, weights[:length]


def _frequencies(rows, weights, size):
    """Where the occurrences of each row begin in a list of all; and how often each row counts a position with itself."""
    bounds = np.zeros(size + 1, np.int64)
    self_pairs = np.zeros(size, np.int64)
    for position in range(len(rows)):
        row = rows[position]
        if row < size:
            bounds[row + 1] += 1
            self_pairs[row] += weights[position] if len(weights) else 1
    return bounds.cumsum(), self_pairs


def _occurrences(rows, offsets, weights, bounds, first_row, last_row, reach):
    """The occurrences of some rows: where the neighbourhood of each begins and ends, and its weight."""
    following = bounds[first_row:last_row] - bounds[first_row]
    number = bounds[last_row] - bounds[first_row]
    begins, ends = np.empty(number, np.uint32), np.empty(number, np.uint32)
    own = np.empty(number if len(weights) else 0, np.int32)
    for unit in range(len(offsets) - 1):
        first, last = offsets[unit], offsets[unit + 1]
        for position in range(first, last):
            row = rows[position]
            if first_row <= row < last_row:
                n = following[row - first_row]
                following[row - first_row] += 1
                begins[n] = max(first, position - reach)
                ends[n] = min(last, position + reach + 1)
                if len(weights):
                    own[n] = weights[position]
    return begins, ends, own


def _fill(rows, weights, bounds, begins, ends, own, self_pairs, row, last, counts, i, j, numbers):
    """Count row after row until the output may be full; returns the next row and the number of pairs found."""
    size = len(self_pairs)
    length = 0
    while row < last and length + size - row <= len(j):
        # unsigned, because numba checks signed indices for negative values
        for n in range(bounds[row], bounds[row + 1]):
            if len(weights):
                for position in range(np.uint64(begins[n]), np.uint64(ends[n])):
                    counts[rows[position]] += np.int64(own[n]) * weights[position]
            else:
                for position in range(np.uint64(begins[n]), np.uint64(ends[n])):
                    counts[rows[position]] += 1
        counts[row] -= self_pairs[row]
        for other in range(row, size):
            if counts[other]:
                i[length] = row
                j[length] = other
                numbers[length] = counts[other]
                length += 1
        counts[:] = 0
        row += 1
    return row, length
