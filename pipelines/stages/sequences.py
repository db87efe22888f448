"""Stage ``build-sequences``: packs whole sentences of a corpus into sequences of token ids.

Each token keeps its position in the text.  Writes ``train.parquet``, ``valid.parquet`` and ``test.parquet`` (for splits
with text), one row per sequence, and the tokenizer's files under ``tokenizer/``, so that later stages need only the
sequences.  With ``--packing pairs`` a row is an example with two texts; see `pipelines.text.pair_sequences`.  With
``--packing examples`` it is an example of a task with its label; see `pipelines.text.example_sequences`.

Source: Liu et al. 2019 (RoBERTa), section 4.2, FULL-SENTENCES: sequences may cross documents, with one separator between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.command import Command, Table
from pipelines.engine.declaration import Opening, Stage
from pipelines.engine.stage import Run
from pipelines.inputs import Corpus, Tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.text.corpus_files import SPLITS, read_blocks
from pipelines.text.encoding import BLOCK_COLUMNS, Encoder, batches_of
from pipelines.text.packing import Packed, Packer, Tokens
from pipelines.text.sequence_files import SequenceFile, sequence_schema, warn
from pipelines.text.tokenizer_files import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files

__all__ = ["STAGE", "Config", "run"]

SHORTEST, LONGEST = 8, 1 << 20
"""Tokens that the longest sequence may have."""


def check_length(max_length: int) -> None:
    """Raises InputError when sequences cannot have this length."""
    if not SHORTEST <= max_length <= LONGEST:
        raise InputError(
            f"a longest sequence of {max_length:,} tokens: expected {SHORTEST} to {LONGEST:,}",
            hint="--max-length or --sequence-length says it; by default it is that of the model",
        )


class Config(stage.Config):
    """How text becomes sequences."""

    max_length: int = Field(
        128, ge=SHORTEST, le=LONGEST, description="longest sequence, in tokens, including special ones"
    )
    packing: Literal["full-sentences", "document", "pairs", "examples"] = Field(
        "full-sentences",
        description="full-sentences: a sequence may continue in the next document; document: it ends with its document; "
        "pairs, for translation: it is the first text of an example, and the second text is its target; examples: it is "
        "an example of a dataset with its label, one or two texts",
    )


def _prepare(opening: Opening[Config]) -> None:
    if "target_tokenizer" in opening.inputs and opening.config.packing != "pairs":
        raise InputError("--target-tokenizer needs --packing pairs", hint="add --packing pairs")
    if opening.inputs["corpus"].counts.get("shape") == "tags":
        opening.stage = replace(
            STAGE, version=3
        )  # long examples of tagged words are divided; all others are as in version 2


def build(run: Run[Config]) -> None:
    """Pack a corpus into sequences.

    Raises:
        InputError: the tokenizer is damaged, or has no tokens to begin and end a sequence.
    """
    if run.config.packing == "pairs":
        from pipelines.text import pair_sequences

        return pair_sequences.build(run)
    if run.config.packing == "examples":
        from pipelines.text import example_sequences

        return example_sequences.build(run)
    config = run.config
    corpus: Artifact = run.inputs["corpus"]
    files = tokenizer_files(run.inputs["tokenizer"])
    tokenizer = load_tokenizer(files)
    special = special_ids(files, tokenizer)
    writers: dict[str, _SplitWriter] = {}
    total = int(corpus.counts.get("characters", 0)) or None
    with contextlib.ExitStack() as stack, run.progress.task("sequences", total=total, unit="chars") as bar:
        encoder = Encoder(tokenizer, special)
        for blocks, encodings in _encoded_ahead(tokenizer, _batches(corpus)):
            tokens, split_of_token = encoder(blocks, encodings)
            del encodings
            for split in SPLITS:
                chosen = split_of_token == SPLITS.index(split)
                if not chosen.any():
                    continue
                if split not in writers:
                    writers[split] = _SplitWriter(split, config, special, run, stack)
                writers[split].add(tokens if chosen.all() else Tokens(*(column[chosen] for column in tokens)))
            bar.advance(sum(map(len, blocks["text"])))
        for writer in writers.values():
            writer.flush()
    if not writers:
        raise InputError(f"{corpus.reference} has no text that this tokenizer turns into tokens")
    for name, data in plain_tokenizer(files, tokenizer).items():
        run.out.write(f"tokenizer/{name}", data)
    run.out.counts |= {
        "max_length": config.max_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "special_tokens": special,
        "splits": {split: writers[split].counts() for split in SPLITS if split in writers},
    }
    warn(run, encoder.replaced)


def _batches(corpus: Artifact) -> Iterator[dict[str, Any]]:
    for batch in read_blocks(corpus, BLOCK_COLUMNS, batch=4096):
        yield from batches_of(batch)


def _encoded_ahead(tokenizer: Any, batches: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each batch with its encodings.  The next batch is encoded in a thread meanwhile; the tokenizer releases the GIL."""

    def encode() -> tuple[dict[str, Any], list[Any]] | None:
        blocks = next(batches, None)
        return None if blocks is None else (blocks, tokenizer.encode_batch(blocks["text"], add_special_tokens=False))

    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(encode)
        while (ready := waiting.result()) is not None:
            waiting = pool.submit(encode)
            yield ready
            del ready


class _SplitWriter:
    """Packs and writes one split."""

    def __init__(
        self, split: str, config: Config, special: Mapping[str, int | None], run: Run[Config], stack: Any
    ) -> None:
        begin, separator = special["cls"], special["sep"]
        assert begin is not None and separator is not None
        self._packer = Packer(config.max_length, begin, separator, config.packing == "full-sentences")
        self._file = SequenceFile(split, sequence_schema(), special["unk"], run, stack)

    def add(self, tokens: Tokens) -> None:
        self._write(self._packer.add(tokens))

    def flush(self) -> None:
        self._write(self._packer.flush())

    def _write(self, packed: Packed | None) -> None:
        if packed is not None:
            self._file.write(packed)

    def counts(self) -> dict[str, int]:
        """Those of `SequenceFile`, and the number of ``cut_sentences``."""
        return {**self._file.counts, "cut_sentences": self._packer.cut}


def _sizes(made: Artifact, config: Config) -> Table:
    """How many sequences and tokens each split has."""
    splits = made.counts["splits"].items()
    return Table(
        notes=["; ".join(f"{name} {n['sequences']:,} sequences, {n['tokens']:,} tokens" for name, n in splits)]
    )


STAGE = Stage(
    "build-sequences",
    "sequences",
    2,
    Config,
    build,
    takes={
        "corpus": Corpus(),
        "tokenizer": Tokenizer(),
        "target_tokenizer": Tokenizer(
            "Tokenizer for the second text of each pair; by default the same.", optional=True, option=True
        ),
    },
    prepare=_prepare,
    command=Command(
        "build-sequences",
        "Pack the sentences of a corpus into sequences of token ids, or write pairs of texts as source and target.",
        examples=(
            "guide build-sequences wiki bpe",
            "guide build-sequences wiki@2 bpe --max-length 128 --name wiki-128",
            "guide build-sequences wiki ./bert-base --max-length 128 --name wiki-128-of-bert   # the tokenizer of a model",
            "guide build-sequences multi30k german --target-tokenizer english --packing pairs --name multi30k-pairs",
            "guide build-sequences reviews ./bert-base --packing examples",
        ),
        next=lambda made, _: (
            "guide pretrain {}" + (" --objective translation" if made.manifest["config"]["packing"] == "pairs" else "")
        ),
        show=_sizes,
    ),
)

run = STAGE.run
