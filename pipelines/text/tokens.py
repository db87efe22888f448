"""The tokens of a corpus, each with its document and sentence, for the worker processes of any statistic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.engine.shards import remembered
from pipelines.engine.stage import Files
from pipelines.storage.artifacts import Artifact
from pipelines.text.encoding import Encoder, batches_of
from pipelines.text.packing import Tokens
from pipelines.text.tokenizer_files import TOKENIZER_FILES, load_tokenizer, special_ids, tokenizer_files

__all__ = ["load", "tokenizer_folder", "tokens_of"]


def tokenizer_folder(given: Artifact | Files) -> str:
    """The folder of the tokenizer's files, as an absolute path that other processes can open."""
    return str((given.path if isinstance(given, Artifact) else given.paths[0].parent).absolute())


def load(folder: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder; each process opens it once."""
    return _opened(os.path.join(folder, "tokenizer.json"))[0]


def tokens_of(folder: str, tables: Iterable[Any]) -> Iterator[Tokens]:
    """The tokens of some tables of blocks, with the ids that ``build-sequences`` gives them, but without special tokens.

    Comes in batches of about a million characters.  The tables must have the `BLOCK_COLUMNS`.
    """
    tokenizer, encoder = _opened(os.path.join(folder, "tokenizer.json"))
    for table in tables:
        for part in table.combine_chunks().to_batches():
            for batch in batches_of(part):
                yield encoder(batch, tokenizer.encode_batch(batch["text"], add_special_tokens=False))[0]


@remembered
def _opened(file: str) -> tuple[Any, Encoder]:
    """The tokenizer of a ``tokenizer.json`` and of the configuration files beside it."""
    folder = os.path.dirname(file)
    names = [name for name in TOKENIZER_FILES if os.path.exists(os.path.join(folder, name))]
    files = tokenizer_files(Files.of((Path(folder, name) for name in names), names))
    tokenizer = load_tokenizer(files)
    return tokenizer, Encoder(tokenizer, special_ids(files, tokenizer))
