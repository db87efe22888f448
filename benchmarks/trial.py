"""Which guides help a small ModernBERT?  The trial behind the advice of the README, as one resumable command.

    python -m benchmarks.trial [--only PHASE] [--store artifacts] [--out docs/results]

A ModernBERT-shaped model of 8 layers x 128 with 4 heads learns masked words of 26 novels, in sequences of 64 tokens.  The
phases follow each other, and later ones use what earlier ones chose:

    search    plain runs over rates and second-moment decays, and as many guided ones over weights; seed 100
    arms      every arm at the best settings, 600 steps; seed 0
    long      none, the best loss, the best fixed guide, both towards a wrong place (shams), and the plan of paper A,
              1,200 steps
    longest   none and the winner, 3,000 steps
    roberta   none, the plan of paper A and the winner on a RoBERTa-shaped model, 600 steps
    oromo     none and the winner on news in Oromo, 600 steps
    plain     plain runs over rates and falling rates, then warm-up, then weight decay, 1,200 steps; seed 100
    where     the neighbours mixed into each of six places, in all layers or some, at the best plain settings; seed 0
    wide      the same in the best place, with one to three tokens on each side, 1,200 steps; seed 0

The seeds of ``long``, ``roberta`` and ``oromo`` are 1, 2 and 3; nothing was chosen on them.  What is best has the lowest
validation loss.  Runs whose figures are in the JSON are not repeated, and interrupted ones are continued;
several processes may share the work.  At the end the steps of ``long`` are timed, each plan in turn.

Patterns of roles (rare words, syntax) are made from the whole text and tell something about masked words, so a bias that
uses them fades out: at the last validation nothing is told.  ``convolution`` is a control without guides: a learned sum of
each token with its two neighbours before each of the two lowest layers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pretraining import ag, cell, floors_of_sequences, oromo, packed, passed_losses, said_of_floors, steps_to
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import cooccurrence, dependencies, idf, masks, pretrain
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.training.learners import masked_lm
from pipelines.views.comparison_tables import p_value
from pipelines.views.curves import Curve
from pipelines.views.figures import Summary, paired_t_test
from pipelines.views.learning_curves import draw_floors
from pipelines.views.timing import step_seconds

SHARED = Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
PARSER = f"spacy:{SHARED / 'models/spacy-en_ud_ewt_sm'}"
WINDOW = 50
POINTS = 120
"""Number of points to keep of each curve."""
SEARCH_SEED, CHOOSING_SEED, FRESH_SEEDS = 100, 0, (1, 2, 3)

COMMON: Mapping[str, Any] = {
    "architecture": "modernbert",
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "ffn": 512,
    "attention_dropout": 0.0,
    "batch_size": 32,
    "schedule": "constant",
    "warmup_steps": 50,
    "evaluate_every": 300,
    "save_every": 100,
}
RATES, DECAYS = (5e-4, 1e-3, 2e-3, 4e-3), (0.98, 0.999)
LOWEST, LOWER_HALF = ("first 2",), ("first 4",)


# plans


def neighbours(
    mechanism: str, patterns: Sequence[Any] = ("next", "previous"), layers: Sequence[str] = LOWEST, **more: Any
) -> Plan:
    """One head for each pattern."""
    return Plan(
        tuple(
            Guide(pattern, mechanism, layers=layers, heads=(head,), name=f"pattern {head}", **more)
            for head, pattern in enumerate(patterns)
        )
    )


def loss(weight: float, distance: str = "squared", **more: Any) -> Plan:
    """A loss that falls linearly to zero; its weight is meant for 512 tokens, as in paper A."""
    return neighbours(
        "attention_loss", weight=weight, distance=distance, reference_length=512, schedule="linear", **more
    )


def role(pattern: Any, mechanism: str, **more: Any) -> Plan:
    """A guide on head 2 of each of the four lower layers."""
    return Plan((Guide(pattern, mechanism, layers=LOWER_HALF, heads=(2,), **more),))


PAPER = "ag, all layers (paper A)"
SHAM = ({"where": "distance == 7"}, {"where": "distance == -7"})
"""Places that no one would choose."""


def sham(plan: Plan) -> Plan:
    """The same guides, towards these places."""
    return Plan(tuple(replace(guide, pattern=place) for guide, place in zip(plan.guides, SHAM, strict=True)))


LOSSES = {
    **{f"squared loss, weight {w:g}": loss(w) for w in (30.0, 100.0, 300.0)},
    **{f"kl loss, weight {w:g}": loss(w, "kl") for w in (1.0, 3.0, 10.0)},
}
BIASES = {f"bias, others x {x:g}": neighbours("bias", outside=x) for x in (0.1, 0.01)}


# runs


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        settings: in which it differs from `COMMON`.
        data: ``books`` or ``oromo``.
        convolution: with the control in the two lowest layers.
    """

    phase: str
    label: str
    seed: int
    steps: int
    plan: Plan | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = "books"
    convolution: bool = False

    @property
    def key(self) -> str:
        """A digest of all that decides its figures."""
        plan = self.plan.dumps() if self.plan else ""
        return digest([dict(COMMON), dict(self.settings), plan, self.data, self.convolution, self.seed, self.steps])[
            :16
        ]


