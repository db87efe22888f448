"""The plans, and all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.pretraining.data import (
    SMALL,
    Prepare,
    books,
    captions,
    counted_books,
    generated_books,
    learned_books,
    of_published,
    oromo,
    swahili,
)
from guidance.guide import Guide
from guidance.plan import Plan


@dataclass(frozen=True)
class Setting:
    """One row of a table: the plan and the settings in which its runs differ from the others."""

    label: str
    plan: Plan | str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    """The spread within each group of settings is reported."""
    follows: str = ""
    """For a scheduled mask: the label of the run from which it takes the fractions of masked units."""


@dataclass(frozen=True)
class Table:
    """A comparison; the best setting without a plan is the baseline."""

    title: str
    prepare: Prepare
    common: Mapping[str, Any]
    rows: Sequence[Setting]
    translates: bool = False
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


def conflicts(**options: Any) -> Plan:
    """McMisP for two heads of the last three layers."""
    guide = Guide("conflict", "logit_loss", layers=("last 3",), heads=("first 2",), options=options)
    return Plan((guide,))


def random_masks(**options: Any) -> Plan:
    """Random masks, in a second pass."""
    return Plan((Guide(mechanism="random_mask", options=options),))


def untrained() -> Plan:
    """The adversary of the preset, never trained: its masks have structure, but it knows nothing of the text."""
    preset = Plan.load("preset:asa-pretraining")
    return Plan(tuple(replace(guide, options={**guide.options, "train": False}) for guide in preset.guides))


PAIRS = {
    "layers": 2,
    "hidden": 256,
    "heads": 8,
    "ffn": 512,
    "steps": 600,
    "batch_tokens": 2048,
    "learning_rate": 1e-3,
    "schedule": "inverse-sqrt",
    "warmup_steps": 200,
    "beta2": 0.98,
    "evaluate_every": 300,
    "save_every": 100,
}
RATES = (1e-3, 3e-4, 3e-3)
WARMUPS = (0, 100)


def grid(name: str, plan: Plan | None, rates: Sequence[float], warmups: Sequence[int], dropout: float) -> list[Setting]:
    """One setting for each combination of learning rate and warm-up."""
    return [
        Setting(
            f"{name}, rate {rate:g}, warm-up {warmup}, dropout {dropout:g}",
            plan,
            {"learning_rate": rate, "warmup_steps": warmup, "dropout": dropout},
            f"{name}, dropout {dropout:g}",
        )
        for rate in rates
        for warmup in warmups
    ]


GUIDED = ag("next", "previous")
MIXED = Plan(tuple(Guide(pattern, "mix", options={"of": ("stream",)}) for pattern in ("previous", "next")))
CONFLICTS = [
    Setting("ELECTRA"),
    Setting("McMisP", conflicts()),
    Setting("Ground", conflicts(truth=True)),
    Setting("Constant", conflicts(constant=0.9)),
]
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
    "fair": Table(
        "Untuned guidance against tuned plain training (paper A, figure 3)",
        books,
        SMALL,
        grid("plain", None, RATES, WARMUPS, 0.1) + grid("guided", GUIDED, RATES[:1], WARMUPS[:1], 0.1),
    ),
    "robust": Table(
        "Spread over rates, warm-up and dropout (paper A, section 6)",
        books,
        SMALL,
        [
            setting
            for dropout in (0.1, 0.0)
            for name, plan in (("plain", None), ("guided", GUIDED))
            for setting in grid(name, plan, RATES, WARMUPS, dropout)
        ],
    ),
    "deep": Table(
        "16 layers (paper A, table 3)",
        books,
        {**SMALL, "layers": 16, "steps": 800},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "electra": Table(
        "ELECTRA with a unigram generator (paper A, table 6)",
        books,
        {**SMALL, "objective": "electra", "generator": "unigram"},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "electra-long": Table(
        "ELECTRA with a unigram generator, its loss weighed by 1, in 1,500 steps (paper A, table 6)",
        books,
        {**SMALL, "objective": "electra", "generator": "unigram", "discriminator_weight": 1.0, "steps": 1500},
        [Setting("plain"), Setting("guided", GUIDED)],
    ),
    "mcmisp": Table(
        "Conflicts with mis-predictions in ELECTRA (paper C, table 5, smaller): training losses",
        counted_books,
        {**SMALL, "objective": "electra", "generator": "transformer"},
        CONFLICTS,
    ),
    "mcmisp-late": Table(
        "Conflicts with mis-predictions in ELECTRA whose generator predicts (paper C, table 5, smaller): training losses",
        generated_books,
        {**SMALL, "objective": "electra", "generator": "transformer", "learning_rate": 5e-4},
        CONFLICTS,
    ),
    "mcmisp-bert": Table(
        "Conflicts with mis-predictions in BERT (paper C, table 5, smaller): training losses",
        counted_books,
        {**SMALL, "generator": "transformer"},
        [Setting("BERT, with a generator beside it"), Setting("McMisP", conflicts())],
    ),
    "translation": Table(
        "Translation of captions, German to English (paper A, table 7)",
        captions,
        {**PAIRS, "objective": "translation"},
        [
            Setting("plain"),
            Setting("guided encoder", ag("next", "previous")),
            Setting("guided both", ag("next", "previous", decoder=("previous",))),
            Setting("Gaussian", "preset:gaussian"),
        ],
        translates=True,
    ),
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
    "oromo": Table("Oromo (paper A, tables 2 and 3)", oromo, SMALL, [Setting("plain"), Setting("guided", GUIDED)]),
    "swahili": Table("Swahili", swahili, SMALL, [Setting("plain"), Setting("guided", GUIDED)]),
}
