"""A co-occurrence table, shown for one word and a text, or exported as a matrix for other tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save

from guidance.errors import InputError
from pipelines.statistics.cooccurrence_table import load_table, read_vocabulary
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
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
    found = [artifact for artifact in store.artifacts() if artifact.kind == "cooccur"]
    if not found:
        raise ArtifactMissing(
            f"there is no co-occurrence table in {store.root}", hint="count one: guide build-cooccur CORPUS TOKENIZER"
        )
    last = max(found, key=lambda artifact: (str(artifact.manifest["created"]), artifact.path.stat().st_mtime_ns))
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
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise InputError(f"the {what} is not UTF-8")
    if len(text) + len(word) > LONGEST:
        raise InputError(f"the text has {len(text):,} characters; the limit is {LONGEST:,}", hint="use a shorter text")
    tokenizer = load_tokenizer({"tokenizer.json": artifact.read("tokenizer/tokenizer.json")})
    word = word.strip()
    match = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)
    start = match.start() if match else len(text) + 1
    all_pieces = _pieces(tokenizer, text if match else f"{text} {word}")
    pieces = [piece for piece in all_pieces if piece.start < start + len(word) and piece.end > start]
    keys = [piece for piece in all_pieces if piece.start < len(text)]
    table = load_table(artifact, totals=totals)
    rows = table.rows_V.tolist()
    contexts = []
    for piece in pieces:
        row = rows[piece.id]
        found = [
            None if min(row, rows[key.id]) < 0 else float(table.scores_NN[row, rows[key.id]])
            for key in keys
        ]  # fmt: skip
        shown = [(key.text, key.token, value) for key, value in zip(keys, found, strict=True)]
        contexts.append(Context(piece.token, piece.text, row >= 0, shown))
    return contexts


@dataclass(frozen=True)
class _Piece:
    id: int
    token: str
    text: str
    start: int
    end: int


def _pieces(tokenizer: Any, text: str) -> list[_Piece]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    pieces = []
    for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        letters = text[start:end]
        start += len(letters) - len(letters.lstrip())
        token = tokenizer.id_to_token(id_)
        pieces.append(_Piece(id_, token, letters.strip() or token, start, end))
    return pieces


def dense(artifact: Artifact, *, half: bool = False, totals: Literal["pairs", "tokens"] = "pairs") -> bytes:
    """The matrix S as safetensors: ``scores`` (N, N), float32 or float16, and ``ids`` (N,), the token of each row."""
    table = load_table(artifact, totals=totals, half=half)
    ids = read_vocabulary(artifact)["id"].to_numpy().astype(np.int64)
    return save({"ids": ids, "scores": table.scores_NN.numpy()})
