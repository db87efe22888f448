"""What a table is, and how its rows are trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.finetuning.data import about_starter, most_frequent, plan_file, starter
from guidance.plan import Plan
from pipelines.stages import discover_accept, discover_score, evaluate, search
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store

RUNS = 3
"""Seeds of each row, unless its table has another number."""


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        build: makes the dataset and gives its reference.
        metric: of the test split.
        settings: of all rows on this data.
        also: other datasets on which the models are measured, by name; each function makes one, as ``build`` does.
        maybe_seen: whether the published model may have been trained on these texts.
    """

    build: Callable[[Store], str]
    metric: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Callable[[Store], str]] = field(default_factory=dict)
    maybe_seen: bool = False


@dataclass(frozen=True)
class Table:
    """A comparison; the first row is the baseline."""

    title: str
    rows: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Data]
    rates: Sequence[float]
    settings: Mapping[str, Any]
    start: Callable[[Store], str] | None = None
    """The model that rows start from, unless they say otherwise."""
    tuning_seed: int | None = None
    """The seed with which each row is tuned, and which its figures do not use; None tunes with the first seed of the figures.
    A row tries the rates, or the values of the setting that it names under ``tried``, at the best rate of the first row."""
    seeds: int = RUNS


@dataclass(frozen=True)
class Found:
    """A plan from patterns that heads of a fine-tuned model were found to look at; see `guide discover`.

    Attributes:
        data: the data set of the table on whose validation split they are looked for.  The model is a plain one, with the seed that
            rows are tuned with.
        pal: into heads that are added, instead of the model's own.
        wrong: put as many patterns in their place that no head was found to look at: the token 7, 8, ... places ahead.
    """

    data: str
    pal: bool = False
    wrong: bool = False

    def plan(self, table: Table, store: Store) -> Plan:
        """The plan.  Raises SystemExit if no head stands out."""
        found = self.scored(table, store)
        names = found.counts["proposed"]
        if not names:
            raise SystemExit(
                f"{self.data}: no head of the fine-tuned model stands out, so there are no patterns to put into another"
            )
        if self.wrong:
            names = [f"distance == {7 + place}" for place in range(len(names))]
        settings = discover_accept.Config(patterns=names, pal=self.pal)
        made = discover_accept.run(found.reference, settings, store=store).artifact
        return Plan.load(made.path / discover_score.PLAN)

    def scored(self, table: Table, store: Store) -> Artifact:
        """The artifact that says which patterns stand out."""
        data = table.data[self.data]
        reference = data.build(store)
        seed = {} if table.tuning_seed is None else {"seed": table.tuning_seed}
        first = searched(reference, settings_of(table, data, {}, store) | seed, store, grid=grid_of(table.rates))
        (run,) = chosen_runs(first)
        return discover_score.run(
            f"model/{run['model']}", reference, discover_score.Config(limit=200), store=store
        ).artifact


Row = Mapping[str, Any]


def settings_of(table: Table, data: Data, changes: Mapping[str, Any], store: Store) -> dict[str, Any]:
    """The settings of a search but for its rates and seeds."""
    given = {**table.settings, **data.settings, **changes}
    given.pop("tried", None)
    if table.start is not None and "init" not in given:
        given["init"] = table.start(store)
    if isinstance(given.get("plan"), Found):
        given["plan"] = given["plan"].plan(table, store)
    if isinstance(given.get("plan"), Plan):
        given["plan"] = plan_file(given["plan"], store)
    return {name: value for name, value in given.items() if value not in (None, "")}


def grid_of(values: Sequence[Any], name: str = "learning_rate") -> list[str]:
    """A setting and its values as the grid of a search."""
    texts = (value if isinstance(value, str) else f"{value:g}" for value in values)
    return [f"{name.replace('_', '-')}={','.join(texts)}"]


def searched(reference: str, settings: Mapping[str, Any], store: Store, **more: Any) -> Artifact:
    """The artifact of a search."""
    made = search.run(reference, search.Config(**settings, **more), store=store)
    assert made is not None
    return made.artifact


def chosen_runs(made: Artifact) -> list[dict[str, Any]]:
    """The rows of the runs that a search has chosen."""
    with made.open("runs.parquet") as file:
        return [row for row in pq.read_table(file).to_pylist() if row["chosen"]]


def tuned_runs(
    reference: str, settings: Mapping[str, Any], rates: Sequence[float], seeds: int, store: Store
) -> list[dict[str, Any]]:
    """The rows of runs with several seeds, at the rate with which the first seed has the best validation."""
    first = searched(reference, settings, store, grid=grid_of(rates))
    rate = float(first.counts["chosen"][0].partition("=")[2])
    return chosen_runs(searched(reference, settings, store, learning_rate=rate, seeds=seeds))


