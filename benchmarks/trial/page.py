"""The page of the trial: a table for each phase, the comparisons that were named before, and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.pages import TESTED, by_label, cell, cells_of_tests, effect, finish
from benchmarks.trial import decoders
from benchmarks.trial.lasting import FINAL_SEEDS, FIXED, NONE, SHAM, winner
from benchmarks.trial.runs import Results, Row
from benchmarks.trial.training import WINDOW, text_of
from pipelines.drawing import figure_of, printed
from pipelines.metrics.significance import paired_t
from pipelines.report.blocks import Block, Grid, Picture, Prose, Report, Section
from pipelines.views.comparison_tables import FLOORS, MISSING, Table, p_value
from pipelines.views.figures import Summary, paired_t_test

TESTED_USES = ("use", "use-hausa")
"""Phases whose differences in scores are tested."""


def report(
    results: Results, phases: Sequence[str], nats: Mapping[str, Mapping[str, float]], costs: Mapping[str, float]
) -> Report:
    """A section for each phase that has been run, and the curves of those with fresh seeds.

    Args:
        nats: the floors of each text.
        costs: how long a step takes with the plans of some labels, over one without guides.
    """
    sections = [
        Section(phase, phase, list(blocks_of(phase, results, nats.get(text_of(phase), {}), costs)))
        for phase in phases
        if results.of(phase)
    ]
    if picture := curves(results, nats):
        sections.append(Section("curves", "Curves", [picture]))
    lead = (
        "python -m benchmarks.trial makes this page; python -m benchmarks.trial --help says what each phase is. In the names of runs, "
        "none is a plain model, fix and fixed heads are preset:neighbours-fixed, mix of the stream is preset:neighbours, the winner is "
        "that mix with gates that read the query, and a sham is aimed at tokens seven places away."
    )
    return Report("Which guides help a small ModernBERT", lead, sections)


def blocks_of(phase: str, results: Results, floors: Mapping[str, float], costs: Mapping[str, float]) -> Iterator[Block]:
    """What there is to say about a phase."""
    rows = results.of(phase)
    if phase == "causal-use":
        courses = [row for row in rows if len(row["scores"]) > 1]
        yield Grid(f"{phase}-scores", scores([row for row in rows if row not in courses]))
        yield Grid(f"{phase}-induction", induction(courses))
        return
    if phase.startswith("use"):
        yield Grid(f"{phase}-scores", scores(rows, tested=phase in TESTED_USES))
        if phase in TESTED_USES:
            yield Prose(
                "Differences are tested once all seeds of a task are known.  The p-values are corrected by Holm's method over the rows "
                "of a task.  The last column is the true difference that "
                "these seeds would have shown with a probability of 0.8 at a level of 0.05 divided by the number of these rows."
            )
        return
    beside = [row for row in results.of("final") if row["label"] != SHAM] if phase == "final-own" else []
    yield Grid(f"{phase}-losses", losses([*beside, *rows]))
    if phase == "final":
        yield from comparisons(phase, rows, winner(results)[0], (NONE, FIXED, SHAM))
    if phase == "causal-final":
        yield from comparisons(phase, rows, decoders.MIX, (NONE, decoders.FIXED, decoders.SHAM_OF_MIX))
    if floors:
        yield Prose(f"{said_of_floors(floors)}  {said_of_lowest(rows, floors)}")
    labels = dict.fromkeys(row["label"] for row in rows)
    if phase in ("long", "final") and (known := [f"{label} {costs[label]:.2f}" for label in labels if label in costs]):
        yield Prose(f"How long a step takes, timed in turn, over one without guides: {'; '.join(known)}.")


def losses(rows: Sequence[Row]) -> Table:
    """Mean and deviation over seeds, a paired test of the last validation against no guides, and the steps to losses that the
    run without guides passes."""
    at = sorted({step for row in rows for step, _ in row["valid"]})
    titles = ["run", "n", "training loss", "mean over all steps", *(f"validation, step {step:,}" for step in at)]
    plain = {row["seed"]: row for row in rows if row["label"] == NONE}
    several = len(plain) > 1
    levels = passed_losses(next(iter(plain.values()))) if plain else []
    titles += ["p"] * several + [f"steps to {level:.2f}" for level in levels]
    lines = []
    for label, mine in by_label(rows).items():
        cells = [cell([row[name] for row in mine]) for name in ("loss", "average")]
        cells += [cell([dict(row["valid"]).get(step) for row in mine]) for step in at]
        if several:
            gains = (_last(row) - _last(plain[row["seed"]]) for row in mine if row["seed"] in plain)
            cells.append(p_value(paired_t_test(Summary.of(gains)) if label != NONE else None))
        cells += [cell([steps_to(row, level) for row in mine], ".0f") for level in levels]
        lines.append([label, str(len(mine)), *cells])
    return Table("losses in nats; means ± sample standard deviation over n seeds", titles, lines)


def scores(rows: Sequence[Row], tested: bool = False) -> Table:
    """Scores, each a mean over seeds of fine-tuning, and the difference from the model of the same seed without guides.

    Args:
        tested: whether differences are tested once all seeds are known, corrected over the labels of a task; those of shams
            never are.
    """
    means = {(row["label"], row["seed"]): float(np.mean(row["scores"])) for row in rows}
    groups = by_label(sorted(rows, key=_task_and_place))
    gains: dict[str, dict[str, list[float]]] = {}
    for label, mine in groups.items():
        task, _, arm = label.partition(": ")
        plain = f"{task}: {NONE}"
        pairs = [means[label, row["seed"]] - means[plain, row["seed"]] for row in mine if (plain, row["seed"]) in means]
        if arm != NONE and len(pairs) > 1:
            gains.setdefault(task, {})[label] = pairs
    tests: dict[str, list[str]] = {}
    for task, its in gains.items():
        named = {label: pairs for label, pairs in its.items() if label != f"{task}: {SHAM}"}
        if tested and all(len(pairs) == len(FINAL_SEEDS) for pairs in named.values()):
            tests |= cells_of_tests(named)
        tests |= {label: effect(paired_t(pairs)) for label, pairs in its.items() if label not in tests}
    titles = ["model", "pre-trainings", "score", *TESTED[: None if tested else 2]]
    lines = []
    for label, mine in groups.items():
        known = [label, str(len(mine)), cell([means[label, row["seed"]] for row in mine]), *tests.get(label, ())]
        lines.append([*known, *[MISSING] * (len(titles) - len(known))])
    return Table("scores, beside those of the models without guides", titles, lines)


def _task_and_place(row: Row) -> tuple[str, bool]:
    """By which rows of scores are sorted: those of a task together, the model without guides first."""
    task, _, arm = row["label"].partition(": ")
    return task, arm != NONE


def induction(rows: Sequence[Row]) -> Table:
    """The highest induction score of a head along training, a mean over seeds."""
    steps = (*decoders.SNAPSHOTS, decoders.STEPS)
    lines = []
    for label, mine in by_label(rows).items():
        means = 100 * np.mean([row["scores"] for row in mine], axis=0)
        lines.append([f"{label.partition(': ')[2]} (n = {len(mine)})", *(f"{mean:.1f}" for mean in means)])
    return Table("highest induction score of a head, in %", ["step", *(f"{step:,}" for step in steps)], lines)


def comparisons(phase: str, rows: Sequence[Row], leader: str, others: Sequence[str]) -> Iterator[Block]:
    """A label against the others, as they were named before; nothing before all runs have been made."""
    last = {label: {row["seed"]: _last(row) for row in mine} for label, mine in by_label(rows).items()}
    if any(set(last.get(label, ())) != set(FINAL_SEEDS) for label in (leader, *others)):
        yield Prose("Not all runs of these comparisons have been made, so nothing is tested yet.")
        return
    leads = {other: [last[other][seed] - last[leader][seed] for seed in FINAL_SEEDS] for other in others}
    titles = ["over", "lead", *TESTED[1:-1], "smallest lead that could have been found"]
    lines = [[other, *cells] for other, cells in cells_of_tests(leads).items()]
    yield Grid(f"{phase}-tests", Table(f"the lead of {leader} in the last validation, paired by seed", titles, lines))
    yield Prose(
        "The p-values are corrected by Holm's method.  The last column is the true lead that these seeds would have shown with a "
        f"probability of 0.8 at a level of 0.05 / {len(leads)}, if leads vary over seeds as they did here."
    )


def said_of_lowest(rows: Sequence[Row], floors: Mapping[str, float]) -> str:
    """Which floors the best of some runs has passed, in a sentence for people."""
    best = min(rows, key=_last)
    passed = [FLOORS[name] for name, value in floors.items() if _last(best) < value]
    below = f"is below that of {', '.join(passed)}" if passed else "is below none of these"
    return f"The lowest last validation loss of this phase, {_last(best):.2f} ({best['label']}, seed {best['seed']}), {below}."


def steps_to(row: Row, loss: float) -> float | None:
    """The step at which a run first has this loss, interpolated between the kept points of its curve; None if never."""
    steps, losses = np.array(row["curve"]).T
    reached_at = np.flatnonzero((steps >= WINDOW) & (losses <= loss))
    if not len(reached_at):
        return None
    last = reached_at[0]
    return float(np.interp(loss, losses[[last, last - 1]], steps[[last, last - 1]])) if last else float(steps[0])


def passed_losses(row: Row) -> list[float]:
    """The losses that a run has after a half and all of its steps, rounded up to hundredths."""
    steps, losses = np.array(row["curve"]).T
    half = float(np.interp(row["steps"] / 2, steps, losses))
    return sorted({math.ceil(100 * loss) / 100 for loss in (half, losses[-1])}, reverse=True)


def said_of_floors(nats: Mapping[str, float]) -> str:
    """A sentence for people."""
    reached = "; ".join(f"{FLOORS[name]} {value:.2f}" for name, value in nats.items())
    return f"What counts of neighbouring tokens reach in validation, in nats: {reached}."


def _last(row: Row) -> float:
    """The last validation loss of a run."""
    return float(row["valid"][-1][1])


DRAWN = {
    "long": "ModernBERT-shaped, three seeds",
    "longest": "the same, one seed",
    "roberta": "RoBERTa-shaped, three seeds",
    "oromo": "ModernBERT-shaped on Oromo, three seeds",
    "final": "what lasts, three seeds",
    "longer": "the same, one seed",
    "causal-final": "Llama-shaped, three seeds",
}


def curves(results: Results, nats: Mapping[str, Mapping[str, float]]) -> Picture | None:
    """The mean training loss over seeds in the phases with fresh seeds; None before the first of them."""
    phases = [phase for phase in DRAWN if results.of(phase)]
    svg, pdf = (printed(drawn(results, phases, nats), kind) for kind in ("svg", "pdf")) if phases else (b"", b"")
    says = f"Learning curves of the phases {', '.join(phases)}."
    return Picture("curves", "Training loss over steps, means over seeds.", says, svg, pdf) if phases else None


def drawn(results: Results, phases: Sequence[str], nats: Mapping[str, Mapping[str, float]]) -> Any:
    """The figure of the curves, one part for each phase."""
    lines = -(-len(phases) // 2)
    figure, grid = figure_of(10, 3.5 * lines, lines, 2)
    every_axes = grid.ravel().tolist()
    labels = dict.fromkeys(row["label"] for phase in phases for row in results.of(phase))
    colours = {label: f"C{number}" for number, label in enumerate(labels)}
    for phase, axes in zip(phases, every_axes, strict=False):
        rows = results.of(phase)
        for label, mine in by_label(rows).items():
            curves = [np.array(row["curve"]) for row in mine]
            steps, losses = np.mean(curves, axis=0).T
            axes.plot(steps, losses, color=colours[label], linewidth=1.3 if label == "none" else 2.2, label=label)
        finish(axes, rows, nats.get(text_of(phase), {}), DRAWN[phase], WINDOW)
    for axes in every_axes[len(phases) :]:
        axes.remove()
    return figure
