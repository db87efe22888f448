"""Stage ``build-cooccur``: counts how often frequent tokens occur together in the training text of a corpus.

Writes ``vocabulary.parquet``, the counted tokens, most frequent first; ``counts.parquet``, the pairs that occur, as a sorted
upper triangle with its diagonal; and the tokenizer's files under ``tokenizer/``.  Counts are of ordered pairs of distinct
positions.  They become scores when they are read: see `pipelines.statistics.cooccurrence_table.load_table`.

There are two maps.  The first encodes text and stores the ids, since reading them back takes a hundredth of the time of
encoding again.  The second counts pairs in far larger pieces, since the counts of a piece are as large as a few megabytes
of text.

Source: Xing et al. 2020, section 3.3; deviation: the default window is one sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from guidance.errors import InputError
from pipelines.engine import executor
from pipelines.engine.command import Command
from pipelines.engine.declaration import Opening, Stage
from pipelines.engine.shards import ShareDone, evenly, map_shards, merge_tree, row_groups, shards_of
from pipelines.engine.stage import Run, Work, knob
from pipelines.inputs import Corpus, Tokenizer
from pipelines.progress import log
from pipelines.statistics import pair_files
from pipelines.storage.artifacts import Artifact
from pipelines.storage.columns import column
from pipelines.storage.tables import COUNTS, VOCABULARY
from pipelines.text.corpus_files import BLOCK_OF_COLUMN, check_pairs
from pipelines.text.tokenizer_files import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files
from pipelines.text.tokens import tokenizer_folder

__all__ = ["STAGE", "Config", "run", "vocabulary_schema"]

ROWS = 1 << 20
"""Rows per row group of ``counts.parquet``."""

PIECE = 32_000_000
"""Approximate number of characters whose pairs are counted at once.  It determines how many files the second map writes."""

WIDEST = 10_000


class Config(executor.Config):
    """Which tokens to count, and what counts as together."""

    top: int = Field(
        5000, ge=1, le=65_000, description="Number of tokens to count, the most frequent ones; never special tokens."
    )
    window: str = Field(
        "sentence",
        description="What counts as together: `sentence`, or a number of tokens to either side in a sentence.",
    )
    cross_sentences: bool = Field(
        False,
        description="Let windows cross sentences within a block (a paragraph, or a line); only with a number as --window.",
    )
    presence: bool = Field(False, description="Count a pair at most once per sentence; only with --window sentence.")
    column: Literal["both", "text", "pair"] = Field(
        "both", description="For examples with two texts: which to count.  In translation data the source is text."
    )
    shard_size: int = knob(4_000_000, "Approximate number of characters per shard.", ge=1)

    @field_validator("window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        if value == "sentence":
            return value
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= WIDEST:
            raise ValueError(f"expected `sentence` or a number from 1 to {WIDEST}")
        return str(int(value))

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.window == "sentence" and self.cross_sentences:
            raise ValueError("--cross-sentences needs a --window given as a number")
        if self.window != "sentence" and self.presence:
            raise ValueError("--presence needs --window sentence, since it counts a pair once per sentence")
        return self


def vocabulary_schema() -> Any:
    """Columns of ``vocabulary.parquet``."""
    import pyarrow as pa

    return pa.schema(
        [
            column("row", pa.int32(), "row and column in the counts, from 0"),
            column("id", pa.int32(), "piece of the tokenizer's vocabulary"),
            column("token", pa.string(), "as the tokenizer writes it"),
            column("count", pa.int64(), "occurrences in the training text"),
        ]
    )


def _prepare(opening: Opening[Config]) -> None:
    if opening.config.column != "both":
        check_pairs(opening.inputs["corpus"])


def build(run: Run[Config]) -> None:
    """Count pairs of tokens.

    Raises:
        InputError: the tokenizer is damaged, or there is no training text.
    """
    config = run.config
    corpus: Artifact = run.inputs["corpus"]
    if not corpus.counts.get("splits", {}).get("train"):
        raise InputError(f"{corpus.reference} has no training text to count", hint="build it with a smaller --valid")
    counting = _Counting(run)
    paths = counting.run()
    with run.progress.task("Merge"):
        merged = merge_tree(pair_files.merge_pairs, paths, {"rows": len(counting.ids)}, config)
    _write_vocabulary(counting, run)
    pairs = positions = 0
    with run.out.parquet(COUNTS, pair_files.count_schema()) as file:
        for table in evenly(row_groups(merged), ROWS):
            file.write_table(table)
            i, j, count = pair_files.arrays_of(table)
            pairs += len(i)
            positions += 2 * int(count.sum()) - int(count[i == j].sum())
    run.out.counts |= {
        "vocabulary": len(counting.ids),
        "of": counting.vocabulary_size,
        "tokens": int(counting.frequencies.sum()),
        "counted_tokens": int(counting.frequencies[counting.ids].sum()),
        "pairs": pairs,
        "places": positions,
    }
    for name, data in plain_tokenizer(counting.files, counting.tokenizer).items():
        run.out.write(f"tokenizer/{name}", data)
    if len(counting.ids) < config.top:
        run.warn(f"only {len(counting.ids):,} tokens occur, fewer than --top {config.top:,}")
    if not pairs:
        run.warn("no two of the counted tokens occur together")


def _write_vocabulary(counting: _Counting, run: Run[Config]) -> None:
    import pyarrow as pa

    tokens = [counting.tokenizer.id_to_token(int(id_)) for id_ in counting.ids]
    columns = [range(len(tokens)), counting.ids, tokens, counting.frequencies[counting.ids]]
    with run.out.parquet(VOCABULARY, vocabulary_schema()) as file:
        arrays = [pa.array(column, field.type) for column, field in zip(columns, vocabulary_schema(), strict=True)]
        file.write_table(pa.table(arrays, schema=vocabulary_schema()))


class _Counting:
    """The two maps, and the vocabulary, which is chosen between them.

    Attributes:
        files: the tokenizer's files.
        frequencies: how often each id occurs, int64; None before `run`.
        ids: ids of the counted tokens, most frequent first; None before `run`.
    """

    def __init__(self, work: Work[Config]) -> None:
        self._config, self._folder, self._progress = work.config, work.partial, work.progress
        self._corpus: Artifact = work.inputs["corpus"]
        self._tokenizer_folder = tokenizer_folder(work.inputs["tokenizer"])
        self.files = tokenizer_files(work.inputs["tokenizer"])
        self.tokenizer = load_tokenizer(self.files)
        self._special = special_ids(self.files, self.tokenizer)
        self.vocabulary_size = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        self.frequencies: Any = None
        self.ids: Any = None

    def run(self) -> list[Path]:
        """The partial files of the second map.

        Raises:
            ShareDone: ``--shard`` asked for a share, which is done.
        """
        from pipelines.statistics.pair_counting import most_frequent

        encoded = self._encode()
        self.frequencies = self._frequencies(encoded)
        self.ids = most_frequent(self.frequencies, self._config.top, exclude=self._excluded())
        if not len(self.ids):
            raise InputError(f"{self._corpus.reference} has no training text that this tokenizer turns into tokens")
        window = None if self._config.window == "sentence" else int(self._config.window)
        settings = {"ids": self.ids.tolist(), "window": window, "presence": self._config.presence}
        pieces, folder = self._pieces(encoded), self._folder / "pairs"
        return map_shards(pair_files.count, pieces, settings, folder, self._config, self._progress)

    def _encode(self) -> list[Path]:
        """The partial files of the first map.  With ``--shard`` raises ShareDone unless all shards are encoded now."""
        shards = shards_of(self._corpus, self._config.shard_size)
        settings = {"tokenizer": self._tokenizer_folder, "cross": self._config.cross_sentences}
        settings["block"] = BLOCK_OF_COLUMN.get(self._config.column)
        folder = self._folder / "ids"
        try:
            return map_shards(pair_files.encode, shards, settings, folder, self._config, self._progress)
        except ShareDone:
            done = {path.name.split(".")[0]: path for path in folder.glob("*.partial")}
            missing = sum(shard.name not in done for shard in shards)
            if missing:
                log.info(
                    "%d shards are not encoded yet; once they are, run the same shares again to count pairs", missing
                )
                raise
            return [done[shard.name] for shard in shards]

    def _frequencies(self, encoded: Sequence[Path]) -> Any:
        import numpy as np

        merged = merge_tree(pair_files.merge_frequencies, encoded, {"size": self.vocabulary_size}, self._config)
        return pair_files.sum_of_frequencies([merged], np.zeros(self.vocabulary_size, np.int64))

    def _excluded(self) -> set[int]:
        """Ids of special tokens."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {id_ for id_ in self._special.values() if id_ is not None} | {id_ for id_, t in added if t.special}

    def _pieces(self, encoded: Sequence[Path]) -> list[pair_files.Piece]:
        """Consecutive files in pieces of about `PIECE` characters; independent of ``--shard``, so that all shares agree."""
        number = min(len(encoded), max(1, round(self._corpus.counts.get("characters", 0) / PIECE)))
        bounds = [len(encoded) * piece // number for piece in range(number + 1)]
        return [pair_files.Piece(tuple(map(str, encoded[start:stop]))) for start, stop in itertools.pairwise(bounds)]


STAGE = Stage(
    "build-cooccur",
    "cooccur",
    2,
    Config,
    build,
    takes={"corpus": Corpus(), "tokenizer": Tokenizer()},
    prepare=_prepare,
    share=lambda work: _Counting(work).run(),
    command=Command(
        "build-cooccur",
        "Count how often frequent tokens occur together in the training text of a corpus.",
        examples=(
            "guide build-cooccur wiki bpe --name wiki-pairs",
            "guide build-cooccur wiki bpe --top 10000 --window 15",
            "guide build-cooccur wiki ./my-model --jobs 8   # a folder with tokenizer.json",
            "guide build-cooccur wiki bpe --shard 3/64   # one of 64 jobs; run all twice (encode, count), then without --shard",
        ),
        next='guide cooccur show WORD --text "WORDS" --cooccur {}',
    ),
)

run = STAGE.run
