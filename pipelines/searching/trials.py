"""The runs of a search: each is a model of its own, made by ``finetune`` or ``pretrain``, here or in other processes.

A run that exists is not repeated, and one that was interrupted goes on, so a search can be stopped at any time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guidance.errors import GuideError, InputError, Interrupted, MachineError, NumericalError, counted
from pipelines.engine.executor import Workers, run_all
from pipelines.progress import Progress, log
from pipelines.searching.settings import Setting, as_flag
from pipelines.stages import evaluate, finetune, pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryStore, NotYet
from pipelines.storage.store import Store
from pipelines.training.checkpoints import best_name
from pipelines.training.config import TrainingConfig
from pipelines.training.objectives import OBJECTIVES


@dataclass(frozen=True)
class Start:
    """A moment of pre-training.

    Attributes:
        step: after how many steps.
        seconds: of training until then.
        init: the model folder, or the reference of the model.
    """

    step: int
    seconds: float
    init: str


@dataclass(frozen=True)
class Outcome:
    """What a run has given, as plain data that a worker sends back.

    Attributes:
        model: its reference; empty if it failed.
        valid: its validation; see `validation`.
        evaluations: the references of its evaluations on the test split, one for each of its kept weights.
        metrics: on the test split; the mean over several kept weights.
        failure: why it failed: kind, message and hint.
    """

    model: str = ""
    valid: float | None = None
    evaluations: tuple[str, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    failure: tuple[type[GuideError], str, str | None] | None = None


@dataclass
class Trial:
    """One run of a search.

    Attributes:
        fold: which fold is tested, from 0, of how many ``folds``; without folds both are 0.
        setting: what varies; ``number``: which one of all settings it is.
        shown: the values of what varies, as people read them.
        rows: labels of the rows of the plan that are kept; None where all are and this does not vary.
        start: the moment of pre-training that the run starts from, if there are several.
        data: references of the dataset, or of the sequences.
        config: all settings of the run.
        selected_on: whether its validation counts in the choice of a setting.
        chosen: whether its setting is the best of its fold, at its start and for its rows.
    """

    fold: int
    number: int
    setting: Setting
    shown: Mapping[str, Any]
    rows: tuple[str, ...] | None
    data: tuple[str, ...]
    config: TrainingConfig
    start: Start | None = None
    selected_on: bool = True
    chosen: bool = False
    folds: int = 0
    outcome: Outcome = field(default_factory=Outcome)
    model: Artifact | None = None
    evaluation: Artifact | None = None

    @property
    def varied(self) -> dict[str, Any]:
        """What varies and its values, as people read them: the rows that are kept, and the settings."""
        kept = {} if self.rows is None else {"rows": "+".join(self.rows) or "none"}
        return kept | dict(self.shown)

    def __str__(self) -> str:
        begun = [f"from step {self.start.step}"] if self.start else []
        parts = [f"{as_flag(name)}={value}" for name, value in self.varied.items()]
        fold = [f"fold {self.fold + 1} of {self.folds}"] if self.folds else []
        return ", ".join([*begun, *parts, f"seed {self.config.seed}", *fold])


@dataclass(frozen=True)
class Measures:
    """How runs are measured.

    Attributes:
        task: of ``finetune``; empty for ``pretrain``, whose first loss counts.
        select: the validation that counts: ``loss``, or the name of a metric.
        weights: ``best`` or ``last``.
        parser, masks, scores: see `pipelines.stages.evaluate.Config`.
    """

    task: str
    select: str
    weights: str
    device: str
    parser: str = ""
    masks: str = ""
    scores: str = ""


def run_trials(
    trials: Sequence[Trial],
    measures: Measures,
    config: Workers,
    store: Store,
    progress: Progress | None,
    *,
    test: bool,
    called: str = "run",
) -> None:
    """Train runs, unless they exist, and with ``test`` measure them on the test split.

    Args:
        called: what messages call a run.

    Raises:
        InputError, NumericalError: some runs have failed; all others are done, and kept.
        MachineError, Interrupted: at once, since the others would fail, too.
        NotYet: in a dry run, some runs do not exist yet, and no setting is refused.
    """
    is_dry, missing = isinstance(store, DryStore), set[int]()
    workers = not is_dry and (config.executor == "dask" or min(config.jobs, len(trials)) > 1)
    names = [f"{called} {number} of {len(trials)}" for number in range(1, len(trials) + 1)]
    folder = os.getcwd()
    tasks = [
        (
            name,
            trial,
            measures,
            type(store)(store.root.absolute()),
            folder,
            test,
            None if workers else progress or Progress(),
        )
        for name, trial in zip(names, trials, strict=True)
    ]
    with (progress if workers and progress else Progress()).task("Runs", total=len(trials), unit="runs") as bar:
        work = functools.partial(_rehearsed, missing) if is_dry else attempt
        for number, outcome in run_all(work, tasks, config if workers else Workers()):
            trials[number].outcome = outcome
            if workers:
                log.info("%s is done: %s", names[number], trials[number])
                bar.advance()
    failed = [(name, trial) for name, trial in zip(names, trials, strict=True) if trial.outcome.failure]
    if failed:
        raise _all_failures(failed, len(trials))
    if missing:
        raise NotYet(f"{counted(len(missing), 'setting')} of the search have runs that do not exist yet")


def _rehearsed(missing: set[int], name: str, trial: Trial, *arguments: Any) -> Outcome:
    """What a dry run knows of a run: its outcome if it exists, or else whether it is refused.  Of each setting only the first run
    that does not exist is rehearsed, since other seeds and folds are checked alike.

    Args:
        missing: the numbers of the settings that have such a run; added to.
    """
    if trial.number in missing:
        return Outcome()
    try:
        outcome = attempt(name, trial, *arguments)
    except NotYet:
        outcome = Outcome()
    if not outcome.model:
        missing.add(trial.number)
    return outcome


def _all_failures(failed: Sequence[tuple[str, Trial]], number: int) -> GuideError:
    kinds, messages, hints = zip(*(trial.outcome.failure or () for _, trial in failed), strict=True)
    told = "; ".join(f"{name} ({trial}): {message}" for (name, trial), message in zip(failed, messages, strict=True))
    problem = told if len(failed) == 1 else f"{len(failed):,} of {number:,} runs failed. {told}"
    kept = "the other runs are kept, and the same command trains only what is missing"
    hint = "; ".join(dict.fromkeys([*filter(None, hints), *([kept] if len(failed) < number else [])]))
    kind: type[GuideError] = NumericalError if set(kinds) == {NumericalError} else InputError
    return kind(problem, hint=hint or None)


_ONE_AT_A_TIME = threading.Lock()
"""Two trainings in threads of one process, as Dask starts them, would draw from the same random numbers."""


def attempt(
    name: str, trial: Trial, measures: Measures, store: Store, folder: str, test: bool, progress: Progress | None
) -> Outcome:
    """Train and test one run.  What is wrong with this run alone is in the outcome; what stops all others is raised.

    Args:
        name: of the run, for messages.
        folder: the working folder, which relative paths in the settings start from.
        progress: draws progress; None in a worker, which also logs nothing.
    """
    if progress is not None:
        log.info("%s: %s", name, trial)
    try:
        with _ONE_AT_A_TIME, contextlib.chdir(folder) if Path(folder).is_dir() else contextlib.nullcontext():
            return _run(trial, measures, store, progress, test)
    except Interrupted:
        raise
    except MachineError as error:
        raise MachineError(f"{name} ({trial}): {error.message}", hint=error.hint) from error
    except GuideError as error:
        if progress is not None:
            log.warning("%s failed: %s", name, error.message)
        kind = NumericalError if isinstance(error, NumericalError) else InputError
        return Outcome(failure=(kind, error.message, error.hint))
    except Exception as error:
        error.add_note(f"in {name} of the search: {trial}")
        raise


def _run(trial: Trial, measures: Measures, store: Store, progress: Progress | None, test: bool) -> Outcome:
    config: Any = trial.config
    made = (
        pretrain.run(trial.data, config, store=store, progress=progress)
        if isinstance(config, pretrain.Config)
        else finetune.run(trial.data[0], config, store=store, progress=progress)
    )
    assert made is not None, "there is one process"
    with store.load(made.reference, kind="model", verify=False) as model:
        valid = validation(model, measures)
        evaluations = tested(model, trial, measures, store, progress) if test and has_test(trial, store) else []
    metrics = {
        name: mean_and_sd([one.counts["metrics"].get(name) for one in evaluations])["mean"]
        for name in (evaluations[0].counts["metrics"] if evaluations else ())
    }
    return Outcome(made.reference, valid, tuple(one.reference for one in evaluations), metrics)


def validation(model: Artifact, measures: Measures) -> float | None:
    """The validation by which runs are compared: the loss, or the metric that selects; None if there was no validation."""
    counts, task, select = model.counts, measures.task, measures.select
    if measures.weights == "last" and select == "loss":
        value = next((value for name, value in counts["final"].items() if name.startswith(f"valid/{task}")), None)
    elif measures.weights == "last":
        value = counts["final"].get(f"eval/{task}/{select}")
    else:
        value = counts["best_valid_loss"] if select == "loss" else counts["best"]["value"]
    return None if value is None else float(value)


def has_test(trial: Trial, store: Store) -> bool:
    """Whether the data of a run have a test split, and its models can be measured."""
    with store.load(trial.data[0], verify=False) as data:
        if data.kind == "corpus":
            return "test" in data.counts["splits"]
        row = OBJECTIVES[trial.config.objective]  # type: ignore[attr-defined]
        return bool(row.measured_as and len(trial.data) == 1 and data.files.get("test.parquet", {}).get("rows"))


def tested(
    model: Artifact, trial: Trial, measures: Measures, store: Store, progress: Progress | None
) -> list[Artifact]:
    """The evaluations of a run on the test split, one for each of its kept weights, of which the metrics are averaged.

    Source: Liu & Lapata 2019 average the test results of the three best checkpoints, and Li et al. 2022 do the same.
    """
    weights = measures.weights if validation(model, measures) is not None else "last"
    kept = max(1, len(model.counts.get("best_steps", ()))) if weights == "best" else 1
    # the masks of a fine-tuning belong to the sequences of its training
    own = {"masks": measures.masks, "scores": measures.scores, "floors": False}
    more: dict[str, Any] = own if isinstance(trial.config, pretrain.Config) else {"parser": measures.parser}
    made = []
    for number in range(1, kept + 1):
        name = best_name(number) if weights == "best" else weights
        settings = evaluate.Config(weights=name, device=measures.device, **more)
        made.append(evaluate.run(model.reference, trial.data[0], settings, store=store, progress=progress).artifact)
    return made


def mean_and_sd(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation; None where a value is missing, or there is only one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "sd": None}
    return {"mean": statistics.fmean(known), "sd": statistics.stdev(known) if len(known) > 1 else None}
