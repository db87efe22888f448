"""What all evaluations of predicted words share: passes over a split, columns of predictions, and writing them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from guidance.errors import NumericalError
from pipelines.engine.stage import Run
from pipelines.training.learners.guided import VALID_EPOCH, Inputs
from pipelines.training.learners.language_model import LanguageModel
from pipelines.training.metrics_files import write_metrics

UNITS = {
    "sequence": (pa.int32(), "row of the split; with next sentences, number of the example"),
    "masked": (pa.int32(), "masked tokens"),
    "correct": (pa.int32(), "masked tokens that the model predicts"),
    "nll": (
        pa.float64(),
        "negative log-likelihood of the masked tokens, or of the classes of all tokens: a sum in nats",
    ),
    "follows": (pa.bool_(), "whether the second text follows the first; null without a second text"),
    "follows_score": (pa.float32(), "probability that the model gives to that"),
    "tokens": (pa.int32(), "tokens, all of which are judged"),
    "replaced": (pa.int32(), "tokens that the generator replaced"),
    "found": (pa.int32(), "tokens that the model takes for replaced ones"),
    "right": (pa.int32(), "tokens of both kinds"),
    "predicted": (pa.int32(), "predicted tokens"),
    "guessed": (pa.int32(), "predicted tokens that are the most likely ones to the model"),
    "nats": (pa.float64(), "negative log-likelihood of the predicted tokens: a sum"),
    "bytes": (pa.int64(), "length of their text, in UTF-8; 0 if the corpus is not there"),
}
"""The columns of predictions, each with its type and its unit."""


def score_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of ``predictions.parquet`` with these columns."""
    return pa.schema([pa.field(name, UNITS[name][0], metadata={"unit": UNITS[name][1]}) for name in names])


def passes(
    run: Run, learner: LanguageModel, filling: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, Any, Inputs, Any]]:
    """For each batch the numbers of its sequences, the batch, its inputs, and the output of the model.

    Args:
        filling: (4,), to which each batch adds what a generator did: its loss, its right predictions, its mis-predictions, and
            the number of masked tokens.
    """
    handle, size, number = learner.guided.handle, run.config.batch_size, learner.num_valid
    lengths = learner.splits["valid"].lengths[getattr(learner, "validation", np.arange(number))]
    # similar lengths together; the longest first, so that a batch that is too large fails at once
    order = np.argsort(-lengths, kind="stable")
    with run.progress.task("evaluate", total=number, unit="sequences") as bar, torch.no_grad():
        for start in range(0, number, size):
            numbers = order[start : start + size]
            batch: Any = learner.prepare([(VALID_EPOCH, int(i)) for i in numbers], "valid")
            if filling is not None:
                generator = getattr(learner, "generator", None)
                sums = generator.validate(learner.model, batch) if generator else {}
                filling += [*(float(value) for value in sums.values()), *[0.0] * (3 - len(sums)), batch.chosen]
            inputs = learner.tensors(batch)
            yield numbers, batch, inputs, learner.call(learner.model, inputs, **handle.at_inference(**inputs.seen))
            bar.advance(len(numbers))


def words_of_rows(logits_NV: Tensor, inputs: Inputs, length: int, size: int) -> dict[str, np.ndarray]:
    """For each sequence of a batch how many tokens are judged (``masked``), how many of them the model finds most likely
    (``correct``), and their negative log-likelihood in nats (``nll``).

    Args:
        length: the tokens of a padded row.
        size: the rows.
    """
    row_N = inputs.places_N.cpu().numpy() // length
    right_N = (logits_NV.argmax(-1) == inputs.labels_N).cpu().numpy()
    return {
        "masked": np.bincount(row_N, minlength=size),
        "correct": np.bincount(row_N, right_N, size),
        "nll": np.bincount(row_N, nll_of(logits_NV, inputs.labels_N), size),
    }


def nll_of(logits: Tensor, labels_N: Tensor) -> np.ndarray:
    """The negative log-likelihood of each label, float64_N."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, labels_N, reduction="none").double().cpu().numpy()


class PredictionColumns:
    """The columns of predictions, filled batch by batch."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, list[Any]] = {name: [] for name in names}

    def add(self, **columns: Any) -> None:
        for name, values in columns.items():
            self.values[name] += values.tolist() if isinstance(values, np.ndarray) else values

    def sum(self, name: str) -> float:
        return float(math.fsum(self.values[name]))

    def table(self) -> pa.Table:
        """All rows, in the order of the sequences."""
        order = np.argsort(self.values["sequence"], kind="stable")
        schema = score_schema(list(self.values))
        arrays = [
            pa.array([int(values[i]) if pa.types.is_integer(kind) else values[i] for i in order], kind)
            for values, kind in zip(self.values.values(), schema.types, strict=True)
        ]
        return pa.table(arrays, schema=schema)


def ratio(part: float, whole: float) -> float | None:
    """The part by the whole; None if the whole is 0."""
    return part / whole if whole else None


def exp_of(loss: float) -> float | None:
    """The perplexity of a loss in nats; None if it is too large for a number."""
    return math.exp(loss) if loss < 700 else None


def write_scores(
    run: Run,
    task: str,
    columns: PredictionColumns,
    metrics: Mapping[str, float | None],
    signatures: Mapping[str, str],
    counts: Mapping[str, int],
    **more: Any,
) -> None:
    """Write ``predictions.parquet`` and ``metrics.json``.  Raises NumericalError if a metric is not finite."""
    for name, value in metrics.items():
        if value is not None and not math.isfinite(value):
            raise NumericalError(f"{name} is not finite ({value})", hint="were the weights of the model finite?")
    table = columns.table()
    with run.out.parquet("predictions.parquet", table.schema) as writer:
        writer.write_table(table)
    write_metrics(run, task, metrics, signatures, {"sequences": table.num_rows, **counts}, **more)
