"""A co-occurrence table, shown for one word and a text, or exported as a matrix for other tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from safetensors.numpy import save

from guidance.errors import InputError
from pipelines.statistics.cooccurrence_table import load_table, read_vocabulary
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.text.records import check_utf8
from pipelines.text.tokenizer_files import load_tokenizer

__all__ = ["Context", "contexts_of", "dense", "newest"]

LONGEST = 100_000
"""Maximum number of characters of a text to show."""


@dataclass(frozen=True)
class Context:
    """The co-occurrence coefficients of one token of a word with each token of a text.

    Attributes:
        token: as written in the vocabulary.
        text: the characters that it covers.
        known: whether the table has it; if not, all coefficients are None.
        keys: for each token of the text its characters, the token, and the coefficient; None if the table does not have
            the token.
    """

    token: str
    text: str
    known: bool
    keys: list[tuple[str, str, float | None]]


def newest(store: Store) -> Artifact:
    """The co-occurrence table that was counted last.

    Raises:
        ArtifactMissing: the store has none.
    """
    tables = [artifact for artifact in store.artifacts() if artifact.kind == "cooccur"]
    if not tables:
        raise ArtifactMissing(
            f"there is no co-occurrence table in {store.root}", hint="count one: guide build-cooccur CORPUS TOKENIZER"
        )
    last = max(tables, key=lambda artifact: (str(artifact.manifest["created"]), artifact.path.stat().st_mtime_ns))
    last.verify()
    return last


def contexts_of(
    artifact: Artifact, word: str, text: str, *, totals: Literal["pairs", "tokens"] = "pairs"
) -> list[Context]:
    """One row per token of the word, taken at its first occurrence in the text, or appended to the text if it has none.

    Raises:
        InputError: the word or the text is empty or not valid Unicode, or the text is too long.
    """
    for what, value in (("word", word), ("text", text)):
        if not value.strip():
            raise InputError(f"the {what} is empty", hint='for example: guide cooccur show is --text "he is swimming"')
        check_utf8(value, f"the {what}")
    if len(text) + len(word) > LONGEST:
        raise InputError(f"the text has {len(text):,} characters; the limit is {LONGEST:,}", hint="use a shorter text")
    tokenizer = load_tokenizer({"tokenizer.json": artifact.read("tokenizer/tokenizer.json")})
    word = word.strip()
    match = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    whole = text if match else f"{text} {word}"
    start = match.start() if match else len(text) + 1
    encoding = tokenizer.encode(whole, add_special_tokens=False)
    pieces, keys = [], []
    for id_, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
        letters = whole[first:end]
        first += len(letters) - len(letters.lstrip())
        piece = (id_, tokenizer.id_to_token(id_), letters.strip() or tokenizer.id_to_token(id_))
        pieces += [piece] if first < start + len(word) and end > start else []
        keys += [piece] if first < len(text) else []
    table = load_table(artifact, totals=totals)
    rows = table.rows_V.tolist()
    contexts = []
    for id_, token, letters in pieces:
        row, shown = rows[id_], []
        for key_id, key_token, key_letters in keys:
            column = rows[key_id]
            coefficient = None if min(row, column) < 0 else float(table.scores_NN[row, column])
            shown.append((key_letters, key_token, coefficient))
        contexts.append(Context(token, letters, row >= 0, shown))
    return contexts


def dense(artifact: Artifact, *, half: bool = False, totals: Literal["pairs", "tokens"] = "pairs") -> bytes:
    """The matrix S as safetensors: ``scores`` (N, N), float32 or float16, and ``ids`` (N,), the token of each row."""
    table = load_table(artifact, totals=totals, half=half)
    ids = read_vocabulary(artifact)["id"].to_numpy().astype(np.int64)
    return save({"ids": ids, "scores": table.scores_NN.numpy()})
