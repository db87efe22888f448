"""Packs whole sentences into sequences of bounded length: numpy over tokens, a plain loop over sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

NOT_TEXT = -1
"""Document, sentence and offsets of a special token, which is not part of the text."""


class Tokens(NamedTuple):
    """Columns of T tokens, in reading order.

    Attributes:
        id: int32_T, token id.
        document: int32_T.
        sentence: int32_T, running number in the document.
        start, end: int64_T, code points in the document, end exclusive.
    """

    id: Any
    document: Any
    sentence: Any
    start: Any
    end: Any

    def slice(self, first: int, last: int | None = None) -> Tokens:
        return Tokens(*(column[first:last] for column in self))


class Packed(NamedTuple):
    """Finished sequences, concatenated.

    Attributes:
        tokens: all tokens, special ones included.
        special: bool_T, whether a token is special.
        offsets: int32, 0 and then the end of each sequence.
    """

    tokens: Tokens
    special: Any
    offsets: Any


@dataclass
class Packer:
    """Packs the sentences of one split: call `add` for each batch, then `flush`.

    Attributes:
        length: maximum number of tokens in a sequence, including its first and last special token.
        begin, separator: ids of the first and the last token of each sequence.  The separator also stands between two
            documents.
        cross_documents: whether a sequence may continue in the next document.
        cut: number of sentences so far that were longer than a sequence and were cut into pieces.
    """

    length: int
    begin: int
    separator: int
    cross_documents: bool
    cut: int = 0
    _pending: Tokens | None = None

    def add(self, tokens: Tokens) -> Packed | None:
        """Take more tokens and return the sequences that are now full, if any.

        Each call must end at the end of a sentence.
        """
        import numpy as np

        if self._pending is not None:
            tokens = Tokens(*(np.concatenate(pair) for pair in zip(self._pending, tokens, strict=True)))
            self._pending = None
        return self._pack(tokens, last=False)

    def flush(self) -> Packed | None:
        """The last sequences, the very last one perhaps not full."""
        pending, self._pending = self._pending, None
        return self._pack(pending, last=True) if pending is not None else None

    def _pack(self, tokens: Tokens, *, last: bool) -> Packed | None:
        import numpy as np

        total = len(tokens.id)
        if not total:
            return None
        capacity = self.length - 2
        changes = (np.diff(tokens.document) != 0) | (np.diff(tokens.sentence) != 0)
        firsts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        lengths = np.diff(firsts, append=total)
        documents = tokens.document[firsts]
        long = np.flatnonzero(lengths > capacity)
        if len(long):
            lengths, documents = _cut_long(lengths, documents, capacity)
        sizes, documents_of_units = lengths.tolist(), documents.tolist()
        # for each unit the position of its first token in the concatenation of all sequences
        places, ends = [], []
        used, done, previous, open_unit = 0, 0, documents_of_units[0], 0
        for unit, (size, document) in enumerate(zip(sizes, documents_of_units, strict=True)):
            gap = 0
            if used and document != previous:
                gap = 1 if self.cross_documents else capacity
            if used + gap + size > capacity:
                done += used + 2
                ends.append(done)
                used, gap, open_unit = 0, 0, unit
            places.append(done + 1 + used + gap)
            used += gap + size
            previous = document
        if last:
            done += used + 2
            ends.append(done)
            complete = len(sizes)
        else:
            complete = open_unit
        kept = int(lengths[:complete].sum())
        if not last:
            self._pending = tokens.slice(kept)
        # the first piece of a long sentence fills a sequence, so pending sentences are short and are not counted again
        self.cut += len(long)
        if not complete:
            return None
        target = np.arange(kept) + np.repeat(
            np.asarray(places[:complete]) - np.concatenate([[0], np.cumsum(lengths[: complete - 1])]),
            lengths[:complete],
        )
        return lay_out(tokens.slice(0, kept), target, np.asarray(ends), self.begin, self.separator)


def one_each(tokens: Tokens, lengths: Any, begin: int, separator: int) -> Packed:
    """One sequence for each run of ``lengths`` tokens, between a begin and a separator token."""
    import numpy as np

    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(tokens.id)) + 2 * rows + 1
    return lay_out(tokens, places, np.cumsum(lengths + 2), begin, separator)


def lay_out(tokens: Tokens, places: Any, ends: Any, begin: int, separator: int) -> Packed:
    """The concatenated sequences: tokens at ``places``, a begin token at the start of each sequence, separators elsewhere.

    Args:
        ends: the end of each sequence, exclusive.
    """
    import numpy as np

    size = int(ends[-1])
    special = np.ones(size, bool)  # first, last, and between documents
    special[places] = False
    ids = np.full(size, separator, np.int32)
    ids[np.concatenate([[0], ends[:-1]])] = begin
    ids[places] = tokens.id
    columns = [ids]
    for column in tokens[1:]:
        wide = np.full(size, NOT_TEXT, column.dtype)
        wide[places] = column
        columns.append(wide)
    return Packed(Tokens(*columns), special, np.concatenate([[0], ends]).astype(np.int32))


def _cut_long(lengths: Any, documents: Any, capacity: int) -> tuple[Any, Any]:
    """Lengths and documents of units, where units over ``capacity`` are cut into full pieces and a last, shorter one."""
    import numpy as np

    pieces = -(-lengths // capacity)
    cut = np.full(int(pieces.sum()), capacity)
    lasts = np.cumsum(pieces) - 1
    cut[lasts] = lengths - (pieces - 1) * capacity
    return cut, np.repeat(documents, pieces)
