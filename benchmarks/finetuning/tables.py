"""All tables."""

from __future__ import annotations

from benchmarks import published
from benchmarks.finetuning.data import files, starter
from benchmarks.finetuning.runs import Data, Found, Table
from guidance.guide import Guide
from guidance.plan import Plan


def masks(proportion: float) -> Plan:
    """Bernoulli masks in a second pass, as naive as an attack can be."""
    return Plan((Guide(mechanism="random_mask", options={"kind": "bernoulli", "proportion": proportion}),))


def asa(tau: float) -> Plan:
    """Paper D's plan for fine-tuning, with another price of units that are left on."""
    return Plan((Guide(mechanism="adversary", options={"tau": tau}),))


def neighbours() -> Plan:
    """The tokens on both sides, mixed into what enters each layer."""
    return Plan(tuple(Guide(pattern, "mix", options={"of": ("stream",)}) for pattern in ("previous", "next")))


SENTENCES = {"format": "label-text", "encoding": "latin-1"}

TABLES = {
    "discovered": Table(
        "Patterns found in the heads of a fine-tuned model, put into new ones (paper E, the whole loop)",
        {
            "plain": {},
            "found patterns, own heads": {"plan": Found("ScisummNet")},
            "found patterns, PAL": {"plan": Found("ScisummNet", pal=True)},
            "wrong patterns, own heads": {"plan": Found("ScisummNet", wrong=True)},
        },
        {
            "ScisummNet": Data(
                lambda s: files(s, "sum-scisummnet", format="scisummnet", test_fraction=0.2),
                "rouge1",
                settings={"max_length": 512, "batch_size": 4, "epochs": 4},
            ),
            "SciTLDR": Data(
                lambda s: files(s, "sum-scitldr/train.jsonl.gz", "sum-scitldr/test.jsonl", format="scitldr"),
                "rouge1",
                settings={"max_length": 256, "batch_size": 16, "epochs": 2, "bucket": True},
            ),
        },
        (3e-4, 1e-3),
        {"extend_positions": True},
        start=starter,
    ),
    "published": Table(
        "What the methods are worth on a published model, with 1,000 examples of each task",
        {
            "plain": {},
            "ASA": {"tried": ("plan", [asa(tau) for tau in (0.1, 0.3, 1.0)])},
            "random masks": {"tried": ("plan", [masks(share) for share in (0.05, 0.1, 0.2)])},
            "FreeLB-3": {"adversarial": "freelb", "tried": ("adversarial_rate", (0.03, 0.1, 0.3))},
            "PAL with patterns": {"plan": "preset:pal-patterns"},
            "mix of the neighbours": {"plan": neighbours()},
        },
        {
            "SST": Data(
                lambda s: files(
                    s, "cls-sst/stsa.binary.train", "cls-sst/stsa.binary.dev", lines=1000, format="label-text"
                ),
                "accuracy",
            ),
            "TREC": Data(
                lambda s: files(s, "cls-trec/TREC.train.all", "cls-trec/TREC.test.all", lines=1000, **SENTENCES),
                "accuracy",
            ),
            "RTE": Data(
                lambda s: files(s, "glue-rte/train.tsv", "glue-rte/dev.tsv", lines=1001, format="glue-rte"),
                "accuracy",
                settings={"max_length": 128},
            ),
            "WNUT17": Data(
                lambda s: files(
                    s,
                    "ner-wnut17/wnut17train.conll",
                    "ner-wnut17/emerging.test.annotated",
                    sentences=1000,
                    format="conll",
                ),
                "f1",
            ),
        },
        (5e-5, 1e-4, 2e-4),
        {"epochs": 2, "batch_size": 32, "max_length": 64, "bucket": True},
        start=lambda store: str(published()),
        tuning_seed=100,
        seeds=5,
    ),
}
