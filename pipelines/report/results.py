"""The sections of a report about evaluations, searches and probes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guidance.errors import GuideError
from pipelines.engine.declaration import Table as Answers
from pipelines.metrics.significance import paired_t
from pipelines.probing.heads import COLUMNS, head_name, heads_map, heads_of
from pipelines.probing.heads import best as best_head
from pipelines.report.blocks import Block, Grid, Picture, Prose, Section, file_name, grids_of_tests, notes_of
from pipelines.report.given import Given, Runs, grouped, without_seed
from pipelines.stages.search import FRESH
from pipelines.training.tasks.summarization import OF_DATA
from pipelines.views.comparison_tables import MISSING, Table, with_spread
from pipelines.views.evaluations import Tested, compare_evaluations, corrected
from pipelines.views.figures import Summary
from pipelines.views.findings import findings_of
from pipelines.views.search_tables import labels_of_settings, rows_label, search_tables
from pipelines.views.searches import (
    VALIDATION,
    Reached,
    compare_searches,
    compare_settings,
    data_of,
    equal_scores,
    measured_runs,
)
from pipelines.views.tested_tables import reached_tables

MOST_MAPS = 3
"""How many maps of heads are drawn of one probe; its tables have all figures."""


@dataclass(frozen=True)
class Scored:
    """Metrics of several seeds of one model, or of one search.

    Attributes:
        label: of the group.
        seeds: of its members; None where a seed is not known.
        metrics: each metric with its values, in the order of ``seeds``.
        names: what its runs are called: evaluations also as their models, settings of a search after its name.
    """

    label: str
    seeds: Sequence[int | None]
    metrics: Mapping[str, Sequence[float | None]]
    names: Sequence[str] = ()

    def summary(self, metric: str) -> Summary:
        """Mean and sample standard deviation over seeds."""
        return Summary.of(self.metrics.get(metric, [None] * len(self.seeds)))


# evaluations


def evaluation_parts(runs: Runs) -> Iterator[tuple[list[Given], list[Scored]]]:
    """Evaluations of the same task on the same data, and the metrics of each model over its seeds."""

    def topic(each: Given) -> Any:
        inputs = each.artifact.manifest["inputs"]
        data = next((inputs[role]["content"] for role in ("sequences", "corpus", "data") if role in inputs), "")
        return [each.artifact.counts.get("task"), data, each.config.get("split"), each.config.get("weights")]

    for given in grouped(runs.of("evaluation"), topic).values():
        part = _named_by_models(given, runs)
        yield (
            part,
            [_scored(label, group, runs) for label, group in grouped(part, lambda each: _model(each, runs)).items()],
        )


def _named_by_models(part: Sequence[Given], runs: Runs) -> list[Given]:
    """The same evaluations, with the names of their models in place of ids; unchanged if two of them would have the same name."""
    labels = [
        runs.model_of(each.artifact.manifest) if each.label == each.artifact.reference else each.label for each in part
    ]
    are_clear = all(labels) and len(set(labels)) == len(labels)
    return [replace(each, label=label) for each, label in zip(part, labels, strict=True)] if are_clear else list(part)


def _model(each: Given, runs: Runs) -> Any:
    """What the models of two evaluations share that differ only in the seed of training."""
    model = runs.input_of(each.artifact.manifest, "model")
    own = [each.config, each.artifact.manifest["inputs"].get("model", {}).get("content", each.label)]
    return without_seed(model) if model else own


def _scored(label: str, group: Sequence[Given], runs: Runs) -> Scored:
    models = [runs.input_of(each.artifact.manifest, "model") for each in group]
    metrics = [each.artifact.counts.get("metrics", {}) for each in group]
    names = [name for name in metrics[0] if any(isinstance(one.get(name), int | float) for one in metrics)]
    seeds = [model["config"].get("seed") if model else None for model in models]
    called = [
        *(name for each in group for name in (each.label, each.artifact.reference)),
        *(runs.name_of(model) for model in models if model),
    ]
    return Scored(label, seeds, {name: [one.get(name) for one in metrics] for name in names}, called)


def metric_table(scored: Sequence[Scored], caption: str) -> Table:
    """Means and sample standard deviations of all metrics, with a row for each model."""
    names = list(dict.fromkeys(name for each in scored for name in each.metrics))
    cells = [
        [each.label, str(len(each.seeds)), *(with_spread(each.summary(name), ".4f") for name in names)]
        for each in scored
    ]
    return Table(caption, ["model", "n", *names], cells)


def tests_over_seeds(scored: Sequence[Scored]) -> list[Tested]:
    """Compare each metric of the first model with that of every other one: a paired t-test over the seeds that both have, at least
    two."""
    base, tests = scored[0], list[Tested]()
    for other in scored[1:]:
        shared = [seed for seed in base.seeds if seed is not None and seed in other.seeds]
        for metric in base.metrics if len(shared) > 1 else ():
            if metric not in other.metrics or metric.endswith(OF_DATA):
                continue
            sides = [[each.metrics[metric][each.seeds.index(seed)] for seed in shared] for each in (base, other)]
            if any(value is None for side in sides for value in side):
                continue
            first, second = ([float(value or 0.0) for value in side] for side in sides)
            difference = paired_t([b - a for a, b in zip(first, second, strict=True)])
            means = statistics.fmean(first), statistics.fmean(second)
            tests.append(Tested(base.label, other.label, metric, *means, difference, unit="seeds"))
    return corrected(tests)


def tests_of_part(part: Sequence[Given], scored: Sequence[Scored], notes: list[str]) -> list[Tested]:
    """The tests of a table of evaluations: over seeds where there are several, or else over examples."""
    if any(len(each.seeds) > 1 for each in scored):
        return tests_over_seeds(scored)
    if len(part) < 2:
        return []
    try:
        return compare_evaluations([each.artifact for each in part], [each.label for each in part])
    except GuideError as error:
        notes.append(f"{error.message}, so they are not tested")
        return []


def evaluations(runs: Runs) -> Iterator[tuple[list[Given], Section, list[Tested], list[Scored]]]:
    """A section for each task and test set."""
    for number, (part, scored) in enumerate(evaluation_parts(runs), 1):
        task, split = part[0].artifact.counts.get("task"), part[0].config.get("split")
        notes: list[str] = []
        tests = tests_of_part(part, scored, notes)
        on = f" of {runs.data_of(part[0].artifact.manifest)}"
        several = "; means ± sample standard deviation over n seeds" if any(len(s.seeds) > 1 for s in scored) else ""
        name = f"evaluation-{number}"
        blocks: list[Block] = [
            Grid(f"{name}-metrics", metric_table(scored, f"{task}, split {split}{on}{several}")),
            *grids_of_tests(name, tests),
            *notes_of(notes),
        ]
        yield part, Section(name, f"Evaluation: {task}, {split}", blocks), tests, scored


# searches


def searches(runs: Runs) -> Iterator[tuple[list[Given], Section, list[Tested], list[Scored]]]:
    """A section for each task and its data: the settings of every search with their tests, and searches compared."""

    def topic(each: Given) -> Any:
        return [each.artifact.counts.get("task"), data_of(each.artifact)]

    for number, part in enumerate(grouped(runs.of("search"), topic).values(), 1):
        name, notes, tests, scored = f"search-{number}", list[str](), list[Tested](), list[Scored]()
        blocks, alone = list[Block](), dict[tuple[str, ...], list[list[str]]]()
        for each in part:
            prefix = f"{each.label}: " if len(part) > 1 else ""
            own = [
                replace(tested, baseline=prefix + tested.baseline, other=prefix + tested.other)
                for tested in compare_settings(each.artifact)
            ]
            place = f"{name}-{file_name(each.label)}"
            settings = search_tables(each.artifact)[0]  # what was tested is in a table of all searches, below
            if len(settings.rows) > 1:
                caption = f"{each.label}: settings"
                table = Table(caption, list(settings.titles), [list(row) for row in settings.rows])
                blocks.append(Grid(f"{place}-settings", table))
            else:
                alone.setdefault(tuple(settings.titles), []).extend([each.label, *row] for row in settings.rows)
            blocks += grids_of_tests(place, own)
            tests += own
            scored += _measured(each, prefix)
        blocks = [
            *(
                Grid(f"{name}-alone-{n}", Table("searches of one setting", ["search", *titles], rows))
                for n, (titles, rows) in enumerate(alone.items(), 1)
            ),
            *blocks,
        ]
        if any(each.metrics for each in scored) and not (len(part) == 1 and _repeats(part[0], scored)):
            several = any(len(each.seeds) > 1 for each in scored)
            caption = "what was tested" + "; means ± sample standard deviation over n seeds and folds" * several
            blocks.append(Grid(f"{name}-metrics", metric_table(scored, caption)))
        if len(part) > 1:
            between, reached = list[Tested](), list[Reached]()
            for other in part[1:]:
                labels, artifacts = [part[0].label, other.label], [part[0].artifact, other.artifact]
                try:
                    between += compare_searches(artifacts, labels)
                    reached += equal_scores(artifacts, labels)
                except GuideError as error:
                    notes.append(error.message)
            tests += (between := corrected(between))
            blocks += grids_of_tests(f"{name}-compared", between)
            blocks += [Grid(f"{name}-reached", table) for table in reached_tables(reached)]
        blocks += notes_of(notes)
        title = f"Search: {part[0].artifact.counts.get('task')}, {runs.data_of(part[0].artifact.manifest)}"
        yield part, Section(name, title, blocks), tests, scored


def _repeats(search: Given, scored: Sequence[Scored]) -> bool:
    """Whether a search has measured only the validation losses that its table of settings shows already."""
    settings = search.artifact.counts["settings"].values()
    are_losses = all(list(each.metrics) == [VALIDATION] for each in scored)
    return are_losses and len(scored) == len(settings) and not any(FRESH in found for found in settings)


def _measured(each: Given, prefix: str) -> list[Scored]:
    """The test metrics of a search: of every setting if all were tested, otherwise of the best ones; for each set of rows of the
    plan, and each moment of pre-training, if they vary."""
    labels, config, counts = labels_of_settings(each.artifact), each.config, each.artifact.counts
    of_all = config.get("test_every") or "dataset" not in each.artifact.manifest["inputs"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in measured_runs(each.artifact):
        if of_all:
            setting = labels[row["setting"]]
        elif row["rows"] is not None:
            setting = rows_label(row["rows"], counts["rows"], bool(config.get("leave_one_out")))
        else:
            setting = ""
        moment = "" if row["step"] is None else f"step {row['step']:,}"
        groups.setdefault(", ".join(part for part in (setting, moment) if part), []).append(row)
    return [
        Scored(
            prefix + setting if setting else each.label,
            [row["seed"] for row in rows],
            {name: [row["test"][name] for row in rows] for name in rows[0]["test"]},
            [f"{each.label}: {setting}" if setting else each.label],
        )
        for setting, rows in groups.items()
    ]


# probes


def probes(runs: Runs) -> Iterator[Section]:
    """A section for each probe and what it was asked about: the answers of all models beside each other, and a map of heads for each
    figure."""

    def question(each: Given) -> Any:
        config = {name: value for name, value in each.config.items() if name != "random"}
        inputs = each.artifact.manifest["inputs"]
        return [
            each.artifact.manifest["stage"],
            config,
            {role: given["content"] for role, given in inputs.items() if role != "model"},
        ]

    parts = list(grouped(runs.of("probe"), question).values())
    for number, (part, title) in enumerate(zip(parts, _questions([part[0] for part in parts], runs), strict=True), 1):
        name, first = f"probe-{number}", part[0].artifact
        kind = str(first.counts.get("probe", "probe"))
        models = [runs.model_of(each.artifact.manifest) for each in part]
        labels = [
            model if model and models.count(model) == 1 else each.label
            for model, each in zip(models, part, strict=True)
        ]
        found = zip(*(findings_of(each.artifact) for each in part), strict=False)  # of one stage, so as many of each
        blocks: list[Block] = []
        tables = 0
        for answers in found:
            of_models = dict(zip(labels, answers, strict=True))
            alike = len({answer.titles for answer in answers}) == 1
            for shown in [of_models] if alike else [{label: answer} for label, answer in of_models.items()]:
                titles, rows = beside(shown)
                if titles:
                    tables += 1
                    caption = f"probe {kind} of {' and of '.join(shown)}"
                    blocks.append(Grid(f"{name}-findings{f'-{tables}' * (tables > 1)}", Table(caption, titles, rows)))
            blocks += _remarks(dict(zip(labels, (answer.notes for answer in answers), strict=True)))
        if "heads.parquet" in first.files:
            heads = [heads_of(each.artifact) for each in part]
            blocks += _maps(name, kind, dict(zip(labels, heads, strict=True)))
        yield Section(name, title, blocks)


def _questions(probes: Sequence[Given], runs: Runs) -> list[str]:
    """What each probe asks, as a title; the settings that differ stand there where two would have the same one."""
    titles = []
    for each in probes:
        manifest, kind = each.artifact.manifest, each.artifact.counts.get("probe", "probe")
        data, other = runs.data_of(manifest), runs.input_of(manifest, "other")
        beside = f", beside {runs.name_of(other)}" if other else ""
        titles.append(f"Probe: {kind}{f', {data}' * (data != MISSING)}{beside}")
    found = []
    for each, title in zip(probes, titles, strict=True):
        alike = [other.config for other, its_title in zip(probes, titles, strict=True) if its_title == title]
        differing = [name for name in each.config if any(config.get(name) != each.config[name] for config in alike)]
        settings = ", ".join(f"{name.replace('_', '-')} {each.config[name]}" for name in differing if name != "random")
        found.append(f"{title} ({settings})" if settings else title)
    return found


def beside(tables: Mapping[str, Answers]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of one table that holds what several models answered, by what the models are called; their tables have the same
    titles.

    Where their rows have the same names, as relations have, columns that differ are repeated for each model.  Otherwise, as where each
    has a best head of its own, the rows of the models stand below each other, and a row that all of them have stands there once.
    """
    first, *others = tables.values()
    if not others:
        return list(first.titles), [list(row) for row in first.rows]
    rows = [{row[0]: row for row in table.rows} for table in tables.values()]
    if all(
        len(own) == len(table.rows) and own.keys() == rows[0].keys()
        for table, own in zip(tables.values(), rows, strict=True)
    ):
        columns = [(first.titles[0], list(rows[0]))]
        for number, title in enumerate(first.titles[1:], 1):
            cells = [[own[key][number] for key in rows[0]] for own in rows]
            if all(each == cells[0] for each in cells):
                columns.append((title, cells[0]))
            else:
                columns += [(f"{title}: {label}", each) for label, each in zip(tables, cells, strict=True)]
        return [title for title, _ in columns], [
            list(row) for row in zip(*(cells for _, cells in columns), strict=True)
        ]
    shared = [row for row in first.rows if all(row in table.rows for table in others)]
    place = next((number for number, row in enumerate(first.rows) if row not in shared), len(shared))
    own_rows = [(label, row) for label, table in tables.items() for row in table.rows if row not in shared]
    stacked = [*(("all", row) for row in shared[:place]), *own_rows, *(("all", row) for row in shared[place:])]
    return [first.titles[0], "model", *first.titles[1:]], [[row[0], label, *row[1:]] for label, row in stacked]