def chosen_setting(table: Table, label: str, name: str, known: Sequence[Row], store: Store) -> dict[str, Any]:
    """What a row has tried with `Table.tuning_seed` and found best in validation, by the name of the setting.

    Args:
        known: rows that are measured already; the rate of the first row is taken from it, if it is there.
    """
    first, chosen = next(iter(table.rows)), dict[str, Any]()
    if "tried" in table.rows[label]:
        measured_first = [row for row in known if (row["label"], row["data"]) == (first, name)]
        chosen = {**measured_first[0]["chosen"]} if measured_first else chosen_setting(table, first, name, known, store)
    setting, values = table.rows[label].get("tried", ("learning_rate", table.rates))
    texts = [plan_file(value, store) if isinstance(value, Plan) else f"{value:g}" for value in values]
    settings = {**settings_of(table, table.data[name], table.rows[label], store), **chosen, "seed": table.tuning_seed}
    made = searched(table.data[name].build(store), settings, store, grid=grid_of(texts, setting))
    best = made.counts["chosen"][0].partition("=")[2]
    if setting == "plan":  # a list of one
        return chosen | {setting: next(text for text in texts if text in best)}
    return chosen | {setting: float(best)}


def figures_of(table: Table, label: str, name: str, known: Sequence[Row], store: Store) -> dict[str, Any]:
    """The figures of one row on one data set; see `chosen_setting` for ``known``."""
    data, changes = table.data[name], table.rows[label]
    reference = data.build(store)
    settings, about = settings_of(table, data, changes, store), {}
    if table.tuning_seed is not None:
        chosen = chosen_setting(table, label, name, known, store)
        runs = chosen_runs(searched(reference, settings | chosen, store, seeds=table.seeds))
        about = {"chosen": {key: Path(value).read_text() if key == "plan" else value for key, value in chosen.items()}}
    else:
        runs = tuned_runs(reference, settings, table.rates, table.seeds, store)
    models = [store.load(f"model/{run['model']}") for run in runs]
    also = {
        other: [measured(model, build(store), data.metric, store) for model in models]
        for other, build in data.also.items()
    }
    return {
        "label": label,
        "data": name,
        "settings": settings_digest(table, label, name),
        **about,
        "metric": data.metric,
        "runs": [run[f"test/{data.metric}"] for run in runs],
        **({"lead": runs[0][lead]} if (lead := f"test/{data.metric}_lead") in runs[0] else {}),
        "valid": [run["valid"] for run in runs],
        "rates": [model.manifest["config"]["learning_rate"] for model in models],
        "steps": [model.counts["steps"] for model in models],
        **({"also": also} if also else {}),
    }


def measured(model: Artifact, reference: str, metric: str, store: Store) -> float:
    """A model's score on the test split of another dataset than its own."""
    scores = evaluate.run(model.reference, reference, evaluate.Config(weights="best"), store=store).artifact
    found: float = json.loads(scores.read("metrics.json"))["metrics"][metric]
    return found


def settings_digest(table: Table, label: str, name: str) -> str:
    """A digest of all that decides the figures of a row."""
    changes = {key: _plain(value) for key, value in table.rows[label].items()}
    settings = [dict(table.settings), dict(table.data[name].settings), changes, list(table.rates), table.seeds]
    return digest(settings + ([] if table.tuning_seed is None else [table.tuning_seed]))[:16]


def _plain(value: Any) -> Any:
    """A value of a row, as JSON has it."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.dumps() if isinstance(value, Plan) else vars(value) if isinstance(value, Found) else value


def evidence(table: Table, labels: Collection[str], store: Store) -> dict[str, Any]:
    """What the figures of a table have to be read with.

    Args:
        labels: of the rows that were measured.
    """
    found: dict[str, Any] = {}
    if table.start is starter:
        found["starter"] = about_starter(store)
    tested: dict[str, Callable[[Store], str]] = {}
    for name, data in table.data.items():
        tested |= {name: data.build, **data.also} if data.metric == "accuracy" else {}
    if tested:
        found["most frequent class"] = {name: most_frequent(build(store), store) for name, build in tested.items()}
    for finder in (changes.get("plan") for label, changes in table.rows.items() if label in labels):
        if isinstance(finder, Found) and "found" not in found:
            counts = finder.scored(table, store).counts
            chosen = [one for one in counts["candidates"] if one["pattern"] in counts["proposed"]]
            found["found"] = {"examples": counts["sequences"], "patterns": chosen}
    return found
