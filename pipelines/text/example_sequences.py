"""Sequences of a task's examples, ``build-sequences --packing examples``: one row for each example of a dataset.

A row is ``[CLS] text [SEP]``, or ``[CLS] text [SEP] pair [SEP]`` for examples with two texts.  A tokenizer whose own
template has two separators between texts, as RoBERTa's has, gets two.  Every example has a row, in the order of the dataset:
texts that are too long are cut, the longer one of a pair first, and a text without tokens leaves its special tokens.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from pipelines.engine.stage import Run
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.tables import DOCUMENTS
from pipelines.text.corpus_files import SPLITS, whole_documents
from pipelines.text.encoding import Encoder, block_columns
from pipelines.text.packing import Packed, Tokens, lay_out
from pipelines.text.sequence_files import SequenceFile, example_schema, warn
from pipelines.text.tokenizer_files import load_tokenizer, plain_tokenizer, special_ids, tokenizer_files


def build(run: Run) -> None:
    """Write the examples of a dataset as sequences; see `pipelines.stages.sequences.run`."""
    corpus: Artifact = run.inputs["corpus"]
    if corpus.counts.get("shape") in ("summaries", "segments"):
        from pipelines.text import document_sequences

        return document_sequences.build(run)
    files = tokenizer_files(run.inputs["tokenizer"])
    tokenizer = load_tokenizer(files)
    special = special_ids(files, tokenizer)
    labels = _labels(corpus)
    encoder = Encoder(tokenizer, special)
    layout = _Layout(run.config.max_length, special, tokenizer)
    written: dict[str, SequenceFile] = {}
    cut = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack, run.progress.task("sequences", total=len(labels), unit="examples") as bar:
        for table in whole_documents(corpus):
            (batch,) = table.combine_chunks().to_batches()
            blocks = block_columns(batch)
            encodings = tokenizer.encode_batch(blocks["text"], add_special_tokens=False)
            tokens, _ = encoder(blocks, encodings)
            sizes = np.fromiter((len(encoding.ids) for encoding in encodings), np.int64, len(encodings))
            is_pair = table["block"].to_numpy() == 1
            splits = np.array(blocks["split"], dtype=object)
            for split in SPLITS:
                kept = splits == split
                if not kept.any():
                    continue
                if split not in written:
                    written[split] = SequenceFile(split, example_schema(), special["unk"], run, stack)
                packed, parts, num_cut = layout(_rows_of(tokens, sizes, kept), sizes[kept], is_pair[kept])
                documents = blocks["document"][kept & ~is_pair]
                its_labels = pa.array([labels[document] for document in documents.tolist()], pa.string())
                written[split].write(packed, parts, its_labels, pa.array(documents, pa.int32()))
                cut[split] += num_cut
            bar.advance(int((~is_pair).sum()))
    if not written:
        raise InputError(f"{corpus.reference} has no examples")
    for name, data in plain_tokenizer(files, tokenizer).items():
        run.out.write(f"tokenizer/{name}", data)
    run.out.counts |= {
        "max_length": run.config.max_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "special_tokens": special,
        "shape": "examples",
        "splits": {
            split: {**written[split].counts, "cut_examples": cut[split]} for split in SPLITS if split in written
        },
    }
    warn(run, encoder.replaced)


def _labels(corpus: Artifact) -> list[str | None]:
    """The label of each document.

    Raises:
        InputError: a document has more texts than an example has.
    """
    with corpus.open(DOCUMENTS) as raw:
        table = open_parquet(raw).read(columns=["label", "blocks"])
    if table.num_rows and table["blocks"].to_numpy().max() > 2:
        raise InputError(
            f"{corpus.reference} is running text, not examples of a task",
            hint="--packing full-sentences, or build it with: guide build-dataset",
        )
    found: list[str | None] = table["label"].to_pylist()
    return found


def _rows_of(tokens: Tokens, sizes: Any, kept: Any) -> Tokens:
    """The tokens of the kept blocks."""
    chosen = np.repeat(kept, sizes)
    return tokens if chosen.all() else Tokens(*(column[chosen] for column in tokens))


class _Layout:
    """Puts the texts of examples between special tokens."""

    def __init__(self, length: int, special: dict[str, int | None], tokenizer: Any) -> None:
        begin, separator = special["cls"], special["sep"]
        assert begin is not None and separator is not None
        self._length, self._begin, self._separator = length, begin, separator
        # RoBERTa's template is <s> A </s></s> B </s>
        self._between = 2 if tokenizer.num_special_tokens_to_add(True) == 4 else 1

    def __call__(self, tokens: Tokens, sizes: Any, is_pair: Any) -> tuple[Packed, Any, int]:
        """Sequences of examples, the number of each token's text (0 or 1), and how many examples were cut.

        Args:
            tokens: of all blocks, one block after the other; ``sizes``: how many each block has.
            is_pair: whether a block is the second text of the example before it.
        """
        example = np.cumsum(~is_pair) - 1  # of each block
        two = np.zeros(example[-1] + 1, bool)
        two[example[is_pair]] = True
        first, second = sizes[~is_pair], np.zeros(len(two), np.int64)
        second[two] = sizes[is_pair]
        room = self._length - np.where(two, 2 + self._between, 2)
        # the longer text is cut first; of an odd number of tokens the first text gets one more
        kept_second = np.minimum(second, np.maximum(room - first, room // 2))
        kept_first = np.minimum(first, room - kept_second)
        kept = np.where(is_pair, kept_second[example], kept_first[example])

        ends = np.cumsum(kept_first + kept_second + np.where(two, 2 + self._between, 2))
        starts = np.concatenate([[0], ends[:-1]])
        start_of_block = np.where(is_pair, (starts + 1 + kept_first + self._between)[example], (starts + 1)[example])
        within = np.arange(len(tokens.id)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen = within < np.repeat(kept, sizes)
        places = (np.repeat(start_of_block, sizes) + within)[chosen]

        packed = lay_out(Tokens(*(column[chosen] for column in tokens)), places, ends, self._begin, self._separator)
        position = np.arange(ends[-1]) - np.repeat(starts, ends - starts)
        # as BERT counts them: the first separator belongs to the first text, the last one to the second
        second_begins = np.where(two, kept_first + 1 + self._between, self._length + 1)
        parts = (position >= np.repeat(second_begins, ends - starts)).astype(np.int8)
        num_cut = int(((kept_first < first) | (kept_second < second)).sum())
        return packed, parts, num_cut
