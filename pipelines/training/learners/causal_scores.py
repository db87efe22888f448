"""How ``guide evaluate`` measures causal language models: perplexity per token, and bits per byte of text.

Every token is predicted from the tokens before it that are in the same document and the same sequence.  Bits per byte do not depend
on the tokenizer, so they compare models with different vocabularies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError
from guidance.installation import Handle
from pipelines.engine.stage import Run
from pipelines.metrics.comparison import Compared, OfSums, Table, compare_statistics
from pipelines.storage.artifacts import Artifact
from pipelines.text.corpus_files import whole_documents
from pipelines.training.batches import Examples, read_column
from pipelines.training.learner import Setup
from pipelines.training.learners.causal_lm import CausalLM, check_is_causal
from pipelines.training.learners.word_scores import PredictionColumns, exp_of, passes, words_of_rows, write_scores
from pipelines.training.model_checks import check_lengths, check_model
from pipelines.training.models import read_tokenizer
from pipelines.training.plan_inputs import features

OF_NEXT_WORDS = ("sequence", "predicted", "guessed", "nats", "bytes")
"""The columns of ``predictions.parquet``."""


@dataclass(frozen=True)
class _Settings:
    """The settings that the learner reads, for a model that is only measured."""

    valid_sequences: int
    seed: int = 0


def evaluate(run: Run, folder: Path, model: Any, handle: Handle) -> None:
    """Measure a causal language model; writes ``metrics.json`` and ``predictions.parquet``.

    Raises:
        InputError: model and sequences do not fit each other, nothing is predicted, or tokens of the model see later ones.
        NumericalError: the loss is not finite.
    """
    data, config = run.inputs["sequences"], run.config
    if not handle.plan.shapes_outputs:  # a plan that does was checked when it was trained
        check_is_causal(model, folder)
    tokenizer = read_tokenizer(data, masked=False, padded=False)
    check_model(model, folder, tokenizer)
    known: Any = {"features": features(handle.plan, training=False), "masks": run.inputs.get("masks")}
    rows, nothing = (Examples.read(data, split, len(tokenizer), **known) for split in (config.split, ""))
    check_lengths(model.config, {config.split: rows}, data.reference)
    setup = Setup(_Settings(config.limit), handle.plan, data, tokenizer, nothing, rows, handles={"": handle})
    learner, columns = CausalLM(setup, model), PredictionColumns(*OF_NEXT_WORDS)
    text = run.inputs.get("corpus")
    bytes_of = np.zeros(len(rows), np.int64) if text is None else bytes_of_sequences(data, text, config.split)
    for numbers, batch, inputs, output in passes(run, learner):
        figures = words_of_rows(output.logits, inputs, batch.length, len(numbers))
        named = dict(zip(("predicted", "guessed", "nats"), figures.values(), strict=True))
        columns.add(sequence=numbers, **named, bytes=bytes_of[numbers])
    predicted, nats, size = (columns.sum(name) for name in ("predicted", "nats", "bytes"))
    if not predicted:
        raise InputError(f"{data.reference}: {config.split!r} has no token to predict", hint="--limit 0, or more text")
    loss = nats / predicted
    metrics = {
        "loss": loss,
        "perplexity": exp_of(loss),
        "accuracy": columns.sum("guessed") / predicted,
        "bits_per_byte": nats / math.log(2) / size if size else None,
    }
    signatures = {
        "loss": "nats per token, each predicted from those of its document before it in its sequence",
        "perplexity": "e to the power of the loss",
        "accuracy": "share of the tokens",
        "bits_per_byte": "bits of all tokens, by the bytes of their text in UTF-8",
    }
    floors = run.inputs["floors"].counts["nats"] if "floors" in run.inputs else {}
    counts = {"predicted": int(predicted), "bytes": int(size)}
    write_scores(run, "causal-lm", columns, metrics, signatures, counts, floors=floors)


def bytes_of_sequences(data: Artifact, corpus: Artifact, split: str) -> np.ndarray:
    """The length of the text of each sequence of a split in bytes of UTF-8, int64 (sequences,).  White space between sequences
    counts in none of them."""
    name = f"{split}.parquet"
    (document, lengths), (sentence, _), (start, _), (end, _) = (
        read_column(data, name, column, kind, np.asarray)
        for column, kind in (
            ("document", pa.int32()),
            ("sentence", pa.int32()),
            ("start", pa.int64()),
            ("end", pa.int64()),
        )
    )
    rows = np.repeat(np.arange(len(lengths)), lengths)
    is_text = document >= 0
    rows, document, sentence, start, end = (column[is_text] for column in (rows, document, sentence, start, end))
    # a document may have sentences of another split in between
    breaks = (np.diff(rows) != 0) | (np.diff(document) != 0) | (np.diff(sentence) > 1)
    firsts = np.flatnonzero(np.append(True, breaks)[: len(rows)])
    size = np.zeros(len(lengths), np.int64)
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for first, last in zip(firsts, np.append(firsts[1:], len(rows)) - 1, strict=True):
        spans.setdefault(int(document[first]), []).append((int(rows[first]), int(start[first]), int(end[last])))
    for table in whole_documents(corpus):
        numbers, texts = table["document"].to_numpy(), table["text"].to_pylist()
        for number in np.unique(numbers).tolist():
            if number in spans:
                text = "\n".join(texts[i] for i in np.flatnonzero(numbers == number))
                for row, begin, stop in spans[number]:
                    size[row] += len(text[begin:stop].encode())
    return size


def compare(one: Table, other: Table) -> list[Compared]:
    """The loss, the accuracy and, where the text is known, the bits per byte of two models, compared sequence by sequence.

    Raises:
        InputError: the models did not predict the same tokens.
    """
    if any(list(one[name]) != list(other[name]) for name in ("predicted", "bytes")):
        raise InputError("the two models did not predict the same tokens", hint="sequences of one tokenizer")

    def statistics(table: Table) -> dict[str, OfSums]:
        nats, guessed, predicted, size = (np.array(table[n], float) for n in ("nats", "guessed", "predicted", "bytes"))
        known = {"bits_per_byte": _ratio_of(nats / math.log(2), size)} if size.any() else {}
        return {"loss": _ratio_of(nats, predicted), "accuracy": _ratio_of(guessed, predicted), **known}

    sides = [statistics(table) for table in (one, other)]
    return compare_statistics({name: (sides[0][name], sides[1][name]) for name in sides[0]}, len(one["predicted"]))


def _ratio_of(parts: np.ndarray, wholes: np.ndarray) -> OfSums:
    return OfSums(np.stack([parts, wholes], axis=1), lambda sums: float(sums[0] / max(1.0, sums[1])))
