"""Stage ``build-sequences``: text as token ids, whole sentences packed to a length, each token with its place in the text.

Writes ``train.parquet``, ``valid.parquet``, ``test.parquet`` (those that have text) with one row per sequence, and the
tokenizer's files under ``tokenizer/``, so that later stages need the sequences alone.  With ``--packing pairs`` a row is an
example of two texts; see `pipelines.pair_sequences`.

Source: Liu et al. 2019 (RoBERTa), section 4.2, FULL-SENTENCES: sequences may cross documents, with one separator between.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines import stage
from pipelines.artifacts import Artifact
from pipelines.columns import list_column
from pipelines.corpus_writer import SPLITS, read_blocks
from pipelines.packing import Packed, Packer, Tokens
from pipelines.stage import Files, Options, Result, Run, Stage, run_stage
from pipelines.store import Store

__all__ = ["STAGE", "Config", "Encoder", "load_tokenizer", "run", "sequence_schema", "special_ids"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SIZE_LIMIT = 256 << 20
_ROLES = {
    "cls": ("cls_token", "bos_token", "[CLS]", "<s>"),
    "sep": ("sep_token", "eos_token", "[SEP]", "</s>"),
    "pad": ("pad_token", "", "[PAD]", "<pad>"),
    "mask": ("mask_token", "", "[MASK]", "<mask>"),
    "unk": ("unk_token", "", "[UNK]", "<unk>"),
}
_BATCH_CHARACTERS = 1 << 20

BLOCK_COLUMNS = ("document", "split", "start", "first_sentence", "text", "sentences")
"""What `Encoder` needs of the blocks."""


class Config(stage.Config):
    """How text becomes sequences."""

    max_length: int = Field(128, ge=8, le=1 << 20, description="longest sequence, in tokens, special ones among them")
    packing: Literal["full-sentences", "document", "pairs"] = Field(
        "full-sentences",
        description="whether a sequence may go on in the next document, or stops at its end; or, for translation, "
        "whether it is the first text of an example, with the second one as its target",
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
    """Pack the corpus with a tokenizer: a reference, or a Hugging Face folder with a ``tokenizer.json``.

    Of a folder only ``tokenizer.json`` and the texts of the special tokens are read.

    Args:
        target_tokenizer: for the second text of each pair, likewise; by default the same one.

    Raises:
        InputError: no such artifact; or the tokenizer is damaged, or has no tokens to begin and end a sequence.
    """
    if target_tokenizer and config.packing != "pairs":
        raise InputError("--target-tokenizer is for texts with a pair", hint="--packing pairs")
    with contextlib.ExitStack() as stack:
        inputs: dict[str, stage.Input] = {"corpus": stack.enter_context(store.load(corpus, kind="corpus"))}
        for role, reference in (("tokenizer", tokenizer), ("target_tokenizer", target_tokenizer)):
            if reference:
                inputs[role] = open_tokenizer(reference, store, stack)
        return run_stage(STAGE, config, inputs, store=store, **options)


def sequence_schema() -> Any:
    """Columns of a file of sequences: lists of one length, one entry per token; -1 where a special token has none."""
    import pyarrow as pa

    return pa.schema(
        [
            list_column("id", pa.int32(), "piece of the vocabulary"),
            list_column("document", pa.int32(), "row in the corpus's documents.parquet"),
            list_column("sentence", pa.int32(), "running number in the document"),
            list_column("start", pa.int64(), "code points in the document, its blocks joined by one newline"),
            list_column("end", pa.int64(), "code points in the document, exclusive"),
            list_column("special", pa.bool_(), "true for tokens that are not text"),
        ]
    )


def pair_schema() -> Any:
    """Columns of a file of pairs: those of the source, and the target, a list of its own length."""
    import pyarrow as pa

    return sequence_schema().append(
        list_column("target", pa.int32(), "piece of the target's vocabulary, its end token last")
    )


def open_tokenizer(reference: str, store: Store, stack: contextlib.ExitStack) -> Artifact | Files:
    """A tokenizer as an input of a stage: an artifact, or a Hugging Face folder with a ``tokenizer.json``.

    Raises:
        InputError: there is none.
    """
    folder = Path(reference)
    if (folder / "tokenizer.json").is_file() and not (folder / "artifact.json").exists():
        found = [name for name in TOKENIZER_FILES if (folder / name).exists()]
        return Files.of((folder / name for name in found), found)
    return stack.enter_context(store.load(reference, kind="tokenizer"))


def tokenizer_files(given: Artifact | Files) -> dict[str, bytes]:
    """The bytes of the tokenizer's files, by name; nothing else in its folder is looked at."""
    if isinstance(given, Files):
        for path in given.paths:
            if path.stat().st_size > _SIZE_LIMIT:
                raise InputError(f"{str(path)!r}: larger than {_SIZE_LIMIT >> 20} MiB, no tokenizer file")
        return {name: path.read_bytes() for name, path in zip(given.names, given.paths, strict=True)}
    return {name: given.read(name) for name in TOKENIZER_FILES if name in given.files}


