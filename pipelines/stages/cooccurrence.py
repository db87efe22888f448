"""Stage ``build-cooccur``: counts how often frequent tokens occur together in the training text of a corpus.

Writes ``vocabulary.parquet``, the counted tokens, most frequent first; ``counts.parquet``, the pairs that occur, as a sorted
upper triangle with its diagonal; and the tokenizer's files under ``tokenizer/``.  Counts are of ordered pairs of distinct
positions.  They become scores when they are read: see `pipelines.statistics.cooccurrence_table.load_table`.  The work is in
`pipelines.statistics.pair_files`.

Source: Xing et al. 2020, section 3.3; deviation: the default window is one sentence.
"""

from __future__ import annotations

from pkgutil import resolve_name

from pydantic import Field, field_validator, model_validator

from guidance.errors import InputError
from pipelines.engine import executor
from pipelines.engine.declaration import Command, Stage
from pipelines.engine.shards import evenly, merge_tree, row_groups
from pipelines.engine.stage import Result, Run, knob
from pipelines.inputs import Corpus, Tokenizer
from pipelines.lazy import pa
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import COUNTS, OF_COUNTS, VOCABULARY, Columns, schema_of
from pipelines.text.corpus_files import CountedColumn, check_column

ROWS = 1 << 20
"""Rows per row group of ``counts.parquet``."""

WIDEST = 10_000


class Config(executor.Config):
    """Which tokens to count, and what counts as together."""

    top: int = Field(
        5000, ge=1, le=65_000, description="Number of tokens to count, the most frequent ones; never special tokens."
    )
    window: str = Field(
        "sentence",
        description="Window in which tokens are together: `sentence`, or a number of tokens to either side in a sentence.",
    )
    cross_sentences: bool = Field(
        False,
        description="Let windows cross sentences within a block (a paragraph, or a line); only with a number as --window.",
    )
    presence: bool = Field(
        False, description="Count a pair of different tokens at most once per sentence; only with --window sentence."
    )
    column: CountedColumn = "both"
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


OF_VOCABULARY: Columns = {
    "row": ("int32", "row and column in the counts, from 0"),
    "id": ("int32", "piece of the tokenizer's vocabulary"),
    "token": ("string", "as the tokenizer writes it"),
    "count": ("int64", "occurrences in the training text"),
}
"""Columns of ``vocabulary.parquet``."""


def build(run: Run[Config]) -> None:
    """Count pairs of tokens.  Raises InputError if the tokenizer is damaged, or there is no training text."""
    from pipelines.statistics.pair_files import arrays_of, count_all, count_schema, merge_pairs
    from pipelines.text.tokenizer_files import plain_tokenizer

    config = run.config
    corpus: Artifact = run.inputs["corpus"]
    if not corpus.counts.get("splits", {}).get("train"):
        raise InputError(f"{corpus.reference} has no training text to count", hint="build it with a smaller --valid")
    paths, encoder, frequencies, ids = count_all(run)
    with run.progress.task("Merge"):
        merged = merge_tree(merge_pairs, paths, {"rows": len(ids)}, config)
    columns = [range(len(ids)), ids, [encoder.tokenizer.id_to_token(int(id_)) for id_ in ids], frequencies[ids]]
    schema = schema_of(OF_VOCABULARY)
    with run.out.parquet(VOCABULARY, schema) as file:
        arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
        file.write_table(pa.table(arrays, schema=schema))
    pairs = positions = 0
    with run.out.parquet(COUNTS, count_schema()) as file:
        for table in evenly(row_groups(merged), ROWS):
            file.write_table(table)
            i, j, count = arrays_of(table)
            pairs += len(i)
            positions += 2 * int(count.sum()) - int(count[i == j].sum())
    run.out.counts |= {
        "vocabulary": len(ids),
        "of": len(frequencies),
        "tokens": int(frequencies.sum()),
        "counted_tokens": int(frequencies[ids].sum()),
        "pairs": pairs,
        "places": positions,
    }
    for name, data in plain_tokenizer(encoder.files, encoder.tokenizer).items():
        run.out.write(f"tokenizer/{name}", data)
    if len(ids) < config.top:
        run.warn(f"only {len(ids):,} tokens occur, fewer than --top {config.top:,}")
    if not pairs:
        run.warn("no two of the counted tokens occur together")


STAGE: Stage[Config, Result | None] = Stage(
    "build-cooccur",
    "cooccur",
    2,
    Config,
    build,
    takes={"corpus": Corpus(), "tokenizer": Tokenizer()},
    prepare=check_column,
    share=lambda work: resolve_name("pipelines.statistics.pair_files:count_all")(work),
    writes={VOCABULARY: OF_VOCABULARY, COUNTS: OF_COUNTS},
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
