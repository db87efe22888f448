"""From blocks of text to token ids, each with its position in the text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from guidance.errors import InputError
from pipelines.engine.shards import remembered
from pipelines.engine.stage import Files
from pipelines.storage.artifacts import Artifact
from pipelines.text.tokenizer_files import folder_files, load_tokenizer, special_ids, tokenizer_files

_BATCH_CHARACTERS = 1 << 20

BLOCK_COLUMNS = ("document", "split", "start", "first_sentence", "text", "sentences")
"""The columns of blocks that `Encoder` needs."""


def batches_of(part: Any) -> Iterator[dict[str, Any]]:
    """A record batch of blocks, cut into batches of about `_BATCH_CHARACTERS`; see `block_columns`."""
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
        **{name: part.column(name).to_numpy() for name in ("document", "start", "first_sentence")},
        "text": part.column("text").to_pylist(),
        "split": part.column("split").cast("string").to_pylist(),
        "sentence_counts": spans.value_lengths().to_numpy(),
        "sentence_starts": spans.flatten().field("start").to_numpy(),
    }


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

    def at(self, places: Any) -> Tokens:
        """The tokens at some places: a slice, numbers, or a mask."""
        return Tokens(*(column[places] for column in self))


class Encoder:
    """A tokenizer that turns blocks into `Tokens`.

    Attributes:
        files: the files of the tokenizer; special: the ids of its special tokens, see `special_ids`.
        begin, separator: the ids of the first and the last token of a sequence.
        replaced: number of text tokens that had the id of a special token and became the unknown token.
    """

    def __init__(self, tokenizer: Artifact | Files) -> None:
        self.files = tokenizer_files(tokenizer)
        self.tokenizer = load_tokenizer(self.files)
        self.special = special_ids(self.files, self.tokenizer)
        begin, separator, self._unknown = (self.special[role] for role in ("cls", "sep", "unk"))
        assert begin is not None and separator is not None, "special_ids refuses such tokenizers"
        self.begin, self.separator = begin, separator
        self._forbidden = np.array(sorted(self.special_tokens() - {self._unknown}), np.int32)
        word_starts = map(self.tokenizer.token_to_id, ("▁", "Ġ"))
        self._bare = np.array([id_ for id_ in word_starts if id_ is not None], np.int32)
        self.replaced = 0

    def special_tokens(self) -> set[int]:
        """The ids of all special tokens, also of those without a role."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {id_ for id_ in self.special.values() if id_ is not None} | {id_ for id_, t in added if t.special}

    def encode(self, blocks: Mapping[str, Any]) -> list[Any]:
        """The encoding of each block, without special tokens."""
        encodings: list[Any] = self.tokenizer.encode_batch(blocks["text"], add_special_tokens=False)
        return encodings

    def __call__(self, blocks: Mapping[str, Any], encodings: list[Any] | None = None) -> tuple[Tokens, Any]:
        """All tokens of a batch, and how many each block has; its encodings may be known."""
        encodings = self.encode(blocks) if encodings is None else encodings
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
        sentence = np.searchsorted(boundaries, last_letter, side="right") - 1
        within = np.maximum(sentence - np.repeat(first_boundary, counts), 0)
        block_start = np.repeat(blocks["start"], counts)
        tokens = Tokens(
            ids,
            np.repeat(blocks["document"].astype(np.int32), counts),
            np.maximum.accumulate(within + np.repeat(first_boundary, counts)).astype(np.int32)
            + np.repeat((blocks["first_sentence"] - first_boundary).astype(np.int32), counts),
            start + block_start,
            end + block_start,
        )
        return tokens, counts

    def _replace_special(self, ids: Any) -> None:
        self.replaced += replace_special(ids, self._forbidden, self._unknown)


def replace_special(ids: Any, special: Iterable[int | None], unknown: int | None, is_text: Any = True) -> int:
    """Replace special tokens in a text by the unknown token, in place, and say how many: text never becomes a special token, even
    if the vocabulary lists one as an ordinary token.  Raises InputError if there is no unknown token.

    Args:
        ids: of tokens, an array; is_text: which of them are text, by default all.
    """
    wrong = is_text & np.isin(ids, [id_ for id_ in special if id_ is not None])
    if count := int(wrong.sum()):
        if unknown is None:
            raise InputError(
                "the text spells a special token, but the tokenizer has no unknown token to replace it",
                hint="use a tokenizer with an unknown token",
            )
        ids[wrong] = unknown
    return count


# in the worker processes of a statistic


def tokenizer_folder(tokenizer: Artifact | Files) -> str:
    """The folder of the tokenizer's files, as an absolute path that other processes can open."""
    return str((tokenizer.path if isinstance(tokenizer, Artifact) else tokenizer.paths[0].parent).absolute())


def open_encoder(folder: str) -> Encoder:
    """The encoder with the tokenizer of a folder; each process opens it once."""
    return _opened(os.path.join(folder, "tokenizer.json"))


_opened = remembered(lambda file: Encoder(folder_files(Path(file).parent)))


def tokens_of(folder: str, tables: Iterable[Any]) -> Iterator[Tokens]:
    """The tokens of some tables of blocks, with the ids that ``build-sequences`` gives them, but without special tokens.

    Comes in batches of about a million characters.  The tables must have the `BLOCK_COLUMNS`.
    """
    encoder = open_encoder(folder)
    for table in tables:
        for part in table.combine_chunks().to_batches():
            for batch in batches_of(part):
                yield encoder(batch)[0]