def load_tokenizer(files: Mapping[str, bytes]) -> Any:
    """A ``tokenizers.Tokenizer`` that gives every token of a text, and no special token for a text that spells one.

    Raises:
        InputError: the file is damaged.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"tokenizer.json: damaged or of an unknown kind ({str(error)[:160]!r})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def special_ids(files: Mapping[str, bytes], tokenizer: Any) -> dict[str, int | None]:
    """Ids of the roles ``cls``, ``sep``, ``pad``, ``mask``, ``unk``; begin- and end-of-sentence stand in for the first two.

    Raises:
        InputError: nothing begins or ends a sequence.
    """
    named: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        for role, value in _json_object(files.get(name, b"{}"), name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[role] = text
    found: dict[str, int | None] = {}
    for role, (first, second, *usual) in _ROLES.items():
        texts = [named[key] for key in (first, second) if key in named] or usual
        ids = [tokenizer.token_to_id(text) for text in texts]
        found[role] = next((id_ for id_ in ids if id_ is not None), None)
    for role, what in (("cls", "begin"), ("sep", "end")):
        if found[role] is None:
            raise InputError(f"the tokenizer has no token to {what} a sequence with (cls/bos, sep/eos)")
    return found


def plain_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tokenizer's files as they may travel on: of the configurations only special tokens and the longest input.

    A tokenizer from elsewhere can name code, classes and templates; none of it goes into what we publish.
    """
    kept = dict(files)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name in files:
            given = _json_object(files[name], name)
            plain = {key: value for key, value in given.items() if key.endswith("_token") or key == "model_max_length"}
            if name == "tokenizer_config.json":
                plain["tokenizer_class"] = "PreTrainedTokenizerFast"
            kept[name] = (json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return kept


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({str(error)[:80]!r})") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: an object is expected")
    return value


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    if run.config.packing == "pairs":
        from pipelines import pair_sequences

        pair_sequences.build(run)
        return
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
        raise InputError(f"{corpus.reference} gives no tokens at all with this tokenizer")
    for name, data in plain_tokenizer(files).items():
        run.out.write(f"tokenizer/{name}", data)
    run.out.counts |= {
        "max_length": config.max_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "special_tokens": special,
        "splits": {split: writers[split].counts() for split in SPLITS if split in writers},
    }
    warn(run, encoder.disarmed)


_TOLD = {
    "cut_sentences": "sentences were longer than a sequence and were cut",
    "cut_pairs": "pairs were longer than a sequence on one side at least, and were cut",
    "long_pairs": "pairs were longer than a sequence on one side at least, and were dropped",
    "empty_pairs": "pairs had no token on one side at least, and were dropped",
}


def warn(run: Run, disarmed: int) -> None:
    """Say what the counts of the splits have that a user should know."""
    if disarmed:
        run.warn(f"{disarmed:,} pieces of text spelled a special token and became unknown tokens")
    for split, counts in run.out.counts["splits"].items():
        run.warn(*(f"{split}: {counts[key]:,} {what}" for key, what in _TOLD.items() if counts.get(key)))
        for side in ("", "target_"):
            unknown, all_ = counts.get(f"{side}unknown_tokens", 0), counts.get(f"{side}tokens", 0)
            if unknown > 0.05 * all_:
                run.warn(f"{split}: {unknown:,} of {all_:,} {side.replace('_', ' ')}tokens are unknown")


