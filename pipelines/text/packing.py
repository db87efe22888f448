"""Whole sentences packed into sequences of bounded length, with numpy over the tokens and a plain loop over sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

NONE = -1
"""Document, sentence and offsets of a special token."""


class Tokens(NamedTuple):
    """Columns of one length T, in reading order.

    Attributes:
        id: int32_T, piece of the vocabulary.
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
    """Finished sequences: `Tokens` with special ones among them, ``special`` bool_T, and where each sequence ends."""

    tokens: Tokens
    special: Any
    offsets: Any


@dataclass
class Packer:
    """Packs the sentences of one split; feed it with `add`, then `flush`.

    Attributes:
        length: longest sequence, its two special tokens among them.
        begin, separator: ids of the first and the last token of every sequence; the separator also stands between two
            documents.
        cross_documents: whether a sequence may go on in the next document.
        cut: sentences so far that were longer than a sequence and were cut in pieces.
    """

    length: int
    begin: int
    separator: int
    cross_documents: bool
    cut: int = 0
    _held: Tokens | None = None

    def add(self, tokens: Tokens) -> Packed | None:
        """Take more tokens; gives the sequences that are full, if there are any.

        A sentence must not be divided between two calls.
        """
        import numpy as np

        if self._held is not None:
            tokens = Tokens(*(np.concatenate(pair) for pair in zip(self._held, tokens, strict=True)))
            self._held = None
        return self._pack(tokens, last=False)

    def flush(self) -> Packed | None:
        """The last sequence, full or not."""
        held, self._held = self._held, None
        return self._pack(held, last=True) if held is not None else None

    def _pack(self, tokens: Tokens, *, last: bool) -> Packed | None:
        import numpy as np

        total = len(tokens.id)
        if not total:
            return None
        room = self.length - 2
        changes = (np.diff(tokens.document) != 0) | (np.diff(tokens.sentence) != 0)
        firsts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        lengths = np.diff(firsts, append=total)
        documents = tokens.document[firsts]
        long = np.flatnonzero(lengths > room)
        if len(long):
            lengths, documents = _cut_long(lengths, documents, room)
        sizes, owners = lengths.tolist(), documents.tolist()
        # for each unit the position of its first token among all sequences laid end to end
        places, ends = [], []
        used, done, owner, open_unit = 0, 0, owners[0], 0
        for unit, (size, document) in enumerate(zip(sizes, owners, strict=True)):
            gap = 0
            if used and document != owner:
                gap = 1 if self.cross_documents else room
            if used + gap + size > room:
                done += used + 2
                ends.append(done)
                used, gap, open_unit = 0, 0, unit
            places.append(done + 1 + used + gap)
            used += gap + size
            owner = document
        if last:
            done += used + 2
            ends.append(done)
            complete = len(sizes)
        else:
            complete = open_unit
        kept = int(lengths[:complete].sum())
        if not last:
            self._held = tokens.slice(kept)
        # the first piece of a long sentence fills a sequence, so what waits is never long and is not counted twice
        self.cut += len(long)
        if not complete:
            return None
        target = np.arange(kept) + np.repeat(
            np.asarray(places[:complete]) - np.concatenate([[0], np.cumsum(lengths[: complete - 1])]),
            lengths[:complete],
        )
        return _lay_out(tokens.slice(0, kept), target, np.asarray(ends), self.begin, self.separator)


def one_each(tokens: Tokens, lengths: Any, begin: int, separator: int) -> Packed:
    """A sequence for each run of ``lengths`` tokens, with the first and the last token that every sequence has."""
    import numpy as np

    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(tokens.id)) + 2 * rows + 1
    return _lay_out(tokens, places, np.cumsum(lengths + 2), begin, separator)


def _lay_out(tokens: Tokens, places: Any, ends: Any, begin: int, separator: int) -> Packed:
    """Tokens at their places among all sequences laid end to end, which are separators and begins elsewhere."""
    import numpy as np

    size = int(ends[-1])
    special = np.ones(size, bool)  # first, last, and between documents
    special[places] = False
    ids = np.full(size, separator, np.int32)
    ids[np.concatenate([[0], ends[:-1]])] = begin
    ids[places] = tokens.id
    columns = [ids]
    for column in tokens[1:]:
        wide = np.full(size, NONE, column.dtype)
        wide[places] = column
        columns.append(wide)
    return Packed(Tokens(*columns), special, np.concatenate([[0], ends]).astype(np.int32))


def _cut_long(lengths: Any, documents: Any, room: int) -> tuple[Any, Any]:
    """Lengths and documents of units no longer than ``room``: long ones in pieces, the last one short."""
    import numpy as np

    pieces = -(-lengths // room)
    cut = np.full(int(pieces.sum()), room)
    lasts = np.cumsum(pieces) - 1
    cut[lasts] = lengths - (pieces - 1) * room
    return cut, np.repeat(documents, pieces)
