"""The phases about a decoder: a Llama-shaped model that predicts the next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.trial.head_start import LOWEST, neighbours
from benchmarks.trial.lasting import FINAL_SEEDS, NONE, at, best_of, tune
from benchmarks.trial.runs import Results, Run
from benchmarks.trial.uses import Use
from guidance.guide import Guide
from guidance.plan import Plan

SHAPE: Mapping[str, Any] = {"architecture": "llama", "objective": "clm", "batch_size": 8, "beta2": 0.98}
"""As many tokens in a step as the encoders have, in longer rows: a head can only copy from what it sees."""
STEPS = 3000
SNAPSHOTS = tuple(range(300, STEPS, 300))

MIX, SHAM_OF_MIX = "mix of the stream with the previous token", "mix with the token seven places before (sham)"
FIXED = "fix on the previous token, two lowest layers"
LOSSES = "losses towards the previous token and induction"
SHAM_OF_LOSSES = "losses towards the token seven places before and eleven places before (sham)"


def mix(distance: int) -> Plan:
    """The token at a distance, mixed into the states that enter each layer."""
    return Plan((Guide(at(distance), "mix", options={"of": ("stream",)}),))


def losses(previous: Any, induction: Any) -> Plan:
    """Divergences, with the weight that was best for encoders: head 0 of the two lowest layers, and head 1 of the two above."""
    keys: Mapping[str, Any] = {"distance": "kl", "weight": 3.0, "reference_length": 512, "schedule": "linear"}
    return Plan(
        (
            Guide(previous, "attention_loss", layers=LOWEST, heads=(0,), name="previous", **keys),
            Guide(induction, "attention_loss", layers=(2, 3), heads=(1,), name="induction", **keys),
        )
    )


PLANS: Mapping[str, Plan | None] = {
    NONE: None,
    MIX: mix(-1),
    SHAM_OF_MIX: mix(-7),
    FIXED: neighbours("fix", ["previous"]),
    LOSSES: losses("previous", "induction"),
    SHAM_OF_LOSSES: losses(at(-7), at(-11)),
}
ORDER = ((NONE, MIX, SHAM_OF_MIX), (FIXED,), (LOSSES, SHAM_OF_LOSSES))
"""Groups of runs, in the order in which they are trained; the named comparisons need the first two."""


def plain(results: Results) -> Iterator[list[Run]]:
    return tune(results, "causal-plain", "plain", None, SHAPE, "novels, 256 tokens")


def final(results: Results) -> Iterator[list[Run]]:
    best = best_of(results, "causal-plain", "plain", SHAPE)
    settings = {**best, "evaluate_every": 600, "snapshots": list(SNAPSHOTS)}
    for labels in ORDER:
        yield [
            Run("causal-final", label, seed, STEPS, PLANS[label], settings, "novels, 256 tokens")
            for seed in FINAL_SEEDS
            for label in labels
        ]


def use(results: Results) -> Iterator[list[Use]]:
    for runs in final(results):
        yield [
            Use("causal-use", f"{task}: {run.label}", run.seed, task, run)
            for task in ("BLiMP", "induction")
            for run in runs
        ]


PHASES = {"causal-plain": plain, "causal-final": final, "causal-use": use}
