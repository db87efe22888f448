"""The tokens of a corpus's text, each with its document and sentence, as workers of any statistic read them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.artifacts import Artifact
from pipelines.packing import Tokens
from pipelines.sequences import TOKENIZER_FILES, Encoder, load_tokenizer, special_ids, tokenizer_files
from pipelines.shards import remembered
from pipelines.stage import Files
from pipelines.store import Store

__all__ = ["COLUMNS", "load", "open_tokenizer", "tokenizer_folder", "tokens_of"]

COLUMNS = ("document", "split", "start", "first_sentence", "text", "sentences")
"""What `tokens_of` needs of the blocks."""

_BATCH_CHARACTERS = 1 << 20


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


def tokenizer_folder(given: Artifact | Files) -> str:
    """Where its files are, for workers elsewhere."""
    return str((given.path if isinstance(given, Artifact) else given.paths[0].parent).absolute())


def load(folder: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder; a worker opens it once."""
    return _opened(os.path.join(folder, "tokenizer.json"))[0]


def tokens_of(folder: str, tables: Iterable[Any]) -> Iterator[Tokens]:
    """All tokens of the blocks in some tables, as ``build-sequences`` makes them: no special ones, and none for text that
    spells one; a batch of about a million characters at a time."""
    tokenizer, encoder = _opened(os.path.join(folder, "tokenizer.json"))
    for table in tables:
        for batch in _batches(table):
            yield encoder(batch, tokenizer.encode_batch(batch["text"], add_special_tokens=False))[0]


@remembered
def _opened(file: str) -> tuple[Any, Encoder]:
    """The tokenizer of a ``tokenizer.json`` and of what stands beside it."""
    folder = os.path.dirname(file)
    names = [name for name in TOKENIZER_FILES if os.path.exists(os.path.join(folder, name))]
    files = tokenizer_files(Files.of((Path(folder, name) for name in names), names))
    tokenizer = load_tokenizer(files)
    return tokenizer, Encoder(tokenizer, special_ids(files, tokenizer))


def _batches(table: Any) -> Iterator[dict[str, Any]]:
    """Blocks as `sequences.Encoder` takes them: lists for text, numpy for numbers."""
    texts = table["text"].to_pylist()
    sums = [0, *itertools.accumulate(map(len, texts))]
    first = 0
    while first < len(texts):
        last = first + 1
        while last < len(texts) and sums[last + 1] - sums[first] <= _BATCH_CHARACTERS:
            last += 1
        part = table.slice(first, last - first).combine_chunks()
        spans = part["sentences"].combine_chunks()
        yield {
            "text": texts[first:last],
            **{name: part[name].to_numpy() for name in ("document", "start", "first_sentence")},
            "split": part["split"].cast("string").to_pylist(),
            "sentence_counts": spans.value_lengths().to_numpy(),
            "sentence_starts": spans.flatten().field("start").to_numpy(),
        }
        first = last
