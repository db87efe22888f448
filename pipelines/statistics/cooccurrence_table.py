"""Reads a ``cooccur`` artifact: its pairs, its vocabulary and the scores computed from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from guidance.patterns.features import Cooccurrence
from guidance.statistics.cooccurrence import cooccurrence_table
from pipelines.statistics.pair_files import arrays_of
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactMismatch
from pipelines.storage.tables import COUNTS, VOCABULARY
from pipelines.text.tokenizer_files import text_digest


class Counts:
    """The pairs of an artifact, in parts of arrays i, j and count; can be iterated repeatedly."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        with self._artifact.open(COUNTS) as raw:
            yield from map(arrays_of, open_parquet(raw).iter_batches(batch_size=1 << 18))


def load_table(
    artifact: Artifact,
    *,
    tokenizer: Artifact | None = None,
    totals: Literal["pairs", "tokens"] = "pairs",
    half: bool = False,
) -> Cooccurrence:
    """The scores of an artifact, for ``install(..., tables={"cooccurrence": load_table(artifact)})``.  Raises
    ArtifactMismatch if the table is not of kind ``cooccur``, or was counted with another tokenizer.

    Args:
        tokenizer: artifact that contains the tokenizer to be used with the table: a tokenizer, sequences or a model.
        totals: what equation 9 divides by: the pairs of a token, or its occurrences in the text.
        half: whether scores are float16 instead of float32.
    """
    if artifact.kind != "cooccur":
        raise ArtifactMismatch(f"{artifact.reference} is a {artifact.kind} artifact; needed is a cooccur")
    if tokenizer is not None:
        check_tokenizer(artifact, tokenizer)
    vocabulary = read_vocabulary(artifact)
    return cooccurrence_table(
        vocabulary["id"].to_numpy(),
        int(artifact.counts["of"]),
        Counts(artifact),
        totals=vocabulary["count"].to_numpy().astype(np.int64) if totals == "tokens" else None,
        dtype=torch.float16 if half else torch.float32,
    )


def read_vocabulary(artifact: Artifact) -> Any:
    """The table ``vocabulary.parquet``: the counted tokens."""
    with artifact.open(VOCABULARY) as raw:
        return open_parquet(raw).read()


def check_tokenizer(artifact: Artifact, other: Artifact) -> None:
    """Raise ArtifactMismatch unless the tokenizers of both artifacts find the same tokens in texts."""
    ours, theirs = (_tokenizer_digest(one) for one in (artifact, other))
    if ours != theirs:
        what = "another tokenizer" if theirs else "no tokenizer"
        raise ArtifactMismatch(
            f"{artifact.reference} was counted with one tokenizer, {other.reference} has {what}",
            hint="count with the tokenizer of the sequences: guide build-cooccur CORPUS TOKENIZER",
        )


def _tokenizer_digest(artifact: Artifact) -> str | None:
    names = [name for name in ("tokenizer/tokenizer.json", "tokenizer.json") if name in artifact.files]
    return text_digest(artifact.read(names[0])) if names else None
