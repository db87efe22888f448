"""The logged metrics of runs: loss, seconds and tokens of every step; validation losses and scores of some steps.

A finished run has ``metrics.parquet`` in its artifact, a running one ``metrics.jsonl`` in its folder of unfinished
work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from guidance.errors import InputError, NumericalError, UnknownName
from pipelines.stages import pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactDamaged, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.metrics_log import METRICS_LOG
from pipelines.training.resuming import RUN_FILE, begun_with

METRICS = "metrics.parquet"
KIND = "model"

PART = 10_000
"""Rows of a log to hold as Python objects at once."""

Points = tuple[tuple[int, float], ...]
"""(step, value measured after it) for some steps, in order."""


CIRCUMSTANCES = ("device", "precision", "processes")
"""What a model says of how it was trained, on which its speed depends."""


@dataclass(frozen=True)
class Origin:
    """The run that a curve belongs to.

    Attributes:
        reference: ``model/<id>``.
        settings: its configuration, without settings that do not affect the result.
        inputs: the content digest of each input, by role.
        finished: False if it is running or was interrupted.
        circumstances: those of `CIRCUMSTANCES` that are known.
    """

    reference: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    finished: bool = True
    circumstances: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Curve:
    """The training loss of one run, from its first step.

    Attributes:
        loss: name of the loss, as in the column ``loss/<name>``.
        losses: this loss at each step, without the losses of guides, in nats per prediction.
        seconds: time of each step, without validation and saving.
        tokens: tokens of each step.
        valid: validation losses of the same name.
        scores: other metrics evaluated during training, by their column, ``eval/<task>/<metric>``.
        floor: the validation loss that word frequencies alone give on the tokens that this run predicts; None if it is not known.
    """

    label: str
    loss: str
    losses: Sequence[float] | np.ndarray
    seconds: Sequence[float] | np.ndarray
    tokens: Sequence[float] | np.ndarray
    valid: Points = ()
    scores: Mapping[str, Points] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    floor: float | None = None

    @classmethod
    def of(cls, model: Artifact, label: str, *, loss: str | None = None) -> Curve:
        """The curve of a model artifact, by default of the loss of its task.

        Raises:
            InputError: the artifact has no metrics, or they are not as `guide pretrain` writes them.
            UnknownName: there is no such loss.
            NumericalError: a value is not finite.
        """
        if METRICS not in model.files:
            raise InputError(
                f"{label}: this model has no {METRICS}, the log of its training",
                hint="compare models made by `guide pretrain`",
            )
        model.verify(METRICS)
        try:
            with model.open(METRICS) as file:
                parquet = open_parquet(file)
                table = parquet.read([name for name in parquet.schema_arrow.names if _is_needed(name)])
        except pa.ArrowException as error:
            raise ArtifactDamaged(f"{model.path / METRICS}: {error}") from error
        counts = {key: model.counts[key] for key in CIRCUMSTANCES if key in model.counts}
        about = begun_with(model, pretrain.STAGE)
        origin = Origin(model.reference, about["config"], about["inputs"], True, counts)
        return dataclasses.replace(_curve(table, label, loss, origin), floor=model.counts.get("unigram_floor"))

    @property
    def steps(self) -> range:
        """1, 2, …, the last step."""
        return range(1, len(self.losses) + 1)

    @property
    def seed(self) -> int | None:
        """The seed of the run, if known."""
        return self.origin.settings.get("seed")

    def until(self, step: int) -> Curve:
        """The same run, cut off after a step."""
        return dataclasses.replace(
            self,
            losses=self.losses[:step],
            seconds=self.seconds[:step],
            tokens=self.tokens[:step],
            valid=_until(self.valid, step),
            scores={name: _until(points, step) for name, points in self.scores.items()},
        )

    def smoothed(self, window: int) -> np.ndarray:
        """At every step the mean loss of the last ``window`` steps, or of all so far if there are fewer."""
        total = np.concatenate(([0.0], np.cumsum(self.losses, dtype=np.float64)))
        last = np.arange(1, len(total))
        first = np.maximum(0, last - window)
        return (total[last] - total[first]) / (last - first)

    def trend(self, window: int, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """A smooth curve through the losses, for pictures: its values at some steps, counted from 0.

        Local linear regression with tricube weights, which fall to 0 at a distance of ``window`` steps.  It looks both ways
        and fits a line at the ends, so it neither lags behind, as `smoothed` does, nor bends where a window becomes full.

        Source: Cleveland 1979, *Robust locally weighted regression and smoothing scatterplots*, without the robust weights,
        and with a width in steps.
        """
        losses = np.asarray(self.losses, dtype=np.float64)
        values = np.empty(len(steps))
        for number, step in enumerate(steps):
            near = np.arange(max(0, step - window + 1), min(len(losses), step + window))
            weights = (1 - np.abs((near - step) / window) ** 3) ** 3
            weights /= weights.sum()
            distance = near - weights @ near
            mean, spread = weights @ losses[near], weights @ distance**2
            slope = (weights * distance) @ losses[near] / spread if spread else 0.0
            values[number] = mean + slope * (step - weights @ near)
        return values

    def elapsed(self) -> np.ndarray:
        """Seconds of training until the end of each step."""
        return np.cumsum(self.seconds, dtype=np.float64)

    def first_step_at(self, loss: float, window: int) -> int | None:
        """The first step, once the window is full, with a smoothed loss of at most ``loss``; None if there is none."""
        means = self.smoothed(window)
        reached = np.flatnonzero(means <= loss + 1e-9 * abs(loss))  # equal losses may differ by rounding
        reached = reached[reached >= window - 1]
        return int(reached[0]) + 1 if len(reached) else None

    @property
    def tokens_per_second(self) -> float:
        return float(sum(self.tokens)) / max(float(sum(self.seconds)), 1e-9)


def read_curve(reference: str, store: Store, *, loss: str | None = None) -> Curve:
    """The curve of a finished run (a model artifact) or of an unfinished one (``model/<id>``).

    Raises:
        ArtifactMissing: there is no such run.
        InputError: as for `Curve.of`, or the run has not finished a step yet.
    """
    try:
        return _finished(reference, store, loss)
    except ArtifactMissing:
        folder = store.find_unfinished(KIND, reference)
        if folder is None:
            raise
    try:
        return _unfinished(folder, reference, loss)
    except FileNotFoundError:  # the run has just finished
        return _finished(f"{KIND}/{folder.name}", store, loss)


def _finished(reference: str, store: Store, loss: str | None) -> Curve:
    with store.load(reference, kind=KIND, verify=False) as artifact:  # the weights are not needed
        return Curve.of(artifact, reference, loss=loss)


def _unfinished(folder: Path, reference: str, loss: str | None) -> Curve:
    try:
        about = json.loads((folder / RUN_FILE).read_bytes())
        origin = Origin(f"{KIND}/{folder.name}", about["config"], about["inputs"], False)
        table = pa.concat_tables(_parts(folder / METRICS_LOG), promote_options="default")
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise ArtifactDamaged(f"{folder}: not the log of a training run ({error})") from error
    if not len(table):
        raise InputError(f"{reference} has not finished a step yet", hint="try again later")
    return _curve(table, reference, loss, origin)


def _parts(log: Path) -> Iterator[pa.Table]:
    """The needed columns, `PART` rows at a time.  An incomplete last line, still being written, is skipped."""
    yield pa.table({})
    with contextlib.suppress(FileNotFoundError), open(log, "rb") as file:
        while lines := list(itertools.islice(file, PART)):
            rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
            names = [name for name in dict.fromkeys(name for row in rows for name in row) if _is_needed(name)]
            yield pa.table({name: pa.array([row.get(name) for row in rows], pa.float64()) for name in names})


def _is_needed(name: str) -> bool:
    return name in ("step", "seconds", "tokens") or name.startswith(("loss/", "valid/", "eval/"))


def _curve(table: pa.Table, label: str, loss: str | None, origin: Origin) -> Curve:
    """A curve from the columns of the metrics."""
    names = [name.removeprefix("loss/") for name in table.column_names if name.startswith("loss/")]
    # the total includes the losses of guides, so it is not comparable between runs
    known = [name for name in names if name != "total"]
    if loss is not None and loss.removeprefix("loss/") not in known:
        raise UnknownName(f"loss of {label}", loss, known)
    if not known:
        raise InputError(f"{label}: its metrics have no training loss")
    # for translation, compare the loss without label smoothing, as validation does
    chosen = loss.removeprefix("loss/") if loss is not None else "nll" if "nll" in known else known[0]
    if not len(table):
        raise InputError(f"{label} has not finished a step")
    steps = _numbers(table, "step", label)
    if list(steps) != list(range(1, len(steps) + 1)):
        raise InputError(f"{label}: its metrics do not hold the steps 1 to {len(steps)}, one row each")
    return Curve(
        label,
        chosen,
        _numbers(table, f"loss/{chosen}", label),
        _numbers(table, "seconds", label),
        _numbers(table, "tokens", label),
        _points(table, f"valid/{chosen}", label) if f"valid/{chosen}" in table.column_names else (),
        {name: _points(table, name, label) for name in table.column_names if name.startswith("eval/")},
        origin,
    )


def _numbers(table: pa.Table, name: str, label: str) -> np.ndarray:
    """A column with a finite number at every step.

    Raises:
        InputError: the column or one of its values is missing.
        NumericalError: a value is not finite.
    """
    if name not in table.column_names:
        raise InputError(f"{label}: its metrics have no column {name!r}")
    steps, values = _known(table, name, label)
    if len(steps) < len(table):
        missing = min(set(range(1, len(table) + 1)) - set(steps.tolist()))
        raise InputError(f"{label}: {name} is missing at step {missing}")
    return values


def _points(table: pa.Table, name: str, label: str) -> Points:
    """The values of a column where it has any, with their steps."""
    steps, values = _known(table, name, label)
    return tuple(zip(steps.tolist(), values.tolist(), strict=True))


def _known(table: pa.Table, name: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a column has a value, and the values, which are finite."""
    column = table[name]
    steps = np.flatnonzero(column.is_valid()) + 1
    try:
        values: np.ndarray = column.drop_null().cast(pa.float64()).to_numpy()
    except pa.ArrowException as error:
        raise InputError(f"{label}: {name} holds {column.type}, not numbers") from error
    for row in np.flatnonzero(~np.isfinite(values))[:1]:
        raise NumericalError(f"{label}: {name} is {values[row]} at step {steps[row]}", hint="leave this run out")
    return steps, values


def _until(points: Points, step: int) -> Points:
    return tuple((at, value) for at, value in points if at <= step)