Row = Mapping[str, Any]


class Results:
    """The figures so far, by phase."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row["phase"] == phase]

    def best(self, phase: str, labels: Sequence[str]) -> str:
        """The label with the lowest validation loss, a mean over seeds."""
        found: dict[str, list[float]] = {label: [] for label in labels}
        for row in self.of(phase):
            if row["label"] in found:
                found[row["label"]].append(row["valid"][-1][1])
        if not all(found.values()):
            lacking = ", ".join(label for label, losses in found.items() if not losses)
            raise SystemExit(f"the phase {phase} has not been run yet: {lacking}")
        return min(found, key=lambda label: float(np.mean(found[label])))


def plain_settings() -> dict[str, dict[str, Any]]:
    """The settings of the plain search, by label."""
    return {
        f"plain, rate {rate:g}, beta2 {decay:g}": {"learning_rate": rate, "beta2": decay}
        for rate in RATES
        for decay in DECAYS
    }


def search(results: Results) -> Iterator[list[Run]]:
    plain = plain_settings()
    yield [Run("search", label, SEARCH_SEED, 600, None, settings) for label, settings in plain.items()]
    yield [Run("search", label, SEARCH_SEED, 600, plan, tuned(results)) for label, plan in (LOSSES | BIASES).items()]


def tuned(results: Results) -> dict[str, Any]:
    """The rate and the decay with which plain training is best; all arms have them."""
    plain = plain_settings()
    return plain[results.best("search", list(plain))]


def chosen(results: Results) -> tuple[Plan, Plan, Plan]:
    """The best squared loss, divergence and bias of the search."""
    squared, kl = ([label for label in LOSSES if label.startswith(name)] for name in ("squared", "kl"))
    labels = [results.best("search", labels) for labels in (squared, kl, list(BIASES))]
    squared_plan, kl_plan, bias_plan = ((LOSSES | BIASES)[label] for label in labels)
    return squared_plan, kl_plan, bias_plan


def arm_plans(results: Results) -> dict[str, tuple[str, Plan]]:
    """Every guided arm: a kind (``loss`` or ``fixed``) and a plan, by label."""
    squared, kl, bias = chosen(results)
    weight, outside = kl.guides[0].weight_for(8), bias.guides[0].options["outside"]
    arms = {
        PAPER: ("loss", ag("next", "previous")),
        "squared loss, two lowest layers": ("loss", squared),
        "kl loss, two lowest layers": ("loss", kl),
        "bias, two lowest layers": ("fixed", bias),
        "fix, two lowest layers": ("fixed", neighbours("fix")),
        "fix that fades, two lowest layers": ("fixed", neighbours("fix", schedule="linear")),
        "fix that fades by half of the run, two lowest layers": (
            "fixed",
            neighbours("fix", schedule="linear", until=0.5),
        ),
        "fix, all layers": ("fixed", neighbours("fix", layers=("all",))),
        "bias that fades, two lowest layers": ("fixed", neighbours("bias", outside=outside, schedule="linear")),
    }
    for pattern in ("matching_token", "dependency", "rare", "conflict"):
        together = {} if pattern == "conflict" else {"mass": True}
        wanted = {"distance": "kl", "weight": weight, "reference_length": 512, "schedule": "linear", **together}
        arms[f"{pattern}: loss"] = ("loss", role(pattern, "attention_loss", **wanted))
        arms[f"{pattern}: bias that fades"] = ("fixed", role(pattern, "bias", outside=outside, schedule="linear"))
    return arms


def arms(results: Results) -> Iterator[list[Run]]:
    best = tuned(results)
    runs = [Run("arms", "none", CHOOSING_SEED, 600, None, best)]
    runs += [Run("arms", label, CHOOSING_SEED, 600, plan, best) for label, (_, plan) in arm_plans(results).items()]
    yield [*runs, Run("arms", "convolution", CHOOSING_SEED, 600, None, best, convolution=True)]


def finalists(results: Results) -> dict[str, Plan | None]:
    """None, the best loss and the best fixed guide, each with its sham, by label."""
    plans = arm_plans(results)
    found: dict[str, Plan | None] = {"none": None}
    for kind, its_sham in (("loss", "the neighbour loss"), ("fixed", "fixed heads")):
        label = results.best("arms", [label for label, (its_kind, _) in plans.items() if its_kind == kind])
        found[label] = plans[label][1]
        found[f"sham: {its_sham} at a distance of 7"] = sham(plans[label][1])
    return found


def winner(results: Results) -> tuple[str, Plan]:
    """The guided arm with the lowest validation loss after 1,200 steps."""
    plans = {label: plan for label, plan in finalists(results).items() if plan and not label.startswith("sham")}
    label = results.best("long", list(plans))
    return label, plans[label]


def long(results: Results) -> Iterator[list[Run]]:
    best, plans = tuned(results), finalists(results)
    runs = [Run("long", label, seed, 1200, plan, best) for seed in FRESH_SEEDS for label, plan in plans.items()]
    yield runs + [Run("long", PAPER, seed, 1200, arm_plans(results)[PAPER][1], best) for seed in FRESH_SEEDS]


def longest(results: Results) -> Iterator[list[Run]]:
    best, (label, plan) = tuned(results), winner(results)
    settings = {**best, "evaluate_every": 600}
    plans = {"none": None, label: plan}
    yield [Run("longest", name, FRESH_SEEDS[0], 3000, its_plan, settings) for name, its_plan in plans.items()]


def roberta(results: Results) -> Iterator[list[Run]]:
    label, plan = winner(results)
    plans = {"none": None, PAPER: ag("next", "previous"), label: plan}
    settings = {**tuned(results), "architecture": "roberta", "learning_rate": 1e-3}
    yield [Run("roberta", name, seed, 600, plans[name], settings) for seed in FRESH_SEEDS for name in plans]


def in_oromo(results: Results) -> Iterator[list[Run]]:
    label, plan = winner(results)
    plans, best = {"none": None, label: plan}, tuned(results)
    yield [Run("oromo", name, seed, 600, plans[name], best, "oromo") for seed in FRESH_SEEDS for name in plans]


def tunings(results: Results) -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of plain runs, by label, in groups; each group starts from the best of those before it."""
    known: dict[str, dict[str, Any]] = {}
    for choices in TUNED:
        best = known[results.best("plain", list(known))] if known else {"beta2": 0.98}
        group = {f"plain, {_named(choice)}": {**best, **choice} for choice in choices}
        yield group
        known |= group


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


