"""All tables."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks import PARSER, published
from benchmarks.finetuning.data import SHAPE, files, starter
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


def patterns(*numbers: int) -> Plan:
    """The four patterns of paper E in heads from 0 on: the first pattern in as many as the first number says, and so on."""
    names = (("matching_token", "mask"), ("same_segment", "mask"), ("next", "fix"), ("previous", "fix"))
    firsts = [0, *itertools.accumulate(numbers)]
    return Plan(
        tuple(
            Guide(name, mechanism, heads=tuple(range(first, first + number)))
            for (name, mechanism), number, first in zip(names, numbers, firsts, strict=False)
        )
    )


WORDS: dict[str, Any] = {
    "architecture": "role-transformer",
    "layers": 2,
    "hidden": 100,
    "heads": 6,
    "ffn": 256,
    "dropout": 0.3,
    "batch_size": 64,
    "schedule": "constant",
    "epochs": 12,
    "patience": 3,
    "warmup_fraction": 0,
}
PRETRAINED: dict[str, Any] = {"init": "starter", "extend_positions": True} | dict.fromkeys(
    ("architecture", "layers", "hidden", "heads", "ffn")
)
"""In a table of new models: start from `starter`."""
SENTENCES = {"format": "label-text", "encoding": "latin-1"}

TABLES = {
    "roles": Table(
        "Role-guided masks on words (paper B, table 2, without word vectors)",
        {
            "transformer": {},
            "transformer, five roles": {"plan": "preset:roles", "parser": PARSER},
            "CNN": {"architecture": "cnn", "ffn": None},
            "BiLSTM": {"architecture": "bilstm", "ffn": None},
        },
        {
            "TREC": Data(
                lambda s: files(s, "cls-trec/TREC.train.all", "cls-trec/TREC.test.all", **SENTENCES), "accuracy"
            ),
            "CR": Data(lambda s: files(s, "cls-cr/custrev.all", **SENTENCES), "accuracy", folds=True),
            "SUBJ": Data(
                lambda s: files(s, "cls-subj/subj.all", **SENTENCES),
                "accuracy",
                folds=True,
                settings={"epochs": 5, "patience": 0},
            ),
        },
        (1e-3, 3e-3),
        WORDS,
    ),
    "adversaries": Table(
        "Adversarial self-attention beside other attacks (paper D, table 1)",
        {
            "plain": {},
            "ASA": {"plan": "preset:asa"},
            "FreeLB-3": {"adversarial": "freelb"},
            # the words of the starter are 0.57 long in the median, those of BERT 1.4
            "FreeLB-3, scaled": {"adversarial": "freelb", "adversarial_rate": 0.04, "adversarial_start": 0.008},
            "FreeLB-3, small": {"adversarial": "freelb", "adversarial_rate": 0.01, "adversarial_start": 0.002},
            "SMART": {"adversarial": "smart"},
            "Bernoulli 0.1": {"plan": masks(0.1)},
            "plain, from scratch": {"init": "", **SHAPE},
        },
        {
            "SST, 4,000 sentences": Data(
                lambda s: files(
                    s, "cls-sst/stsa.binary.train", "cls-sst/stsa.binary.dev", lines=4000, format="label-text"
                ),
                "accuracy",
            ),
            "SICK": Data(
                lambda s: files(
                    s,
                    "nli-sick/SICK_train.txt",
                    "nli-sick/SICK_trial.txt",
                    format="tsv",
                    text_column="sentence_A",
                    pair_column="sentence_B",
                    label_column="entailment_judgment",
                ),
                "accuracy",
            ),
        },
        (3e-4, 1e-3),
        {"epochs": 2, "batch_size": 32, "max_length": 64, "bucket": True},
        start=starter,
    ),
    "patterns": Table(
        "Patterns in the heads of new models of 4 layers, and in heads added to a pre-trained one (paper E, tables 2 and 3)",
        {
            "plain": {},
            "patterns in 4 of 8 heads": {"plan": patterns(1, 1, 1, 1)},
            "patterns in all 8 heads": {"plan": patterns(2, 2, 2, 2)},
            "pre-trained, plain": PRETRAINED,
            "pre-trained, PAL with patterns": PRETRAINED | {"plan": "preset:pal-patterns"},
        },
        {
            "Choi and Wiki-300": Data(
                lambda s: files(s, ("seg-choi", "seg-wiki300"), format="choi", test_fraction=0.2, drop_shared=True),
                "f1",
                settings={"max_length": 130, "batch_size": 32, "epochs": 1, "negatives": 0.2, "bucket": True},
            ),
            "ScisummNet": Data(
                lambda s: files(s, "sum-scisummnet", format="scisummnet", test_fraction=0.2),
                "rouge1",
                settings={"max_length": 512, "batch_size": 4, "epochs": 4},
            ),
        },
        (3e-4, 1e-3),
        {"architecture": "bert", "layers": 4, "hidden": 128, "heads": 8, "ffn": 512},
    ),
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
