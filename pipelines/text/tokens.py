"""The tokens of a corpus's text, each with its document and sentence, as workers of any statistic read them."""

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
    """Where its files are, for workers elsewhere."""
    return str((given.path if isinstance(given, Artifact) else given.paths[0].parent).absolute())


def load(folder: str) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder; a worker opens it once."""
    return _opened(os.path.join(folder, "tokenizer.json"))[0]


def tokens_of(folder: str, tables: Iterable[Any]) -> Iterator[Tokens]:
    """All tokens of the blocks in some tables, as ``build-sequences`` makes them: no special ones, and none for text that
    spells one; a batch of about a million characters at a time.  The tables have the `BLOCK_COLUMNS` at least."""
    tokenizer, encoder = _opened(os.path.join(folder, "tokenizer.json"))
    for table in tables:
        for part in table.combine_chunks().to_batches():
            for batch in batches_of(part):
                yield encoder(batch, tokenizer.encode_batch(batch["text"], add_special_tokens=False))[0]


@remembered
def _opened(file: str) -> tuple[Any, Encoder]:
    """The tokenizer of a ``tokenizer.json`` and of what stands beside it."""
    folder = os.path.dirname(file)
    names = [name for name in TOKENIZER_FILES if os.path.exists(os.path.join(folder, name))]
    files = tokenizer_files(Files.of((Path(folder, name) for name in names), names))
    tokenizer = load_tokenizer(files)
    return tokenizer, Encoder(tokenizer, special_ids(files, tokenizer))
