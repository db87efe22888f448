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
from typing import Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.stage import Options, Result, Run, Stage, run_stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.text.corpus_files import SPLITS, read_blocks
from pipelines.text.encoding import BLOCK_COLUMNS, Encoder, batches_of
from pipelines.text.packing import Packed, Packer, Tokens
from pipelines.text.sequence_files import SequenceFile, sequence_schema, warn
from pipelines.text.tokenizer_files import load_tokenizer, open_tokenizer, plain_tokenizer, special_ids, tokenizer_files

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


def run(
    corpus: str,
    tokenizer: str,
    config: Config,
    *,
    target_tokenizer: str | None = None,
    store: Store,
    **options: Unpack[Options],
) -> Result:
    """Pack a corpus into sequences.

    Args:
        tokenizer: a reference, or a Hugging Face folder, of which only ``tokenizer.json`` and the special tokens are read.
        target_tokenizer: likewise, for the second text of each pair; by default ``tokenizer``.

    Raises:
        InputError: an artifact does not exist; or the tokenizer is damaged or has no tokens to begin and end a sequence.
    """
    if target_tokenizer and config.packing != "pairs":
        raise InputError("--target-tokenizer needs --packing pairs", hint="add --packing pairs")
    with contextlib.ExitStack() as stack:
        inputs: dict[str, stage.Input] = {"corpus": stack.enter_context(store.load(corpus, kind="corpus"))}
        for role, reference in (("tokenizer", tokenizer), ("target_tokenizer", target_tokenizer)):
            if reference:
                inputs[role] = open_tokenizer(reference, store, stack)
        tagged = inputs["corpus"].counts.get("shape") == "tags"  # type: ignore[attr-defined]
        return run_stage(_OF_TAGS if tagged else STAGE, config, inputs, store=store, **options)


def build(run: Run) -> None:
    """Build the artifact; see `run`."""
    if run.config.packing == "pairs":
        from pipelines.text import pair_sequences

        return pair_sequences.build(run)
    if run.config.packing == "examples":
        from pipelines.text import example_sequences

        return example_sequences.build(run)
    config: Config = run.config
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

    def __init__(self, split: str, config: Config, special: Mapping[str, int | None], run: Run, stack: Any) -> None:
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


STAGE = Stage("build-sequences", "sequences", 2, Config, build)
_OF_TAGS = replace(STAGE, version=3)
"""Since version 3 long examples of tagged words are divided; all others are as in version 2."""
