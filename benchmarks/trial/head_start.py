"""The phases about the head start that guides give: losses, biases and fixed heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.trial.runs import CHOOSING_SEED, SEARCH_SEED, Results, Run
from guidance.guide import Guide
from guidance.plan import Plan

FRESH_SEEDS = (1, 2, 3)
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


def paper() -> Plan:
    """Paper A's plan for two heads of every layer: its weight is 100, and 10 for 12 or more layers."""
    return Plan(
        tuple(
            Guide(
                pattern,
                "attention_loss",
                heads=(head,),
                weight=((1, 100.0), (12, 10.0)),
                reference_length=512,
                schedule="linear",
                name=f"encoder {pattern}",
            )
            for head, pattern in enumerate(("next", "previous"))
        )
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


# phases


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
        PAPER: ("loss", paper()),
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
    plans = {"none": None, PAPER: paper(), label: plan}
    settings = {**tuned(results), "architecture": "roberta", "learning_rate": 1e-3}
    yield [Run("roberta", name, seed, 600, plans[name], settings) for seed in FRESH_SEEDS for name in plans]


def in_oromo(results: Results) -> Iterator[list[Run]]:
    label, plan = winner(results)
    plans, best = {"none": None, label: plan}, tuned(results)
    yield [Run("oromo", name, seed, 600, plans[name], best, "oromo") for seed in FRESH_SEEDS for name in plans]


PHASES = {
    "search": search,
    "arms": arms,
    "long": long,
    "longest": longest,
    "roberta": roberta,
    "oromo": in_oromo,
}