TUNED: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"learning_rate": r, "schedule": s} for r in (5e-4, 1e-3, 2e-3) for s in ("constant", "linear")],
    [{"warmup_steps": steps} for steps in (200, 400)],
    [{"weight_decay": decay} for decay in (0.0, 0.1)],
)


def tune_plain(results: Results) -> Iterator[list[Run]]:
    for group in tunings(results):
        yield [Run("plain", label, SEARCH_SEED, 1200, None, settings) for label, settings in group.items()]


def best_plain(results: Results) -> dict[str, Any]:
    """The settings with which plain training is best after 1,200 steps; all later arms have them."""
    known = {label: settings for group in tunings(results) for label, settings in group.items()}
    return known[results.best("plain", list(known))]


def mixes(of: str, reach: int = 1, layers: Sequence[str] = ("all",)) -> Plan:
    """The neighbours up to some distance, mixed into one place."""
    distances = [sign * step for step in range(1, reach + 1) for sign in (-1, 1)]
    patterns: Sequence[Any] = ["previous", "next", *({"where": f"distance == {d}"} for d in distances[2:])]
    return Plan(tuple(Guide(pattern, "mix", layers=layers, options={"of": (of,)}) for pattern in patterns))


PLACES = ("stream", "input", "query", "key", "value", "output")
PLACED = {
    f"mix of the {of}, {layers} layers": (of, (layers,)) for layers in ("all", "first 2", "first 4") for of in PLACES
}


