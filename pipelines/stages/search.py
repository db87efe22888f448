"""Stage ``search``: fine-tune with every combination of some settings, seeds and folds, and test the setting that is best.

Reads a dataset.  Every run is a model of its own, made by `pipelines.stages.finetune`, so an interrupted search goes on with
the runs that are missing, and ``--shard i/n`` divides them among jobs.  In each fold the setting with the best mean
validation over its seeds is chosen, and only its models are evaluated on the test split.

With ``--along`` every run starts from each snapshot of a pre-trained model in turn, and at every moment the best setting is
tested.

Writes search@1: ``runs.parquet`` (one row for each run) and ``search.json`` (the chosen settings, and the mean and standard
deviation of the test metrics over the runs with these settings).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from pydantic import Field, ValidationError, model_validator

from guidance.errors import InputError
from pipelines.engine.declaration import Stage, roles
from pipelines.engine.executor import ShareOfWork, share_of
from pipelines.engine.stage import Options, Result, Run, check_working_folder, knob, run_stage
from pipelines.lazy import np, pa, pq
from pipelines.progress import log
from pipelines.stages import evaluate, finetune, folds, missing
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from pipelines.training.checkpoints import best_name
from pipelines.training.tasks import task_for

if TYPE_CHECKING:
    from pipelines.training.task import Task

RUNS = "runs.parquet"
MOST_RUNS = 10_000

_NOT_VARIED = ("seed", "grid", "seeds", "folds", "fold_seed", "weights", "shard", "task", "select", "along")


class Config(finetune.Config):
    """Settings of a search; all others are those of the runs."""

    grid: list[str] = Field(
        [],
        description="A setting and the values to try, such as learning-rate=1e-5,2e-5 (repeatable); all combinations are "
        "trained.",
    )
    seeds: int = Field(1, ge=1, description="Runs of each combination, with seeds from --seed on.")
    folds: int = Field(0, ge=0, description="Folds of a cross-validation; 0 takes the splits of the dataset.")
    fold_seed: int = Field(0, ge=0, lt=2**63, description="Seed of the assignment to folds.")
    along: str = Field(
        "",
        description="A pre-trained model: each of its snapshots and its last weights are fine-tuned and tested, which shows how "
        "the score grows along pre-training (`guide pretrain --snapshots`).",
    )
    weights: Literal["best", "last"] = Field(
        "best", description="Weights that count: those of each run's best validation, or of its last step."
    )
    shard: ShareOfWork = knob(
        "", "i/n: train every n-th run, starting at the i-th, and stop. The same command without --shard does the rest."
    )

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.folds == 1:
            raise ValueError("--folds: one fold leaves nothing to train on")
        if self.along and self.init:
            raise ValueError("--along and --init exclude each other: each run starts from a moment of --along")
        return self


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


@dataclass
class Member:
    """One run of a search.

    Attributes:
        fold: which fold is tested; 0 without folds.
        setting: the values of the settings that vary.
        start: the moment of pre-training that the run starts from, if there are several.
        data: reference of the dataset.
        config: all settings of the run.
    """

    fold: int
    setting: Mapping[str, Any]
    data: str
    config: finetune.Config
    start: Start | None = None
    model: Artifact | None = None
    valid: float | None = None
    evaluation: Artifact | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name.replace('_', '-')}={value}" for name, value in self.setting.items()]
        begun = [f"from step {self.start.step}"] if self.start else []
        return ", ".join([*begun, *parts, f"seed {self.config.seed}"])


def run(data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result | None:
    """Train all runs on a dataset, choose, and test.  With ``--shard`` only some runs are trained, and the result is None.
    Raises InputError if a value of the grid is not possible, or the settings cannot be compared, for want of validation
    examples."""
    check_working_folder()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a search trains one run after the other", hint="start one process for each --shard i/n")
    progress = options.get("progress")
    with ExitStack() as opened:
        dataset, sequences = missing.open_data(data, store, opened)
        if sequences is not None:
            raise InputError(f"{sequences.reference} has sequences; a search needs a dataset", hint=dataset.reference)
        task = task_for(config.task, dataset.counts, dataset.reference)
        config = finetune.resolved(config, task)
        settings = _settings(config)
        if len(settings) > 1 and not config.folds and "valid" not in dataset.counts["splits"]:
            raise InputError(
                f"settings are compared by their validation, and {dataset.reference} has no validation examples",
                hint="guide build-dataset --valid-fraction 0.1",
            )
        parts = _parts(dataset, config, store, options)
        inputs: dict[str, Any] = {"dataset": dataset}
        starts: Sequence[Start | None] = [None]
        if config.along:
            inputs["pretrained"] = opened.enter_context(store.load(config.along, kind="model"))
            starts = _starts(inputs["pretrained"])
            config = config.model_copy(update={"max_length": missing.longest(config.along, config.max_length, store)})
        members = _members(config, task, settings, parts, starts)
        mine = share_of(members, config.shard)
        for number, member in enumerate(mine, 1):
            log.info("run %d of %d: %s%s", number, len(mine), f"fold {member.fold}, " if config.folds else "", member)
            made = finetune.run(member.data, member.config, store=store, progress=progress)
            assert made is not None, "there is one process"
            member.model = opened.enter_context(store.load(made.reference, kind="model"))
            member.valid = _validation(member.model, task.name, config)
        if config.shard:
            log.info("--shard %s: %d of %d runs are done", config.shard, len(mine), len(members))
            return None
        chosen = _chosen(members, config)
        for member in chosen:
            _test(member, config, store, opened, progress)
        inputs |= dict(zip(roles("model", len(members)), (m.model for m in members), strict=True))
        tested = [member.evaluation for member in chosen if member.evaluation is not None]
        inputs |= dict(zip(roles("evaluation", len(tested)), tested, strict=True))

        write = functools.partial(build, members=members, chosen=chosen, task=task.name)
        return run_stage(replace(STAGE, build=write), config, inputs, store=store, **options)


def _settings(config: Config) -> list[dict[str, Any]]:
    """Every combination of the values of the grid.  Raises InputError if an entry is not written as
    NAME=VALUE,VALUE, or names no setting that can vary."""
    known = finetune.Config.model_fields
    axes: dict[str, list[str]] = {}
    for text in config.grid:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name not in known or name in _NOT_VARIED:
            raise InputError(
                f"--grid {text}: {name.replace('_', '-')} is no setting that can vary", hint="guide finetune -h"
            )
        if name in axes:
            raise InputError(f"--grid names {name.replace('_', '-')} twice")
        axes[name] = [value.strip() for value in values.split(",")]
        if axes[name] == [""] or ("" in axes[name] and name != "plan") or len(set(axes[name])) < len(axes[name]):
            raise InputError(
                f"--grid {text}: not NAME=VALUE,VALUE with different values", hint="--grid learning-rate=1e-5,2e-5"
            )
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def _parts(dataset: Artifact, config: Config, store: Store, options: Options) -> list[str]:
    """The dataset itself, or its folds."""
    if not config.folds:
        return [dataset.reference]
    return [
        folds.run(
            dataset.reference,
            folds.Config(folds=config.folds, fold=fold, seed=config.fold_seed),
            store=store,
            progress=options.get("progress"),
        ).reference
        for fold in range(config.folds)
    ]


def _starts(pretrained: Artifact) -> list[Start]:
    """The snapshots of a pre-trained model and its last weights, by step.  Raises InputError if it has no snapshots."""
    with pretrained.open("metrics.parquet") as file:
        elapsed = np.concatenate([[0.0], np.cumsum(pq.read_table(file, columns=["seconds"])["seconds"].to_numpy())])
    last = int(pretrained.counts["steps"])
    inits = {last: pretrained.reference}
    for name in pretrained.files:
        if match := re.fullmatch(r"snapshots/step-(\d+)/config\.json", name):
            inits.setdefault(int(match[1]), str(pretrained.path.absolute() / name.rpartition("/")[0]))
    if len(inits) == 1:
        raise InputError(
            f"{pretrained.reference} has no snapshots to start from",
            hint="guide pretrain … --snapshots 500 --snapshots 1000",
        )
    return [Start(step, float(elapsed[step]), inits[step]) for step in sorted(inits)]


def _members(
    config: Config,
    task: type[Task],
    settings: Sequence[Mapping[str, Any]],
    parts: Sequence[str],
    starts: Sequence[Start | None],
) -> list[Member]:
    """All runs: fold by fold, moment by moment of pre-training, setting by setting, seed by seed."""
    number_of_runs = len(parts) * len(starts) * len(settings) * config.seeds
    if number_of_runs > MOST_RUNS:
        raise InputError(f"{number_of_runs:,} runs; at most {MOST_RUNS:,} are possible")
    given = {name: getattr(config, name) for name in config.model_fields_set if name in finetune.Config.model_fields}
    if config.along:
        given["max_length"] = config.max_length
    members = []
    for (fold, data), start, setting, number in itertools.product(
        enumerate(parts), starts, settings, range(config.seeds)
    ):
        values = {**given, **setting, "task": task.name, "seed": config.seed + number}
        values |= {"init": start.init} if start else {}
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in setting and other not in setting:
                values.pop(other, None)
        try:
            own = finetune.resolved(finetune.Config(**values), task)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = str(problem["loc"][0]).replace("_", "-") if problem["loc"] else "a combination"
            raise InputError(f"--grid: {name}: {problem['msg']}, not {problem['input']!r}") from error
        read = {name: getattr(own, name) for name in setting}
        members.append(Member(fold, read, data, own, start))
    return members


def _validation(model: Artifact, task: str, config: Config) -> float | None:
    """The validation by which runs are compared: the loss, or the metric that selects."""
    counts = model.counts
    if config.weights == "last":
        name = f"valid/{task}" if config.select == "loss" else f"eval/{task}/{config.select}"
        value = counts["final"].get(name)
    else:
        value = counts["best_valid_loss"] if config.select == "loss" else counts["best"]["value"]
    return None if value is None else float(value)


def _chosen(members: Sequence[Member], config: Config) -> list[Member]:
    """The runs of the setting that is best in each fold and at each moment; of equal ones the first."""
    chosen: list[Member] = []
    sign = -1.0 if config.select == "loss" else 1.0
    for _, runs in itertools.groupby(members, key=lambda member: (member.fold, member.start)):
        own = list(runs)
        groups = [own[start : start + config.seeds] for start in range(0, len(own), config.seeds)]
        chosen += max(groups, key=lambda group: sign * statistics.fmean(member.valid or 0.0 for member in group))
    return chosen


def _test(member: Member, config: Config, store: Store, opened: ExitStack, progress: Any) -> None:
    """Evaluate a run on the test split, if there is one; of several kept weights the metrics are averaged.

    Source: Liu & Lapata 2019 average the test results of the three best checkpoints, and Li et al. 2022 do the same.
    """
    assert member.model is not None, "it has been trained"
    with store.load(member.data, kind="corpus", verify=False) as dataset:
        if "test" not in dataset.counts["splits"]:
            return
    weights = config.weights if member.valid is not None else "last"
    kept = len(member.model.counts.get("best_steps", ())) if weights == "best" else 1
    evaluations = []
    for number in range(1, max(1, kept) + 1):
        name = best_name(number) if weights == "best" else weights
        settings = evaluate.Config(weights=name, parser=config.parser, device=config.device)
        made = evaluate.run(member.model.reference, member.data, settings, store=store, progress=progress)
        evaluations.append(opened.enter_context(store.load(made.reference, kind="evaluation")))
    member.evaluation = evaluations[0]
    member.metrics = {
        name: _mean_and_sd([one.counts["metrics"].get(name) for one in evaluations])["mean"]
        for name in evaluations[0].counts["metrics"]
    }


COLUMNS = {
    "fold": ("int32", "running number"),
    "step": ("int64", "steps of pre-training before; null without --along"),
    "seconds": ("double", "of pre-training before; null without --along"),
    "seed": ("int64", "seed of the run"),
    "setting": ("string", "settings that vary, NAME=VALUE with spaces between"),
    "model": ("string", "id of the run's model"),
    "valid": ("double", "validation loss, or metric of --select; null without one"),
    "chosen": ("bool", "whether the setting is the best of its fold"),
    "evaluation": ("string", "id of the evaluation on the test split, if there is one"),
}


def run_schema(metrics: Sequence[str] = ()) -> Any:
    """Columns of ``runs.parquet``, with a column ``test/NAME`` for each metric."""
    tested = {f"test/{name}": ("double", "on the test split") for name in metrics}
    return schema_of(COLUMNS | tested, may_be_null=("step", "seconds", "valid", "evaluation", *tested))


def build(run: Run, members: Sequence[Member] = (), chosen: Sequence[Member] = (), task: str = "") -> None:
    """Write the tables of a search, from all runs and the ``chosen`` ones among them, which were tested."""
    names = list(dict.fromkeys(name for member in chosen for name in member.metrics))
    schema = run_schema(names)
    rows = [
        {
            "fold": member.fold,
            "step": member.start.step if member.start else None,
            "seconds": member.start.seconds if member.start else None,
            "seed": member.config.seed,
            "setting": " ".join(f"{name}={value}" for name, value in member.setting.items()),
            "model": member.model.id if member.model else "",
            "valid": member.valid,
            "chosen": any(member is other for other in chosen),
            "evaluation": member.evaluation.id if member.evaluation else None,
            **{f"test/{name}": member.metrics.get(name) for name in names},
        }
        for member in members
    ]
    with run.out.parquet(RUNS, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    along = {
        str(step): {
            name: _mean_and_sd([m.metrics.get(name) for m in chosen if m.start and m.start.step == step])
            for name in names
        }
        for step in steps
    }
    summary = {
        "task": task,
        "select": run.config.select,
        "runs": len(members),
        "chosen": [row["setting"] for row in rows if row["chosen"]],
        "metrics": {name: _mean_and_sd([m.metrics.get(name) for m in chosen]) for name in names},
        "settings": _by_setting(rows),
        **({"along": along} if along else {}),
    }
    run.out.write_json("search.json", {"schema": 1, **summary})
    run.out.counts |= summary


def _by_setting(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """For each setting: its mean validation over all folds and seeds, its deviation, and how many runs were chosen."""
    by_setting: dict[str, dict[str, float | int | None]] = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        by_setting[setting] = {
            **_mean_and_sd([row["valid"] for row in own]),
            "chosen": sum(row["chosen"] for row in own),
        }
    return by_setting


def _mean_and_sd(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation; None where a value is missing, or there is only one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "sd": None}
    return {"mean": statistics.fmean(known), "sd": statistics.stdev(known) if len(known) > 1 else None}


STAGE = Stage("search", "search", 1, Config, build)
