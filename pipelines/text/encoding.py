"""From blocks of text to token ids, each with its position in the text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from guidance.errors import InputError
from pipelines.text.corpus_files import SPLITS
from pipelines.text.packing import Tokens

_BATCH_CHARACTERS = 1 << 20

BLOCK_COLUMNS = ("document", "split", "start", "first_sentence", "text", "sentences")
"""The columns of blocks that `Encoder` needs."""


def batches_of(part: Any) -> Iterator[dict[str, Any]]:
    """A record batch of blocks, cut into batches of about `_BATCH_CHARACTERS`; see `block_columns`."""
    import pyarrow.compute as pc

    sums = [0, *itertools.accumulate(pc.utf8_length(part.column("text")).to_pylist())]
    first = 0
    while first < part.num_rows:
        last = first + 1
        while last < part.num_rows and sums[last + 1] - sums[first] <= _BATCH_CHARACTERS:
            last += 1
        yield block_columns(part.slice(first, last - first))
        first = last


def block_columns(part: Any) -> dict[str, Any]:
    """A record batch of blocks as columns by name: lists for text, numpy arrays for numbers."""
    spans = part.column("sentences")
    return {
        "text": part.column("text").to_pylist(),
        "document": part.column("document").to_numpy(),
        "split": part.column("split").cast("string").to_pylist(),
        "start": part.column("start").to_numpy(),
        "first_sentence": part.column("first_sentence").to_numpy(),
        "sentence_counts": spans.value_lengths().to_numpy(),
        "sentence_starts": spans.flatten().field("start").to_numpy(),
    }


class Encoder:
    """Turns blocks and their encodings into `Tokens`.

    Attributes:
        replaced: number of text tokens that had the id of a special token and became the unknown token.
    """

    def __init__(self, tokenizer: Any, special: Mapping[str, int | None]) -> None:
        import numpy as np

        unknown = special["unk"]
        added = [id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        forbidden = ({*added, *(id_ for id_ in special.values() if id_ is not None)}) - {unknown}
        self._forbidden = np.array(sorted(forbidden), np.int32)
        self._bare = np.array([i for i in map(tokenizer.token_to_id, ("▁", "Ġ")) if i is not None], np.int32)
        self._unknown = unknown
        self.replaced = 0

    def __call__(self, blocks: Mapping[str, Any], encodings: list[Any]) -> tuple[Tokens, Any]:
        """All tokens of a batch, and the split of each as its number in `SPLITS`."""
        import numpy as np

        ids_lists = [encoding.ids for encoding in encodings]
        counts = np.fromiter(map(len, ids_lists), np.int64, len(ids_lists))
        total = int(counts.sum())
        ids = np.fromiter(itertools.chain.from_iterable(ids_lists), np.int32, total)
        pairs = itertools.chain.from_iterable(encoding.offsets for encoding in encodings)
        offsets = np.fromiter(itertools.chain.from_iterable(pairs), np.int64, 2 * total).reshape(total, 2)
        start, end = offsets[:, 0], offsets[:, 1]
        # the word-start mark that the tokenizer adds before a block covers no character, but its offsets claim the first
        firsts = (np.cumsum(counts) - counts)[counts > 0]
        bare = firsts[np.isin(ids[firsts], self._bare)]
        end[bare] = start[bare]
        self._replace_special(ids)
        # shift each block behind the one before it, so that one search serves the whole batch
        lengths = np.fromiter(map(len, blocks["text"]), np.int64, len(counts)) + 1
        shifts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sentence_counts = blocks["sentence_counts"]
        boundaries = blocks["sentence_starts"] + np.repeat(shifts, sentence_counts)
        first_boundary = np.concatenate([[0], np.cumsum(sentence_counts)[:-1]])
        # the last character decides: a token may include the space before its sentence
        last_letter = np.maximum(end - 1, start) + np.repeat(shifts, counts)
        found = np.searchsorted(boundaries, last_letter, side="right") - 1
        within = np.maximum(found - np.repeat(first_boundary, counts), 0)
        block_start = np.repeat(blocks["start"], counts)
        tokens = Tokens(
            ids,
            np.repeat(blocks["document"].astype(np.int32), counts),
            np.maximum.accumulate(within + np.repeat(first_boundary, counts)).astype(np.int32)
            + np.repeat((blocks["first_sentence"] - first_boundary).astype(np.int32), counts),
            start + block_start,
            end + block_start,
        )
        number = {split: index for index, split in enumerate(SPLITS)}
        splits = np.fromiter((number[split] for split in blocks["split"]), np.int8, len(counts))
        return tokens, np.repeat(splits, counts)

    def _replace_special(self, ids: Any) -> None:
        """Replace special tokens by the unknown token, in place: text never becomes a special token, even if the
        vocabulary lists one as an ordinary token.

        Raises:
            InputError: the tokenizer has no unknown token.
        """
        import numpy as np

        wrong = np.isin(ids, self._forbidden)
        count = int(wrong.sum())
        if count:
            if self._unknown is None:
                raise InputError(
                    "the text spells a special token, but the tokenizer has no unknown token to replace it",
                    hint="use a tokenizer with an unknown token",
                )
            ids[wrong] = self._unknown
            self.replaced += count
