"""The page of the trial: a table for each phase, the comparisons that were named before, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.pages import TESTED, by_label, cell, cells_of_tests, effect, finish, table
from benchmarks.trial import decoders
from benchmarks.trial.lasting import FINAL_SEEDS, FIXED, NONE, SHAM, winner
from benchmarks.trial.runs import Results, Row
from benchmarks.trial.training import WINDOW, text_of
from pipelines.drawing import figure_of, png
from pipelines.metrics.significance import paired_t
from pipelines.views.comparison_tables import FLOORS, MISSING, p_value
from pipelines.views.figures import Summary, paired_t_test


def as_markdown(
    results: Results, phases: Sequence[str], nats: Mapping[str, Mapping[str, float]], costs: Mapping[str, float]
) -> str:
    """One section for each phase that has been run.

    Args:
        nats: the floors of each text.
        costs: how long a step takes with the plans of some labels, over one without guides.
    """
    parts = []
    for phase in phases:
        if not (rows := results.of(phase)):
            continue
        parts.append(f"## {phase}")
        if phase.startswith("use"):
            parts.append(table_of_scores(rows))
            continue
        if phase == "causal-use":
            courses = [row for row in rows if len(row["scores"]) > 1]
            parts.append(table_of_scores([row for row in rows if row not in courses]))
            parts.append(table_of_induction(courses))
            continue
        parts.append(table_of_losses(rows))
        if phase == "final":
            parts.append(comparisons(rows, winner(results)[0], (NONE, FIXED, SHAM)))
        if phase == "causal-final":
            parts.append(comparisons(rows, decoders.MIX, (NONE, decoders.FIXED, decoders.SHAM_OF_MIX)))
        if floors := nats.get(text_of(phase)):
            parts.append(f"{said_of_floors(floors)}  {said_of_lowest(rows, floors)}")
        labels = dict.fromkeys(row["label"] for row in rows)
        if phase in ("long", "final") and (
            known := [f"{label} {costs[label]:.2f}" for label in labels if label in costs]
        ):
            parts.append(f"How long a step takes, timed in turn, over one without guides: {'; '.join(known)}.")
    return "\n\n".join(parts)


def table_of_losses(rows: Sequence[Row]) -> str:
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
    return table(titles, lines)


def table_of_scores(rows: Sequence[Row]) -> str:
    """Scores, each a mean over seeds of fine-tuning, and the difference from the model of the same seed without guides."""
    lines = []
    means = {(row["label"], row["seed"]): float(np.mean(row["scores"])) for row in rows}
    for label, mine in by_label(rows).items():
        plain = f"{label.partition(': ')[0]}: {NONE}"
        scores = [means[label, row["seed"]] for row in mine]
        pairs = [means[label, row["seed"]] - means[plain, row["seed"]] for row in mine if (plain, row["seed"]) in means]
        test = paired_t(pairs)
        known = label != plain and test.n > 1
        lines.append([label, str(len(mine)), cell(scores), *(effect(test) if known else [MISSING] * 2)])
    return table(["model", "pre-trainings", "score", "difference", "95 % interval"], lines)


def table_of_induction(rows: Sequence[Row]) -> str:
    """The highest induction score of a head along training, a mean over seeds."""
    steps = (*decoders.SNAPSHOTS, decoders.STEPS)
    lines = []
    for label, mine in by_label(rows).items():
        means = 100 * np.mean([row["scores"] for row in mine], axis=0)
        lines.append([f"{label.partition(': ')[2]} (n = {len(mine)})", *(f"{mean:.0f}" for mean in means)])
    return table(["highest induction score (%), step", *(f"{step:,}" for step in steps)], lines)


def comparisons(rows: Sequence[Row], leader: str, others: Sequence[str]) -> str:
    """A label against the others, as they were named before; nothing before all runs have been made."""
    last = {label: {row["seed"]: _last(row) for row in mine} for label, mine in by_label(rows).items()}
    if any(set(last.get(label, ())) != set(FINAL_SEEDS) for label in (leader, *others)):
        return "Not all runs of these comparisons have been made, so nothing is tested yet."
    leads = {other: [last[other][seed] - last[leader][seed] for seed in FINAL_SEEDS] for other in others}
    titles = ["over", "lead", *TESTED[1:-1], "smallest lead that could have been found"]
    return "\n\n".join(
        [
            f"The lead of *{leader}* in the last validation, paired by seed:",
            table(titles, [[other, *cells] for other, cells in cells_of_tests(leads).items()]),
            "The p-values are corrected by Holm's method.  The last column is the true lead that these seeds would have shown with "
            f"a probability of 0.8 at a level of 0.05 / {len(leads)}, if leads vary over seeds as they did here.",
        ]
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


def draw(results: Results, path: Path, nats: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the mean training loss over seeds in the phases with fresh seeds."""
    phases = [phase for phase in DRAWN if results.of(phase)]
    if not phases:
        return
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
    path.write_bytes(png(figure))