def where_to_mix(results: Results) -> Iterator[list[Run]]:
    best = best_plain(results)
    plans = {"none": None, **{label: mixes(of, 1, layers) for label, (of, layers) in PLACED.items()}}
    yield [Run("where", label, CHOOSING_SEED, 1200, plan, best) for label, plan in plans.items()]


def how_wide(results: Results) -> Iterator[list[Run]]:
    of, layers = PLACED[results.best("where", list(PLACED))]
    plans = {f"mix, {reach} on each side": mixes(of, reach, layers) for reach in (1, 2, 3)}
    yield [Run("wide", label, CHOOSING_SEED, 1200, plan, best_plain(results)) for label, plan in plans.items()]


PHASES: Mapping[str, Callable[[Results], Iterator[list[Run]]]] = {
    "search": search,
    "arms": arms,
    "long": long,
    "longest": longest,
    "roberta": roberta,
    "oromo": in_oromo,
    "plain": tune_plain,
    "where": where_to_mix,
    "wide": how_wide,
}


# training


def inputs_of(run: Run, store: Store) -> tuple[str, dict[str, Any]]:
    """The sequences of a run, and the artifacts that its plan needs."""
    if run.data == "oromo":
        return oromo(store)
    text, bpe, reference = packed(store, "lm-litbank-books/books")
    needs = run.plan.needs() if run.plan else {}
    more: dict[str, Any] = {}
    if "head" in needs or "idf" in needs:
        rarity = idf.run(text, None, idf.Config(), store=store)
        trees = dependencies.run(text, dependencies.Config(parser=PARSER), store=store)
        assert rarity is not None and trees is not None
        config = masks.Config(idf=rarity.reference, deps=trees.reference)
        made = masks.run(reference, config, store=store)
        assert made is not None
        more["masks"] = made.reference
    if run.plan and "cooccurrence" in run.plan.tables():
        counts = cooccurrence.run(text, bpe, cooccurrence.Config(), store=store)
        assert counts is not None
        more["cooccur"] = counts.reference
    return reference, more


