"""Files of sequences: their columns, writing them, and warnings about what was written."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from guidance.errors import InputError, counted
from pipelines.engine.stage import Run
from pipelines.storage.tables import schema_of
from pipelines.text.corpus_files import SPLITS
from pipelines.text.encoding import Encoder, Tokens
from pipelines.text.structured import ONE_SECTION
from pipelines.text.tokenizer_files import plain_tokenizer

NOT_TEXT = -1
"""Document, sentence and offsets of a special token, which is not part of the text."""


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


def one_each(tokens: Tokens, lengths: Any, begin: int, separator: int) -> Packed:
    """One sequence for each run of ``lengths`` tokens, between a begin and a separator token."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(tokens.id)) + 2 * rows + 1
    return lay_out(tokens, places, np.cumsum(lengths + 2), begin, separator)


def lay_out(tokens: Tokens, places: Any, ends: Any, begin: int, separator: int) -> Packed:
    """Sequences that end at ``ends``, exclusive: tokens at ``places``, a begin token at the start of each, separators elsewhere."""
    size = int(ends[-1])
    special = np.ones(size, bool)  # first, last, and between documents
    special[places] = False
    ids = np.full(size, separator, np.int32)
    ids[np.concatenate([[0], ends[:-1]])] = begin
    ids[places] = tokens.id
    columns = [ids]
    for values in tokens[1:]:
        wide = np.full(size, NOT_TEXT, values.dtype)
        wide[places] = values
        columns.append(wide)
    return Packed(Tokens(*columns), special, np.concatenate([[0], ends]).astype(np.int32))


_SEQUENCE = {
    "id": ("[int32]", "piece of the vocabulary"),
    "document": ("[int32]", "row in the corpus's documents.parquet"),
    "sentence": ("[int32]", "running number in the document"),
    "start": ("[int64]", "code points in the document, its blocks joined by one newline"),
    "end": ("[int64]", "code points in the document, exclusive"),
    "special": ("[bool]", "true for tokens that are not text"),
}
_EXAMPLE = _SEQUENCE | {
    "text": ("[int8]", "0 for the first text with its begin token and separators, 1 for the second"),
    "label": ("string", "label of the example; null if it has none"),
    "example": ("int32", "row in documents.parquet"),
}
_DOCUMENT = _EXAMPLE | {
    "segment": ("[int32]", "running number in the sequence of the part that each token belongs to"),
    "sentences": ("[int32]", "running numbers in the document of the sentences that the label is about"),
}


def sequence_schema() -> pa.Schema:
    """Columns of a file of sequences: lists of equal length with one entry per token, -1 for special tokens."""
    return schema_of(_SEQUENCE)


def pair_schema() -> pa.Schema:
    """Columns of a file of pairs: those of a sequence for the source, and the target, whose length may differ."""
    return schema_of(_SEQUENCE | {"target": ("[int32]", "piece of the target's vocabulary, its end token last")})


def example_schema() -> pa.Schema:
    """Columns of a file of examples: those of a sequence, the text that each token belongs to, the label, and the example."""
    return schema_of(_EXAMPLE, may_be_null=("label",))


def word_schema() -> pa.Schema:
    """Columns of a file of tagged words: those of an example, and the word of each token; the label has a tag for each word."""
    word = {"word": ("[int32]", "number of its word in the example; -1 for special tokens")}
    return schema_of(_EXAMPLE | word, may_be_null=("label",))


def document_schema() -> pa.Schema:
    """Columns of a file of documents with summaries or sections: those of examples, and what is said of each sentence."""
    return schema_of(_DOCUMENT, may_be_null=("label",))


Counts = Mapping[str, Counter[str]]
"""For each split what was cut, dropped or is odd in it; see `_WARNINGS`."""


def counts_of_splits() -> Counts:
    """Counts that begin at nothing."""
    return {split: Counter() for split in SPLITS}


