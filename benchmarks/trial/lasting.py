"""The phases about guides that still help at the end: mixing along a pattern, alone and beside others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.trial.head_start import neighbours
from benchmarks.trial.runs import CHOOSING_SEED, SEARCH_SEED, Results, Run
from benchmarks.trial.uses import Use
from guidance.guide import Guide
from guidance.plan import Plan

FINAL_SEEDS = (4, 5, 6)
NONE, FIXED, SHAM = "none", "fix, all layers", "sham of the winner, seven tokens away"


# plain training


TUNED: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"learning_rate": r, "schedule": s} for r in (5e-4, 1e-3, 2e-3) for s in ("constant", "linear")],
    [{"warmup_steps": steps} for steps in (200, 400)],
    [{"weight_decay": decay} for decay in (0.0, 0.1)],
)
"""Settings in groups; each group starts from the best of those before it."""
BASE: Mapping[str, Any] = {"beta2": 0.98}


def tunings(
    results: Results, phase: str, arm: str, shape: Mapping[str, Any] = BASE
) -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of the runs that tune an arm, by label, in groups."""
    known: dict[str, dict[str, Any]] = {}
    for choices in TUNED:
        best = known[results.best(phase, list(known))] if known else dict(shape)
        group = {f"{arm}, {_named(choice)}": {**best, **choice} for choice in choices}
        yield group
        known |= group