class Neighbours(nn.Module):
    """A learned sum of each token with its two neighbours, at first the token itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Conv1d(width, width, 3, padding=1, groups=width)
        nn.init.zeros_(self.weights.weight)
        nn.init.zeros_(self.weights.bias)  # type: ignore[arg-type]

    def forward(self, states_BTD: Tensor) -> Tensor:
        found: Tensor = states_BTD + self.weights(states_BTD.transpose(1, 2)).transpose(1, 2)
        return found


@contextmanager
def convolutions() -> Iterator[None]:
    """Models that are built meanwhile have a convolution before each of their two lowest layers."""
    build = masked_lm.build_model

    def built(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for layer in model.model.layers[:2]:
            layer.neighbours = Neighbours(model.config.hidden_size)
            layer.register_forward_pre_hook(lambda module, args: (module.neighbours(args[0]), *args[1:]))
        return model

    masked_lm.build_model = built
    try:
        yield
    finally:
        masked_lm.build_model = build


def train(run: Run, store: Store) -> Artifact:
    """The model of a run."""
    reference, more = inputs_of(run, store)
    settings = {**COMMON, **more, **run.settings, "seed": run.seed, "steps": run.steps}
    if run.plan:
        path = store.root / "plans" / f"{digest(run.plan.dumps())[:16]}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run.plan.dumps(), encoding="utf-8")
        settings["plan"] = str(path)
    if run.convolution:
        # the recipe of the stage does not know of the convolution, so its models have a place of their own
        beside = Store(store.root / "convolution")
        inputs_of(run, beside)
        with convolutions():
            made = pretrain.run(reference, pretrain.Config(**settings), store=beside)
    else:
        made = pretrain.run(reference, pretrain.Config(**settings), store=store)
    assert made is not None
    return made.artifact


def figures_of(run: Run, made: Artifact) -> dict[str, Any]:
    """The figures of a run, for the JSON."""
    curve = Curve.of(made, run.label)
    smooth = curve.smoothed(WINDOW)
    shown = np.unique(np.linspace(0, len(smooth) - 1, POINTS).astype(int))
    return {
        "phase": run.phase,
        "label": run.label,
        "seed": run.seed,
        "steps": run.steps,
        "key": run.key,
        "settings": dict(run.settings),
        "plan": run.plan.dumps() if run.plan else "",
        "parameters": made.counts["parameters"],
        "loss": float(smooth[-1]),
        "average": float(np.mean(curve.losses)),
        "valid": [[int(step), float(value)] for step, value in curve.valid],
        "seconds": float(curve.elapsed()[-1]),
        "curve": [[int(step) + 1, float(smooth[step])] for step in shown],
    }


# the page


def as_markdown(results: Results, nats: Mapping[str, Mapping[str, float]], costs: Mapping[str, float]) -> str:
    """One table for each phase: mean and deviation over seeds, a paired test of the last validation against no guides, and
    the steps to losses that the run without guides passes.

    Args:
        nats: the floors of each text.
        costs: how long a step takes with each plan of the phase ``long``, over one without guides.
    """
    parts = []
    for phase in PHASES:
        if not (rows := results.of(phase)):
            continue
        at = sorted({step for row in rows for step, _ in row["valid"]})
        titles = ["run", "n", "training loss", "mean over all steps", *(f"validation, step {step:,}" for step in at)]
        plain = {row["seed"]: row for row in rows if row["label"] == "none"}
        several = len(plain) > 1
        levels = passed_losses(next(iter(plain.values()))) if plain else []
        titles += ["p"] * several + [f"steps to {level:.2f}" for level in levels]
        lines = [f"| {' | '.join(titles)} |", "|---" + "|--:" * (len(titles) - 1) + "|"]
        for label in dict.fromkeys(row["label"] for row in rows):
            mine = [row for row in rows if row["label"] == label]
            cells = [cell([row[name] for row in mine], "{:.3f}") for name in ("loss", "average")]
            cells += [cell([dict(row["valid"]).get(step) for row in mine], "{:.3f}") for step in at]
            if several:
                gains = (_last(row) - _last(plain[row["seed"]]) for row in mine if row["seed"] in plain)
                p = paired_t_test(Summary.of(gains)) if label != "none" else None
                cells.append(p_value(p))
            cells += [cell([steps_to(row, level) for row in mine], "{:.0f}") for level in levels]
            lines.append(f"| {' | '.join([label, str(len(mine)), *cells])} |")
        said = [said_of_floors(floors)] if (floors := nats.get(text_of(phase))) else []
        if phase == "long":
            shown = "; ".join(f"{label} {cost:.2f}" for label, cost in costs.items())
            said.append(f"How long a step takes, timed in turn, over one without guides: {shown}.")
        parts.append("\n\n".join([f"## {phase}", "\n".join(lines), *said]))
    return "\n\n".join(parts)


def _last(row: Row) -> float:
    """The last validation loss of a run."""
    return float(row["valid"][-1][1])


def text_of(phase: str) -> str:
    """The text that a phase learns."""
    return "oromo" if phase == "oromo" else "books"


DRAWN = {
    "long": "ModernBERT-shaped, three seeds",
    "longest": "the same, one seed",
    "roberta": "RoBERTa-shaped, three seeds",
    "oromo": "ModernBERT-shaped on Oromo, three seeds",
}


def draw(results: Results, path: Path, nats: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the mean training loss over seeds in the phases with fresh seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = [phase for phase in DRAWN if results.of(phase)]
    if not phases:
        return
    figure, grid = pyplot.subplots(
        -(-len(phases) // 2), min(2, len(phases)), figsize=(10, 7), layout="constrained", squeeze=False
    )
    every_axes = grid.ravel().tolist()
    labels = dict.fromkeys(row["label"] for phase in phases for row in results.of(phase))
    colours = {label: f"C{number}" for number, label in enumerate(labels)}
    for phase, axes in zip(phases, every_axes, strict=False):
        rows = results.of(phase)
        for label in dict.fromkeys(row["label"] for row in rows):
            curves = [np.array(row["curve"]) for row in rows if row["label"] == label]
            steps, losses = np.mean(curves, axis=0).T
            axes.plot(steps, losses, color=colours[label], linewidth=1.3 if label == "none" else 2.2, label=label)
        draw_floors(axes, nats.get(text_of(phase), {}), min(loss for row in rows for _, loss in row["curve"]))
        axes.set(xlabel="optimizer steps", ylabel=f"training loss, mean of {WINDOW} steps (nats)", title=DRAWN[phase])
        axes.legend(fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every_axes[len(phases) :]:
        axes.remove()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def add(path: Path, *rows: Row, **about: Any) -> None:
    """Add figures of runs, or others, to the JSON, to which several processes may write."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        known = _known(path)
        found = {**known, **machine, "common": dict(COMMON), **about, "rows": [*known.get("rows", []), *rows]}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)  # others read meanwhile