def write_sequences(
    run: Run,
    encoders: Mapping[str, Encoder],
    schema: pa.Schema,
    sequences: Iterable[tuple[str, Packed, list[Any]]],
    counts: Counts,
    empty: InputError,
    **more: Any,
) -> None:
    """Write the files of ``build-sequences``, one for each split that has sequences, with tokenizers and counts.

    Args:
        encoders: by the folder of their tokenizers, first that of the sequences.
        sequences: some sequences of a split at a time, with the schema's further columns: arrow arrays, or numpy arrays over
            tokens.
        counts: complete once all sequences were taken.
        empty: raised if there are no sequences.
        more: further counts of the artifact.
    """
    encoder = next(iter(encoders.values()))
    sizes: dict[str, Counter[str]] = {}
    of_text: Counter[str] = Counter()
    files: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for split, packed, columns in sequences:
            if split not in files:
                files[split] = stack.enter_context(run.out.parquet(f"{split}.parquet", schema))
                sizes[split] = Counter(sequences=0, tokens=0, unknown_tokens=0)
            files[split].write_table(_table(packed, columns, schema))
            # no id equals None, and in the vocabulary of GPT-2 the unknown token is the separator too
            unknown = int(((packed.tokens.id == encoder.special["unk"]) & ~packed.special).sum())
            sizes[split].update(sequences=len(packed.offsets) - 1, tokens=len(packed.special), unknown_tokens=unknown)
            of_text[split] += int((~packed.special).sum())
    if not files:
        raise empty
    for folder, own in encoders.items():
        for name, data in plain_tokenizer(own.files, own.tokenizer).items():
            run.out.write(f"{folder}/{name}", data)
    run.out.counts |= {
        "max_length": run.config.max_length,
        "vocab_size": encoder.tokenizer.get_vocab_size(),
        "special_tokens": encoder.special,
        **more,
        "splits": {split: {**sizes[split], **counts[split]} for split in SPLITS if split in files},
    }
    _warn(run, sum(own.replaced for own in encoders.values()), of_text)


def _table(packed: Packed, columns: list[Any], schema: pa.Schema) -> pa.Table:
    offsets = pa.array(packed.offsets)
    arrays = [
        pa.ListArray.from_arrays(offsets, pa.array(values), type=field.type)
        if isinstance(values, np.ndarray)
        else values
        for values, field in zip([*packed.tokens, packed.special, *columns], schema, strict=True)
    ]
    return pa.table(arrays, schema=schema)


_WARNINGS = {
    "cut_sentences": "sentence{s} {were} longer than a sequence and {were} cut into pieces; no token is lost",
    "cut_examples": "example{s} {were} longer than a sequence and {were} cut{lost}",
    "divided_examples": "example{s} {were} longer than a sequence and {were} divided into windows that overlap",
    "cut_documents": "document{s} {were} longer than a sequence: the last sentences are left out{lost}",
    "short_documents": "document{s} had too few sentences and {were} dropped",
    "empty_oracles": "document{s} had no word in common with the summary, so that no sentence is right",
    "one_sentence": "document{s} had one sentence, so no boundary, and {were} dropped",
    "one_section": f"document{{s}} had {ONE_SECTION} is right",
    "cut_pairs": "pair{s} had a side longer than a sequence and {were} cut",
    "long_pairs": "pair{s} had a side longer than a sequence and {were} dropped",
    "empty_pairs": "pair{s} had a side without tokens and {were} dropped",
}
"""What is said of a split, by a count; ``{lost}`` stands for the share of its tokens that was cut off, other gaps for words of
`_WORDS`."""

_REMEDY = "; a greater --max-length, or --sequence-length where a command has that, keeps"
_KEEPS = {
    "cut_sentences": "{them} whole",
    "cut_examples": "more of {them}",
    "cut_documents": "more",
    "cut_pairs": "{them} whole",
    "long_pairs": "{them}",
}
"""What greater sequences keep, by a count; said once, of the last split."""

_WORDS = {True: {"s": "", "were": "was", "them": "it"}, False: {"s": "s", "were": "were", "them": "them"}}
"""By whether the count is 1."""


def _warn(run: Run, replaced: int, of_text: Mapping[str, int]) -> None:
    """Warn of cut, dropped and unknown text, and of tokens that became unknown because they spelled a special one.
    ``of_text`` says how many tokens of each split are not special."""
    if replaced:
        pieces = counted(replaced, "piece of text", "pieces of text")
        run.warn(f"{pieces} spelled a special token and became unknown")
    splits = run.out.counts["splits"]
    last = {key: split for split, counts in splits.items() for key in _KEEPS if counts.get(key)}
    for split, counts in splits.items():
        of_split = f"{split}: " if len(splits) > 1 else ""
        cut = counts.get("cut_tokens", 0)
        lost = f", which loses {100 * cut / (cut + of_text[split]):.1f} % of all tokens" if cut else ""
        for key, what in _WARNINGS.items():
            if number := counts.get(key):
                remedy = f"{_REMEDY} {_KEEPS[key]}" if key in _KEEPS and last[key] == split else ""
                run.warn(f"{of_split}{number:,} " + (what + remedy).format(lost=lost, **_WORDS[number == 1]))
        for side in ("", "target_"):
            unknown, all_ = counts.get(f"{side}unknown_tokens", 0), counts.get(f"{side}tokens", 0)
            if unknown > 0.05 * all_:
                run.warn(f"{of_split}{unknown:,} of {all_:,} {side.replace('_', ' ')}tokens are unknown")