def _batches(corpus: Artifact) -> Iterator[dict[str, Any]]:
    for batch in read_blocks(corpus, BLOCK_COLUMNS, batch=4096):
        yield from batches_of(batch)


def batches_of(part: Any) -> Iterator[dict[str, Any]]:
    """A record batch of blocks in batches of about `_BATCH_CHARACTERS`, see `block_columns`."""
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
    """A record batch of blocks as columns: lists for text, numpy for numbers."""
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


def _encoded_ahead(tokenizer: Any, batches: Iterator[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Each batch with its encodings; the next one is encoded, outside the interpreter's lock, while this one is used."""

    def encode() -> tuple[dict[str, Any], list[Any]] | None:
        blocks = next(batches, None)
        return None if blocks is None else (blocks, tokenizer.encode_batch(blocks["text"], add_special_tokens=False))

    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(encode)
        while (ready := waiting.result()) is not None:
            waiting = pool.submit(encode)
            yield ready
            del ready


class Encoder:
    """Blocks and their encodings to `Tokens`.

    Attributes:
        disarmed: tokens of text that a careless vocabulary would have made special.
    """

    def __init__(self, tokenizer: Any, special: Mapping[str, int | None]) -> None:
        import numpy as np

        unknown = special["unk"]
        added = [id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        forbidden = ({*added, *(id_ for id_ in special.values() if id_ is not None)}) - {unknown}
        self._forbidden = np.array(sorted(forbidden), np.int32)
        self._bare = np.array([i for i in map(tokenizer.token_to_id, ("▁", "Ġ")) if i is not None], np.int32)
        self._unknown = unknown
        self.disarmed = 0

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
        # a bare word-start that the tokenizer put before a block stands for no letter, but claims the first one
        firsts = (np.cumsum(counts) - counts)[counts > 0]
        bare = firsts[np.isin(ids[firsts], self._bare)]
        end[bare] = start[bare]
        self._disarm(ids)
        # one search for the whole batch: shift every block behind the one before it
        lengths = np.fromiter(map(len, blocks["text"]), np.int64, len(counts)) + 1
        shifts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        sentence_counts = blocks["sentence_counts"]
        boundaries = blocks["sentence_starts"] + np.repeat(shifts, sentence_counts)
        first_boundary = np.concatenate([[0], np.cumsum(sentence_counts)[:-1]])
        # the last letter decides: a piece may own the space in front of its sentence
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

    def _disarm(self, ids: Any) -> None:
        """Text never gives a special token, not even where the vocabulary lists one as an ordinary piece."""
        import numpy as np

        wrong = np.isin(ids, self._forbidden)
        count = int(wrong.sum())
        if count:
            if self._unknown is None:
                raise InputError(
                    "the text spells a special token, and this tokenizer has no unknown token to put there"
                )
            ids[wrong] = self._unknown
            self.disarmed += count


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
        """``tokens`` are all of them, special ones too; ``unknown_tokens`` and ``cut_sentences`` are text."""
        return {**self._file.counts, "cut_sentences": self._packer.cut}


class SequenceFile:
    """The file of one split.

    Attributes:
        counts: what it holds: ``tokens`` are all of them, special ones too, ``unknown_tokens`` are text.
    """

    def __init__(self, split: str, schema: Any, unknown: int | None, run: Run, stack: Any) -> None:
        self._file = stack.enter_context(run.out.parquet(f"{split}.parquet", schema))
        self._schema, self._unknown = schema, unknown
        self.counts = {"sequences": 0, "tokens": 0, "unknown_tokens": 0}

    def write(self, packed: Packed, *more: Any) -> None:
        """Add sequences; ``more`` are the arrays of further columns of the schema."""
        import pyarrow as pa

        arrays = [
            pa.ListArray.from_arrays(pa.array(packed.offsets), pa.array(column), type=field.type)
            for column, field in zip([*packed.tokens, packed.special], self._schema, strict=False)
        ]
        self._file.write_table(pa.table([*arrays, *more], schema=self._schema))
        self.counts["sequences"] += len(packed.offsets) - 1
        self.counts["tokens"] += len(packed.special)
        if self._unknown is not None:
            self.counts["unknown_tokens"] += int((packed.tokens.id == self._unknown).sum())


STAGE = Stage("build-sequences", "sequences", 1, Config, build)