def _named(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def tune(
    results: Results,
    phase: str,
    arm: str,
    plan: Plan | None,
    shape: Mapping[str, Any] = BASE,
    data: str = "books",
) -> Iterator[list[Run]]:
    for group in tunings(results, phase, arm, shape):
        yield [Run(phase, label, SEARCH_SEED, 1200, plan, settings, data) for label, settings in group.items()]


def best_of(results: Results, phase: str, arm: str, shape: Mapping[str, Any] = BASE) -> dict[str, Any]:
    """The settings with which an arm is best after 1,200 steps."""
    known = {label: settings for group in tunings(results, phase, arm, shape) for label, settings in group.items()}
    return known[results.best(phase, list(known))]


def plain(results: Results) -> Iterator[list[Run]]:
    return tune(results, "plain", "plain", None)


def best_plain(results: Results) -> dict[str, Any]:
    """The settings with which plain training is best after 1,200 steps; all later arms have them."""
    return best_of(results, "plain", "plain")


# plans

PLACES = ("stream", "input", "query", "key", "value", "output")
PLACED = {
    f"mix of the {of}, {layers} layers": (of, layers) for layers in ("all", "first 2", "first 4") for of in PLACES
}
IN_ALL = [label for label, (_, layers) in PLACED.items() if layers == "all"]


def at(distance: int) -> Any:
    """The pattern of the token at a distance."""
    return {-1: "previous", 0: "self", 1: "next"}.get(distance, {"where": f"distance == {distance}"})


def mix(place: str, distances: Sequence[int] = (-1, 1), away: int = 0) -> Plan:
    """Tokens at these distances, mixed into a place.

    Args:
        place: a label of `PLACED`.
        away: how much farther the other tokens are for a sham; the token itself stays.
    """
    of, layers = PLACED[place]
    moved = [distance + away * ((distance > 0) - (distance < 0)) for distance in distances]
    return Plan(tuple(Guide(at(distance), "mix", layers=(layers,), options={"of": (of,)}) for distance in moved))


def fixed(away: int = 0) -> Plan:
    """Two heads of each layer that look at the next and the previous token, or farther."""
    return neighbours("fix", [at(1 + away), at(-1 - away)], layers=("all",))


GATES = Plan((Guide(mechanism="gate", options={"input": "query"}),))
WIDTHS = {
    "1 on each side and the token itself": (-1, 0, 1),
    "2 on each side": (-2, -1, 1, 2),
    "3 on each side": (-3, -2, -1, 1, 2, 3),
}


def best_place(results: Results) -> str:
    """The label of the best place, in the layers where it is best."""
    of = PLACED[results.best("where", IN_ALL)][0]
    return results.best("where", [label for label, (place, _) in PLACED.items() if place == of])


def second_place(results: Results) -> str:
    """The label of the best of the other places, in all layers."""
    of = PLACED[best_place(results)][0]
    return results.best("where", [label for label in IN_ALL if PLACED[label][0] != of])


def arms(results: Results, away: int = 0) -> dict[str, tuple[str, Plan]]:
    """The arms that may win: phase and plan, by label; or their shams, whose neighbours are that much farther."""
    place, second = best_place(results), second_place(results)
    best = mix(place, away=away)
    beside = {second: mix(second, away=away), FIXED: fixed(away), "gates that read the query": GATES}
    return {
        place: ("where", best),
        **{f"{place}, {label}": ("wide", mix(place, width, away)) for label, width in WIDTHS.items()},
        **{f"{place}; {label}": ("together", Plan(best.guides + plan.guides)) for label, plan in beside.items()},
    }


def winner(results: Results) -> tuple[str, Plan, Plan]:
    """The arm with the lowest validation loss at step 1,200: label, plan, and the plan of its sham."""
    candidates = arms(results)
    best = min(candidates, key=lambda label: results.loss(candidates[label][0], label))
    return best, candidates[best][1], arms(results, away=6)[best][1]


def finalists(results: Results) -> dict[str, Plan | None]:
    """The plans of none, fixed heads and the winner, by label."""
    label, plan, _ = winner(results)
    return {NONE: None, FIXED: fixed(), label: plan}


OTHER_PATTERNS: Mapping[str, Any] = {
    "other places of the same word": {"where": "matching_token and not self and not key.mask_token"},
    "the sentence": "same_segment",
    "the syntactic head": "dependency",
    "rare words": "rare",
    "rare words that are not masked": {"and": ["rare", {"where": "not key.mask_token"}]},
    "words that co-occurrence expects": "conflict",
}
"""Patterns that places do not give.  Words and trees are those of the text without masks, so what they tell leaks in pre-training.
Co-occurrence is that of the tokens which the model sees."""


def beside_neighbours(results: Results) -> dict[str, Plan]:
    """The neighbours in the best place, alone and with each other pattern, and with its sham, by label."""
    of, layers = PLACED[best_place(results)]
    alone = mix(best_place(results))
    plans = {"the neighbours alone": alone}
    for name, pattern in OTHER_PATTERNS.items():
        for label, wanted in ((name, pattern), (f"{name}, shuffled (sham)", {"shuffled": pattern})):
            plans[label] = Plan((*alone.guides, Guide(wanted, "mix", layers=(layers,), options={"of": (of,)})))
    return plans


# phases


def where(results: Results) -> Iterator[list[Run]]:
    best = best_plain(results)

    def runs(labels: Sequence[str]) -> list[Run]:
        return [Run("where", label, CHOOSING_SEED, 1200, mix(label), best) for label in labels]

    yield [Run("where", NONE, CHOOSING_SEED, 1200, None, best), *runs(IN_ALL)]
    of = PLACED[results.best("where", IN_ALL)][0]
    yield runs([label for label, (place, layers) in PLACED.items() if place == of and layers != "all"])


def wide(results: Results) -> Iterator[list[Run]]:
    plans = {label: plan for label, (phase, plan) in arms(results).items() if phase == "wide"}
    plans[f"{best_place(results)}, the token itself alone (sham)"] = mix(best_place(results), (0,))
    yield [Run("wide", label, CHOOSING_SEED, 1200, plan, best_plain(results)) for label, plan in plans.items()]


def together(results: Results) -> Iterator[list[Run]]:
    plans = {label: plan for label, (phase, plan) in arms(results).items() if phase == "together"}
    plans |= {FIXED: fixed(), "gates that read the query": GATES}
    yield [Run("together", label, CHOOSING_SEED, 1200, plan, best_plain(results)) for label, plan in plans.items()]


def muon(results: Results) -> Iterator[list[Run]]:
    """Plain training with Muon over rates; then fixed heads and the winner at the best of them."""
    settings = {
        f"{NONE}, learning rate {rate}": {**best_plain(results), "optimizer": "muon", "learning_rate": rate}
        for rate in (1e-3, 2e-3, 4e-3)
    }
    yield [Run("muon", label, SEARCH_SEED, 1200, None, its) for label, its in settings.items()]
    best = settings[results.best("muon", list(settings))]
    plans = {label: plan for label, plan in finalists(results).items() if plan is not None}
    yield [Run("muon", label, SEARCH_SEED, 1200, plan, best) for label, plan in plans.items()]


def final(results: Results) -> Iterator[list[Run]]:
    plans = {**finalists(results), SHAM: winner(results)[2]}
    settings = {**best_plain(results), "evaluate_every": 600}
    yield [Run("final", label, seed, 3000, plan, settings) for seed in FINAL_SEEDS for label, plan in plans.items()]
    place = best_place(results)
    if place not in plans:  # the winner has something beside it: is that needed?
        yield [Run("final", place, seed, 3000, mix(place), settings) for seed in FINAL_SEEDS]


def own(results: Results) -> Iterator[list[Run]]:
    label, plan, _ = winner(results)
    for arm, its_plan in {FIXED: fixed(), label: plan}.items():
        yield from tune(results, "own", arm, its_plan)


def own_of_winner(results: Results) -> Iterator[list[Run]]:
    """None and fixed heads with the settings that are best for the winner."""
    settings = best_of(results, "own", winner(results)[0])
    plans = {NONE: None, FIXED: fixed()}
    yield [Run("own-of-winner", label, SEARCH_SEED, 1200, plan, settings) for label, plan in plans.items()]


def final_own(results: Results) -> Iterator[list[Run]]:
    """The winner with the settings that are best for it; then what it has in the best place, alone."""
    label, plan, _ = winner(results)
    settings = {**best_of(results, "own", label), "evaluate_every": 600}
    for name, its_plan in {label: plan, best_place(results): mix(best_place(results))}.items():
        yield [Run("final-own", f"{name}, own settings", seed, 3000, its_plan, settings) for seed in FINAL_SEEDS]


def elsewhere(results: Results, phase: str, data: str = "books", **changes: Any) -> Iterator[list[Run]]:
    """The finalists on another text, or with another architecture."""
    settings = {**best_plain(results), **changes}
    plans = finalists(results)
    yield [Run(phase, label, seed, 1200, plan, settings, data) for seed in FINAL_SEEDS for label, plan in plans.items()]


def final_roberta(results: Results) -> Iterator[list[Run]]:
    return elsewhere(results, "final-roberta", architecture="roberta")


def final_oromo(results: Results) -> Iterator[list[Run]]:
    return elsewhere(results, "final-oromo", "oromo")


def final_hausa(results: Results) -> Iterator[list[Run]]:
    return elsewhere(results, "final-hausa", "hausa")


def patterns(results: Results) -> Iterator[list[Run]]:
    settings = {**best_plain(results), "evaluate_every": 600}
    plans = beside_neighbours(results)
    yield [Run("patterns", label, FINAL_SEEDS[0], 3000, plan, settings) for label, plan in plans.items()]


def use(results: Results) -> Iterator[list[Use]]:
    """Seed by seed, so that a sitting ends with models that can be compared; the shams come last."""
    runs = next(final(results))
    shams = [run for run in runs if run.label == SHAM]
    for chosen in ([run for run in runs if run not in shams], shams):
        yield [
            Use("use", f"{task}: {run.label}", seed, task, run)
            for seed in FINAL_SEEDS
            for task in ("SST", "BLiMP", "TREC")
            for run in chosen
            if run.seed == seed
        ]


def use_hausa(results: Results) -> Iterator[list[Use]]:
    (runs,) = final_hausa(results)
    yield [Use("use-hausa", f"NER in Hausa: {run.label}", run.seed, "NER in Hausa", run) for run in runs]


def use_of_patterns(results: Results) -> Iterator[list[Use]]:
    (runs,) = patterns(results)
    yield [
        Use("use-patterns", f"{task}: {run.label}", run.seed, task, run)
        for task in ("SST", "BLiMP")
        for run in runs
        if task != "BLiMP" or not (run.reads_words or run.reads_counts)
    ]


def larger(results: Results) -> Iterator[list[Run]]:
    settings = {**best_plain(results), "layers": 12, "hidden": 256, "heads": 8, "ffn": 1024}
    plans = finalists(results)
    yield [Run("larger", label, FINAL_SEEDS[0], 1500, plan, settings) for label, plan in plans.items()]


def longer(results: Results) -> Iterator[list[Run]]:
    settings = {**best_plain(results), "evaluate_every": 1000}
    label, plan, _ = winner(results)
    plans = {NONE: None, label: plan}
    yield [Run("longer", name, FINAL_SEEDS[0], 8000, its_plan, settings) for name, its_plan in plans.items()]


PHASES = {
    "plain": plain,
    "where": where,
    "wide": wide,
    "together": together,
    "final": final,
    "own": own,
    "own-of-winner": own_of_winner,
    "final-own": final_own,
    "muon": muon,
    "final-roberta": final_roberta,
    "final-oromo": final_oromo,
    "final-hausa": final_hausa,
    "patterns": patterns,
    "use": use,
    "use-hausa": use_hausa,
    "use-patterns": use_of_patterns,
    "larger": larger,
    "longer": longer,
}
