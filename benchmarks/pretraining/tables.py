"""The plans, and all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.pretraining.data import SMALL, Prepare, learned_books, of_published
from guidance.guide import Guide
from guidance.plan import Plan


@dataclass(frozen=True)
class Setting:
    """One row of a table: the plan and the settings in which its runs differ from the others."""

    label: str
    plan: Plan | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    follows: str = ""
    """For a scheduled mask: the label of the run from which it takes the fractions of masked units."""


@dataclass(frozen=True)
class Table:
    """A comparison; the best setting without a plan is the baseline."""

    title: str
    prepare: Prepare
    common: Mapping[str, Any]
    rows: Sequence[Setting]
    measures_start: bool = True
    """Whether the model that runs start from predicts masked words, so that its losses are measured too."""


def ag(*patterns: str, decoder: Sequence[str] = ()) -> Plan:
    """Attention guidance, one head per pattern.

    The weight is that of the paper, 100 (10 for 12 or more layers) at 512 tokens, and falls linearly to zero.
    """
    return Plan(
        tuple(
            Guide(
                pattern,
                "attention_loss",
                heads=(head,),
                stack=stack,
                weight=((1, 100.0), (12, 10.0)),
                reference_length=512,
                schedule="linear",
                name=f"{stack} {pattern}",
            )
            for stack, names in (("encoder", patterns), ("decoder", decoder))
            for head, pattern in enumerate(names)
        )
    )


def random_masks(**options: Any) -> Plan:
    """Random masks, in a second pass."""
    return Plan((Guide(mechanism="random_mask", options=options),))


def untrained() -> Plan:
    """The adversary of the preset, never trained: its masks have structure, but it knows nothing of the text."""
    preset = Plan.load("preset:asa-pretraining")
    return Plan(tuple(replace(guide, options={**guide.options, "train": False}) for guide in preset.guides))


GUIDED = ag("next", "previous")
MIXED = Plan(tuple(Guide(pattern, "mix", options={"of": ("stream",)}) for pattern in ("previous", "next")))
CONTINUED = {
    "steps": 500,
    "batch_size": 32,
    "warmup_steps": 50,
    "schedule": "linear",
    "evaluate_every": 250,
    "save_every": 100,
}
LASTING = [
    Setting(f"{name}, rate {rate:g}", plan, {"learning_rate": rate})
    for rate in (1e-4, 5e-4)
    for name, plan in (("plain", None), ("guided", GUIDED), ("neighbours mixed into the stream", MIXED))
]

TABLES = {
    "asa": Table(
        "Continued pre-training with an adversary (paper D, section 4.5): losses",
        learned_books,
        {**SMALL, "architecture": "modernbert", "steps": 300, "learning_rate": 3e-4},
        [
            Setting("plain"),
            Setting("ASA", "preset:asa-pretraining"),
            Setting("untrained adversary", untrained()),
            Setting("scheduled", random_masks(kind="scheduled"), follows="ASA"),
            Setting("Bernoulli 0.1", random_masks(kind="bernoulli", proportion=0.1)),
            Setting("magnitude 0.1", random_masks(kind="magnitude", proportion=0.1)),
        ],
    ),
    "continued": Table(
        "Continued pre-training of a published model on novels, with a new head on the tied embedding",
        of_published("lm-litbank-books/books"),
        CONTINUED,
        LASTING,
        measures_start=False,
    ),
    "continued-oromo": Table(
        "Continued pre-training of a published English model on news in Oromo",
        of_published("cls-masakhanews/orm/train.tsv.gz", quoting=True),
        CONTINUED,
        LASTING,
        measures_start=False,
    ),
}
