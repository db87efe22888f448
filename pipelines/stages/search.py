"""Stage ``search``: train with every combination of some settings, rows of a plan, seeds and folds, and test the best one.

Reads a dataset, whose runs are made by ``finetune``, or sequences of running text, whose runs are made by ``pretrain``.  Every
run is a model of its own, so an interrupted search goes on with the runs that are missing, and ``--shard i/n`` or ``--jobs``
divides them.  In each fold the setting with the best mean validation over its seeds is chosen, and only its models are
evaluated on the test split.  Where the rows of the plan vary, the choice is made for each set of rows, so that all are compared.

With ``--along`` every run starts from each snapshot of a pre-trained model in turn, and at every moment the best setting is
tested.

Writes search@1: ``runs.parquet`` (one row for each run) and ``search.json`` (the chosen settings, and the mean and standard
deviation of the test metrics over the runs with these settings).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from pydantic import ValidationError

from guidance.errors import InputError
from pipelines.engine.declaration import Stage, roles
from pipelines.engine.executor import share_of
from pipelines.engine.stage import Options, Result, Run, check_working_folder, run_stage
from pipelines.lazy import np, pa, pq
from pipelines.progress import log
from pipelines.searching.config import MOST_RUNS, MOST_SUBSETS, AnyConfig, Config, PretrainConfig, SearchConfig
from pipelines.searching.settings import Setting, axes_of, left_out_one_by_one, number_of_rows, settings_of, subsets
from pipelines.searching.trials import Measures, Outcome, Start, Trial, has_test, mean_and_sd, run_trials
from pipelines.stages import finetune, folds, missing, pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.dry import DryArtifact, where_known
from pipelines.storage.store import Store
from pipelines.storage.tables import schema_of
from pipelines.training.config import NONE
from pipelines.training.objective import Objective
from pipelines.training.plans import load_plan
from pipelines.training.tasks import task_for

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training.task import Task

__all__ = ["STAGE", "Config", "PretrainConfig", "run"]

RUNS = "runs.parquet"

FRESH = "valid_of_test_seeds"
"""In ``search.json``: the validation of the runs that the choice has not seen."""


def config_for(data: Sequence[str], given: Mapping[str, Any], store: Store) -> type[AnyConfig]:
    """Whether a search fine-tunes or pre-trains: `Config` for a dataset, and `PretrainConfig` for sequences of running text, or
    where an objective is given.

    Args:
        data: references of the data; given: the settings that the user gave.

    Raises:
        InputError: one of these settings belongs to the other kind.
    """
    with store.load(data[0], verify=False) as first:
        is_text = first.kind == "sequences" and (
            "objective" in given or isinstance(first, DryArtifact) or "shape" not in first.counts
        )
        kind: type[AnyConfig] = PretrainConfig if is_text else Config
        for name in given:
            if name not in kind.model_fields:
                command, other = ("pretrain", "finetune") if is_text else ("finetune", "pretrain")
                has = "running text" if is_text else "examples of a task"
                raise InputError(
                    f"--{name.replace('_', '-')} is for `guide {other}`, and {first.reference} has {has}",
                    hint=f"guide {command} -h lists the settings of these runs",
                )
    return kind


def run(data: str | Sequence[str], config: AnyConfig, *, store: Store, **options: Unpack[Options]) -> Result | None:
    """Train all runs on a dataset, or on sequences, choose, and test.  With ``--shard`` only some runs are trained, and the
    result is None.

    Raises:
        InputError: a value of the grid is not possible, the plan has no such row, the settings cannot be compared, for want of
            validation examples, or some runs failed; the others are kept.
    """
    check_working_folder()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a run of a search has one process", hint="--jobs, or start a command for each --shard i/n")
    if name := options.get("name"):
        store.check_name_free(name, STAGE.kind)
    progress, references = options.get("progress"), [data] if isinstance(data, str) else list(data)
    with ExitStack() as opened:
        inputs, row, config = _opened(references, config, store, opened)
        first = next(iter(inputs.values()))
        starts: Sequence[Start | None] = [None]
        if isinstance(config, Config) and config.along:
            inputs["pretrained"] = opened.enter_context(store.load(config.along, kind="model"))
            starts = _starts(inputs["pretrained"])
            config = config.model_copy(update={"max_length": missing.longest(config.along, config.max_length, store)})
        settings, labels = _settings(config, row, store)
        # the choice is made for each set of rows; a set with one setting leaves none
        is_choice = len(settings) > len({setting.kept for setting in settings})
        if is_choice and not config.folds:
            with where_known():
                _check_validation(first)
        parts = _parts(inputs, config, store, options)
        trials = list(_trials(config, row, settings, parts, starts, store))

        measures = _measures(config, row)
        mine = share_of(trials, config.shard)
        test_all = not config.test_seeds and (config.test_every or not is_choice)
        run_trials(mine, measures, config, store, progress, test=test_all)
        if config.shard:
            log.info("--shard %s: %d of %d runs are done", config.shard, len(mine), len(trials))
            return None

        _choose(trials, config)
        tested = [trial for trial in trials if trial.chosen or config.test_every]
        if config.test_seeds:
            tested = _with_test_seeds(tested, config)
            trials = sorted([*trials, *tested], key=_place)
        if not test_all and (config.test_seeds or any(has_test(trial, store) for trial in tested)):
            run_trials(tested, measures, config, store, progress, test=True, called="tested run")

        for trial in trials:
            trial.model = opened.enter_context(store.load(trial.outcome.model, kind="model"))
            for reference in trial.outcome.evaluations[:1]:
                trial.evaluation = opened.enter_context(store.load(reference, kind="evaluation"))
        inputs |= dict(zip(roles("model", len(trials)), (t.model for t in trials), strict=True))
        evaluations = [trial.evaluation for trial in trials if trial.evaluation is not None]
        inputs |= dict(zip(roles("evaluation", len(evaluations)), evaluations, strict=True))
        write = functools.partial(build, trials=trials, task=row.name, labels=labels)
        version = STAGE.version if starts[0] is None else 2  # version 1 took means over moments of pre-training
        stage = replace(STAGE, version=version, config=type(config), build=write)
        return run_stage(stage, config, inputs, store=store, **options)


def _opened(
    references: Sequence[str], config: AnyConfig, store: Store, opened: ExitStack
) -> tuple[dict[str, Any], type[Objective], AnyConfig]:
    """Open the data of a search.

    Returns:
        the data by role; the objective or the task that the runs learn; the configuration, in which the task of the data is filled in.

    Raises:
        InputError: the data are of another kind.
    """
    if isinstance(config, PretrainConfig):
        found = [opened.enter_context(store.load(each, kind="sequences")) for each in references]
        return dict(zip(roles("sequences", len(found)), found, strict=True)), config.row, config
    if len(references) > 1:
        raise InputError(f"a search fine-tunes on one dataset, and {len(references)} are given")
    dataset, sequences = missing.open_data(references[0], store, opened)
    if sequences is not None:
        raise InputError(f"{sequences.reference} has sequences; a search needs a dataset", hint=dataset.reference)
    task = task_for(config.task, dataset.counts, dataset.reference)
    return {"dataset": dataset}, task, finetune.resolved(config, task)


def _measures(config: AnyConfig, row: type[Objective]) -> Measures:
    """How the runs are measured."""
    return Measures(
        task="" if row.command == "pretrain" else row.name,
        select=config.select,
        weights=config.weights,
        device=config.device,
        parser=config.parser,
        masks="".join(config.masks[:1]),
        scores=config.scores,
    )


def _check_validation(data: Artifact) -> None:
    """Raises InputError if there are no validation examples by which settings could be compared."""
    is_dataset = data.kind == "corpus"
    if "valid" not in data.counts["splits"] if is_dataset else not data.files.get("valid.parquet", {}).get("rows"):
        raise InputError(
            f"settings are compared by their validation, and {data.reference} has no validation examples",
            hint=f"guide build-{'dataset --valid-fraction' if is_dataset else 'corpus --valid'} 0.1",
        )


_NOT_VARIED = {"seed", "task", "select", "objective"} | SearchConfig.model_fields.keys()


def _runs_of(config: AnyConfig) -> type[finetune.Config | pretrain.Config]:
    """The configuration of the runs."""
    return pretrain.Config if isinstance(config, PretrainConfig) else finetune.Config


def _settings(config: AnyConfig, row: type[Objective], store: Store) -> tuple[list[Setting], list[str]]:
    """Every combination of the values of the grid and of the rows that are kept; and the labels of all rows, none if the rows
    do not vary.

    Raises:
        InputError: an entry of the grid is not written well, or there is no plan whose rows could vary, or they are too many.
    """
    axes = axes_of(config.grid, _runs_of(config).model_fields.keys() - _NOT_VARIED)
    if not (config.leave_one_out or config.subsets):
        return list(settings_of(axes, (), None)), []
    flag = "--subsets" if config.subsets else "--leave-one-out"
    if other := next((axis.name for axis in axes if axis.name in ("plan", "init")), ""):
        raise InputError(
            f"{flag} is about the rows of one plan, and --grid {other} has several", hint="one search for each"
        )
    if config.along and not config.plan:
        raise InputError(f"{flag} needs a plan: the snapshots of --along have different ones", hint="--plan preset:ag")
    plan = load_plan(config, row, store)
    number, named = number_of_rows(plan), " and ".join(config.plan) or "the model's plan"
    if not number:
        raise InputError(f"{flag}: there is no plan whose rows could be left out", hint="--plan preset:ag")
    most = config.limit or MOST_SUBSETS
    if config.subsets and (runs := 2**number * config.seeds * max(1, config.folds)) > most:
        allowed = f"--limit {runs} allows them; " if runs <= MOST_RUNS else ""
        raise InputError(
            f"--subsets: the {number} rows of {named} have {2**number:,} subsets, which are {runs:,} runs or more; at most "
            f"{most:,} are allowed",
            hint=f"{allowed}--leave-one-out trains {number + 1} sets of rows",
        )
    rows = subsets(plan) if config.subsets else left_out_one_by_one(plan)
    return list(settings_of(axes, rows, plan)), [plan.labels[each] for each in rows[-1 if config.subsets else 0]]


def _parts(inputs: Mapping[str, Artifact], config: AnyConfig, store: Store, options: Options) -> list[tuple[str, ...]]:
    """References of the data of each fold; without folds, of the data themselves."""
    if not config.folds:
        return [tuple(given.reference for role, given in inputs.items() if role != "pretrained")]
    fold = functools.partial(folds.Config, folds=config.folds, seed=config.fold_seed)
    dataset, progress = inputs["dataset"].reference, options.get("progress")
    return [
        (folds.run(dataset, fold(fold=number), store=store, progress=progress).reference,)
        for number in range(config.folds)
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


def _trials(
    config: AnyConfig,
    row: type[Objective],
    settings: Sequence[Setting],
    parts: Sequence[tuple[str, ...]],
    starts: Sequence[Start | None],
    store: Store,
) -> Iterator[Trial]:
    """All runs: fold by fold, moment by moment of pre-training, setting by setting, seed by seed.

    Raises:
        InputError: they are too many, or a value is refused.
    """
    number_of_runs, most = len(parts) * len(starts) * len(settings) * config.seeds, config.limit or MOST_RUNS
    if number_of_runs > most:
        more = f"; --limit {number_of_runs} allows them" if most < number_of_runs <= MOST_RUNS else ""
        raise InputError(f"{number_of_runs:,} runs; at most {most:,} are possible", hint=f"fewer values{more}")
    kind = _runs_of(config)
    given = {name: getattr(config, name) for name in config.model_fields_set if name in kind.model_fields}
    if isinstance(config, Config):
        given["task"] = row.name
        if config.along:
            given["max_length"] = config.max_length
    planned = _Planned(row, store)
    for (fold, data), start, (number, setting), seed in itertools.product(
        enumerate(parts), starts, enumerate(settings), range(config.seeds)
    ):
        values = {**given, **setting.settings, "seed": config.seed + seed}
        values |= {"init": start.init} if start else {}
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if one in setting.settings and other not in setting.settings:
                values.pop(other, None)
        try:
            own: Any = kind(**values)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = str(problem["loc"][0]).replace("_", "-") if problem["loc"] else "a combination"
            raise InputError(f"--grid: {name}: {problem['msg']}, not {problem['input']!r}") from error
        own = own if row.command == "pretrain" else finetune.resolved(own, cast("type[Task]", row))
        own, rows = planned.of(own, setting)
        shown = {
            name: getattr(own, name) if name in setting.settings else _as_toml(v) for name, v in setting.values.items()
        }
        yield Trial(fold, number, setting, shown, rows, data, own, start, folds=len(parts) if len(parts) > 1 else 0)


@dataclass
class _Planned:
    """Gives the runs of a search their plans.

    Attributes:
        known: the plans that were loaded, by the settings ``plan`` and ``init`` that name them.
    """

    row: type[Objective]
    store: Store
    known: dict[tuple[Any, ...], Plan] = field(default_factory=dict)

    def of(self, config: Any, setting: Setting) -> tuple[Any, tuple[str, ...] | None]:
        """The configuration of a run with the plan of its setting, and the labels of the rows that are kept, if they vary.

        Raises:
            PlanError: there is no plan or row to change, a value is refused, or the objective cannot have such a guide.
        """
        if setting.kept is None and setting.settings.keys() == setting.values.keys():
            return config, None
        origin = (*config.plan, config.init)
        if origin not in self.known:
            self.known[origin] = load_plan(config, self.row, self.store)
        plan = self.known[origin]
        changed = setting.changed(plan)
        rows = None if setting.kept is None else tuple(plan.labels[number] for number in setting.kept)
        if changed == plan:
            return config, rows
        text = changed.dumps()
        config = config.model_copy(update={"plan": [text or NONE]})
        if text:
            load_plan(config, self.row, self.store)  # refuses what the objective cannot have
        return config, rows


def _as_toml(value: Any) -> str:
    """A value of a plan as people wrote it after ``--grid``: texts without quotes."""
    from guidance.plan import as_toml

    return value if isinstance(value, str) else as_toml(value)


def _place(trial: Trial) -> tuple[int, int, int, int]:
    """Where a run stands in the tables: its fold, moment of pre-training, setting and seed."""
    return trial.fold, trial.start.step if trial.start else 0, trial.number, trial.config.seed


def _choose(trials: Sequence[Trial], config: AnyConfig) -> None:
    """Mark the runs of the best setting in each fold, at each moment and for each set of rows; of equal settings the first.  One
    whose validation is undefined comes last."""
    sign = -1.0 if config.select == "loss" else 1.0

    def goodness(group: Sequence[Trial]) -> float:
        valid = [trial.outcome.valid for trial in group]
        return -math.inf if None in valid else sign * statistics.fmean(value for value in valid if value is not None)

    for _, runs in itertools.groupby(trials, key=lambda trial: (trial.fold, trial.start, trial.setting.kept)):
        own = list(runs)
        groups = [own[start : start + config.seeds] for start in range(0, len(own), config.seeds)]
        for trial in max(groups, key=goodness):
            trial.chosen = True


def _with_test_seeds(trials: Sequence[Trial], config: AnyConfig) -> list[Trial]:
    """Runs like these with the seeds that only the test uses."""
    first = [trial for trial in trials if trial.config.seed == config.seed]
    return [
        replace(
            trial,
            config=trial.config.model_copy(update={"seed": config.seed + config.seeds + number}),
            selected_on=False,
            outcome=Outcome(),
        )
        for trial in first
        for number in range(config.test_seeds)
    ]


COLUMNS = {
    "fold": ("int32", "running number"),
    "step": ("int64", "steps of pre-training before; null without --along"),
    "seconds": ("double", "of pre-training before; null without --along"),
    "seed": ("int64", "seed of the run"),
    "setting": ("string", "settings that vary, NAME=VALUE with spaces between"),
    "rows": ("[string]", "rows of the plan that are kept; null if they do not vary"),
    "model": ("string", "id of the run's model"),
    "valid": ("double", "validation loss, or metric of --select; null without one"),
    "selected_on": ("bool", "whether the choice has seen the run; false for those of --test-seeds"),
    "chosen": ("bool", "whether the setting is the best of its fold, or of its fold with these rows"),
    "evaluation": ("string", "id of the evaluation on the test split, if there is one"),
}


def run_schema(metrics: Sequence[str] = ()) -> Any:
    """Columns of ``runs.parquet``, with a column ``test/NAME`` for each metric."""
    tested = {f"test/{name}": ("double", "on the test split") for name in metrics}
    return schema_of(COLUMNS | tested, may_be_null=("step", "seconds", "rows", "valid", "evaluation", *tested))


def build(run: Run, trials: Sequence[Trial] = (), task: str = "", labels: Sequence[str] = ()) -> None:
    """Write the tables of a search.

    Args:
        trials: all runs, also those that only the test uses.
        task: what is learned.
        labels: of all rows of the plan, where the rows vary.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.outcome.metrics))
    schema = run_schema(names)
    rows = [
        {
            "fold": trial.fold,
            "step": trial.start.step if trial.start else None,
            "seconds": trial.start.seconds if trial.start else None,
            "seed": trial.config.seed,
            "setting": _written(trial),
            "rows": None if trial.rows is None else list(trial.rows),
            "model": trial.model.id if trial.model else "",
            "valid": trial.outcome.valid,
            "selected_on": trial.selected_on,
            "chosen": trial.chosen,
            "evaluation": trial.evaluation.id if trial.evaluation else None,
            **{f"test/{name}": trial.outcome.metrics.get(name) for name in names},
        }
        for trial in trials
    ]
    with run.out.parquet(RUNS, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    reported = [trial for trial in trials if trial.chosen and (trial.outcome.evaluations or not run.config.test_seeds)]
    steps = sorted({row["step"] for row in rows if row["step"] is not None})
    along = {
        str(step): {
            name: mean_and_sd([t.outcome.metrics.get(name) for t in reported if t.start and t.start.step == step])
            for name in names
        }
        for step in steps
    }
    summary = {
        "task": task,
        "select": run.config.select,
        "runs": len(trials),
        "chosen": [row["setting"] for row in rows if row["chosen"] and row["selected_on"]],
        # a mean over different sets of rows, or moments of pre-training, would mean nothing
        "metrics": {}
        if labels or along
        else {n: mean_and_sd([t.outcome.metrics.get(n) for t in reported]) for n in names},
        "settings": _by_setting(trials, rows, names),
        **({"rows": list(labels)} if labels else {}),
        **({"along": along} if along else {}),
    }
    run.out.write_json("search.json", {"schema": 1, **summary})
    run.out.counts |= summary


def _written(trial: Trial) -> str:
    """What varies, NAME=VALUE with spaces between."""
    return " ".join(f"{name}={value}" for name, value in trial.varied.items())


def _by_setting(
    trials: Sequence[Trial], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """For each setting its values, and what `_of_runs` says of its runs; with ``--along`` of those of each moment, under ``along``."""
    by_setting: dict[str, dict[str, Any]] = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [trial for trial, row in zip(trials, rows, strict=True) if row["setting"] == setting]
        moments: dict[str, list[Trial]] = {}
        for trial in own:
            if trial.start:
                moments.setdefault(str(trial.start.step), []).append(trial)
        along = {step: _of_runs(part, names) for step, part in moments.items()}
        found = _of_runs(own, names)
        if along:
            found = {"mean": None, "sd": None, "chosen": found["chosen"], "along": along}
        by_setting[setting] = {
            **found,
            "values": dict(own[0].shown),
            **({} if own[0].rows is None else {"rows": list(own[0].rows)}),
        }
    return by_setting


def _of_runs(trials: Sequence[Trial], names: Sequence[str]) -> dict[str, Any]:
    """What the runs of a setting found: ``mean`` and ``sd`` of the validation over the folds and seeds that the choice has seen, and how
    many of these were ``chosen``; `FRESH`: mean and deviation of the other runs; ``test``: those of each test metric, if there are any."""
    seen = [trial for trial in trials if trial.selected_on]
    fresh = [trial for trial in trials if not trial.selected_on]
    tested = [trial.outcome.metrics for trial in trials if trial.outcome.evaluations]
    return {
        **mean_and_sd([trial.outcome.valid for trial in seen]),
        "chosen": sum(trial.chosen for trial in seen),
        **({FRESH: mean_and_sd([trial.outcome.valid for trial in fresh])} if fresh else {}),
        **({"test": {name: mean_and_sd([one.get(name) for one in tested]) for name in names}} if tested else {}),
    }


STAGE: Stage[Any] = Stage("search", "search", 1, Config, build)