def read(path: Path) -> Results:
    """The figures that are known."""
    return Results(_known(path).get("rows", []))


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def floors_of(path: Path, results: Results, store: Store) -> dict[str, dict[str, float]]:
    """The n-gram floors of each text that was learned; those that the JSON lacks are computed and added."""
    nats: dict[str, dict[str, float]] = _known(path).get("floors", {})
    sequences = {"books": lambda: packed(store, "lm-litbank-books/books")[2], "oromo": lambda: oromo(store)[0]}
    for text in sorted({text_of(row["phase"]) for row in results.rows} - nats.keys()):
        nats[text] = floors_of_sequences(sequences[text](), store)
        add(path, floors=nats)
    return nats


def costs_of(path: Path, results: Results, store: Store) -> dict[str, float]:
    """How long a step takes with each finalist, over one without guides; timed and added if the JSON lacks it."""
    costs: dict[str, float] = _known(path).get("costs", {})
    if not costs and results.of("long"):
        best = tuned(results)
        short = {
            label: train(Run("cost", label, FRESH_SEEDS[0], 4, plan, best), store).reference
            for label, plan in finalists(results).items()
        }
        seconds = step_seconds(list(short.values()), store)
        costs = {label: seconds[model] / seconds[short["none"]] for label, model in short.items() if label != "none"}
        add(path, costs=costs)
    return costs


def train_all(runs: Sequence[Run], path: Path, store: Store) -> None:
    """Train the runs whose figures are not in the JSON; several processes may share them."""
    store.root.mkdir(parents=True, exist_ok=True)
    while pending := [run for run in runs if not _is_known(run, path)]:
        for run in pending:
            with open(store.root / f"{run.key}.lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another process trains it
                    continue
                if _is_known(run, path):
                    continue
                row = figures_of(run, train(run, store))
                add(path, row)
            valid = ", ".join(f"{value:.3f} at {step:,}" for step, value in row["valid"])
            print(f"{run.phase}: {run.label}, seed {run.seed}: {valid}; {row['seconds']:.0f} s", flush=True)
        time.sleep(2)


def _is_known(run: Run, path: Path) -> bool:
    """Whether the figures of a run are in the JSON.

    Raises:
        SystemExit: they are, with other settings.
    """
    mine = (run.phase, run.label, run.seed)
    old = next((row for row in read(path).rows if (row["phase"], row["label"], row["seed"]) == mine), None)
    if old is not None and old["key"] != run.key:
        raise SystemExit(f"{path}: {run.phase}, {run.label} was trained with other settings; remove its entry")
    return old is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PHASES, help="one phase, whose earlier ones have been run")
    parser.add_argument("--first", type=int, help="only the first runs of each phase")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of those of the phase")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "trial.json"
    for phase in [arguments.only] if arguments.only else PHASES:
        for group in PHASES[phase](results := read(path)):
            runs = [replace(run, steps=arguments.steps or run.steps) for run in group[: arguments.first]]
            train_all(runs, path, Store(arguments.store))
            results.rows = read(path).rows  # the next group of the phase depends on them
            if arguments.first:
                break
        if arguments.first:
            break
    results = read(path)
    store = Store(arguments.store)
    nats, costs = floors_of(path, results, store), costs_of(path, results, store)
    path.with_suffix(".lock").unlink(missing_ok=True)
    draw(results, path.with_suffix(".png"), nats)
    text, title = as_markdown(results, nats, costs), "# Which guides help a small ModernBERT"
    picture = "\n![Training loss over steps](trial.png)\n" if path.with_suffix(".png").exists() else ""
    path.with_suffix(".md").write_text(
        f"{title}\n\n`python -m benchmarks.trial`\n\n{text}\n{picture}", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