def _remarks(notes: Mapping[str, Sequence[str]]) -> Iterator[Prose]:
    """The notes below the tables of several models; one that all of them have is made once."""
    every = list(notes.values())
    for label, own in notes.items():
        for note in own:
            if all(note in each for each in every):
                if own is every[0]:
                    yield Prose(f"{note[:1].upper()}{note[1:]}.")
            else:
                yield Prose(f"{label}: {note}.")


def _maps(name: str, kind: str, heads: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[Picture]:
    """Maps of the heads of models, by what the models are called, for each figure of the probe; if there are too many, for the first
    ones, and of patterns for those with the highest values."""
    rows = [row for own in heads.values() for row in own]
    names = [key for key in rows[0] if key not in COLUMNS and all(key in own[0] for own in heads.values())]
    columns = {key: [row[key] for row in rows] for key in names}
    known = {key: values for key, values in columns.items() if any(value is not None for value in values)}
    # a half of the data is there for the split-half figure, and of pronouns alone all mentions are pronouns
    figures = [
        key
        for number, (key, values) in enumerate(known.items())
        if not key.startswith("half_") and values not in list(known.values())[:number]
    ]
    if kind == "importance":
        figures = ["score"]  # the raw importance differs from it only in its scale
    values_of = {key: [value for value in columns[key] if value is not None] for key in figures}
    if kind == "relevance":  # there may be many patterns, and heads look at few of them
        figures.sort(key=lambda key: -max(values_of[key]))
    for figure in figures[:MOST_MAPS]:
        values = values_of[figure]
        is_share = kind in ("importance", "relevance") and min(values) >= 0 and max(values) <= 1
        label = f"{figure}, %" if is_share else figure
        of = " and of ".join(heads)
        drawn = [
            heads_map(heads, figure, title=f"{kind}: {figure}", label=label, hundredths=is_share, form=form)
            for form in ("svg", "pdf")
        ]
        highest = [
            f"{head_name(best)}, {best[figure]:.3f}" for own in heads.values() if (best := best_head(own, figure))
        ]
        caption = f"{kind} of the heads of {of}: {figure}. Highest: head {' and '.join(highest)}."
        yield Picture(f"{name}-{file_name(figure)}", caption, caption, drawn[0], drawn[1])
