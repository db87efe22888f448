"""All tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import PARSER, published
from benchmarks.finetuning.data import files, starter
from benchmarks.finetuning.runs import Data, Found, Table
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.storage.store import Store


def masks(proportion: float) -> Plan:
    """Bernoulli masks in a second pass, as naive as an attack can be."""
    return Plan((Guide(mechanism="random_mask", options={"kind": "bernoulli", "proportion": proportion}),))


def asa(tau: float) -> Plan:
    """Paper D's plan for fine-tuning, with another cost of hiding a unit."""
    return Plan((Guide(mechanism="adversary", options={"tau": tau}),))


def strongest(share: float) -> Plan:
    """Masks of the keys with the highest scores of every row, in a second pass."""
    return Plan((Guide(mechanism="random_mask", options={"kind": "magnitude", "proportion": share}),))


def gates() -> Plan:
    """A factor for each head and token that is computed from the token's hidden state; 1 at first."""
    return Plan((Guide(mechanism="gate", options={"input": "query"}),))


def neighbours() -> Plan:
    """The tokens on both sides, mixed into what enters each layer."""
    return Plan(tuple(Guide(pattern, "mix", options={"of": ("stream",)}) for pattern in ("previous", "next")))


# tasks

SENTENCES = {"format": "label-text", "encoding": "latin-1"}
JSON_PAIRS = {"format": "json", "text_column": "text_a", "pair_column": "text_b"}
LONG = {"max_length": 128}
BF16 = {"precision": "bf16"}
"""Takes 0.6 of the time of fp32 where the processor has it.  Rows are compared only with rows of the same arithmetic."""

TASKS = {
    "SST": Data(
        lambda s: files(s, "cls-sst/stsa.binary.train", "cls-sst/stsa.binary.dev", 1000, format="label-text"),
        "accuracy",
    ),
    "TREC": Data(
        lambda s: files(s, "cls-trec/TREC.train.all", "cls-trec/TREC.test.all", 1000, **SENTENCES), "accuracy"
    ),
    "RTE": Data(
        lambda s: files(s, "glue-rte/train.tsv", "glue-rte/dev.tsv", 1001, format="glue-rte"),
        "accuracy",
        settings=LONG | BF16,
    ),
    "WNUT17": Data(
        lambda s: files(
            s, "ner-wnut17/wnut17train.conll", "ner-wnut17/emerging.test.annotated", 1000, "sentences", format="conll"
        ),
        "f1",
        settings={"epochs": 10, **BF16},  # after two epochs the model has hardly begun to find entities
    ),
}
"""1,000 training examples each; the development files are the test where labels of the test are not public."""

MORE_TASKS = {
    "SICK": Data(
        lambda s: files(s, "nli-sick/SICK_train.txt", "nli-sick/SICK_trial.txt", 1001, format="sick"),
        "accuracy",
        maybe_seen=True,
    ),
    "MRPC": Data(
        lambda s: files(
            s, "glue-mrpc/msr_paraphrase_train.txt", "glue-mrpc/msr_paraphrase_test.txt", 1001, format="glue-mrpc"
        ),
        "accuracy",
        settings=LONG,
    ),
    "CoLA": Data(
        lambda s: files(s, "glue-cola/in_domain_train.tsv", "glue-cola/in_domain_dev.tsv", 1000, format="glue-cola"),
        "matthews",
    ),
    "STS-B": Data(
        lambda s: files(s, "glue-stsb/sts-train.csv", "glue-stsb/sts-test.csv", 1000, format="glue-stsb"),
        "spearman",
        maybe_seen=True,
    ),
}

ROBUSTNESS = {
    "QQP": Data(
        lambda s: files(s, "glue-qqp/train.json", "glue-qqp/dev.json", 1000, "pairs", **JSON_PAIRS),
        "accuracy",
        also={"PAWS-QQP": lambda s: files(s, test="robust-paws-qqp/dev_and_test.tsv", format="paws")},
        maybe_seen=True,
    ),
    "HellaSwag": Data(
        lambda s: files(
            s, "mrc-hellaswag/val_0000-1999.txt.gz", "mrc-hellaswag/val_5000-5699.txt.gz", 6000, format="hellaswag"
        ),
        "accuracy",
        also={
            "HellaSwag, ActivityNet": lambda s: files(
                s, test="mrc-hellaswag/val_0000-1999.txt.gz", skip=6000, format="hellaswag"
            )
        },
        settings=LONG,
    ),
}
"""1,000 training examples; a question of HellaSwag has six lines.  Its training questions are about videos (ActivityNet) and those of
its test are from WikiHow, with longer endings, so the models are also measured on further questions about videos."""


def scisummnet(**settings: Any) -> Data:
    def build(store: Store) -> str:
        return files(store, "sum-scisummnet", format="scisummnet", test_fraction=0.2)

    return Data(build, "rouge1", settings={"max_length": 512, "batch_size": 4, "epochs": 4}, **settings)


def scitldr(take: int = 0, **settings: Any) -> Data:
    def build(store: Store) -> str:
        return files(store, "sum-scitldr/train.jsonl.gz", "sum-scitldr/test.jsonl", take, format="scitldr")

    sizes = {"max_length": 256, "batch_size": 16, "epochs": 2, "bucket": True}
    return Data(build, "rouge1", settings=sizes, **settings)


# methods

Rows = Mapping[str, Mapping[str, Any]]

PLAIN: Rows = {"plain": {}}

METHODS: Rows = {
    "ASA": {"tried": ("plan", [asa(tau) for tau in (0.1, 0.3, 1.0)])},
    "random masks": {"tried": ("plan", [masks(share) for share in (0.05, 0.1, 0.2)])},
    "FreeLB-3": {"adversarial": "freelb", "tried": ("adversarial_rate", (0.03, 0.1, 0.3))},
    "PAL with patterns": {"plan": "preset:pal-patterns"},
    "mix of the neighbours": {"plan": neighbours()},
}

OWN_RATE = {"tried": ("added_learning_rate", (1e-3, 3e-3, 1e-2))}
"""For weights that are zero at first, beside a model that has been trained already."""

MORE_METHODS: Rows = {
    "SMART": {"adversarial": "smart", "tried": ("adversarial_weight", (0.3, 1.0, 3.0))},
    "masks of the highest scores": {"tried": ("plan", [strongest(share) for share in (0.05, 0.1, 0.2)])},
    "role masks": {"plan": "preset:roles", "parser": PARSER},
    "gates that read the query": {"plan": gates(), **OWN_RATE},
    "mix of the neighbours, its weights faster": {"plan": neighbours(), **OWN_RATE},
}


def found(data: str) -> Rows:
    """Rows with patterns that heads of a plain model of this data set look at."""
    return {
        "found patterns, own heads": {"plan": Found(data)},
        "found patterns, PAL": {"plan": Found(data, pal=True)},
        "wrong patterns, own heads": {"plan": Found(data, wrong=True)},
    }


# tables


def on_published(title: str, rows: Rows, data: Mapping[str, Data], **settings: Any) -> Table:
    """A table whose rows start from a published model; all of them have the settings."""
    return Table(
        title,
        {**PLAIN, **rows},
        data,
        (5e-5, 1e-4, 2e-4),
        {"epochs": 2, "batch_size": 32, "max_length": 64, "bucket": True, **settings},
        start=lambda store: str(published()),
        tuning_seed=100,
        seeds=5,
    )


TABLES = {
    "discovered": Table(
        "Patterns found in the heads of a fine-tuned model, put into new ones (paper E, the whole loop)",
        {**PLAIN, **found("ScisummNet")},
        {"ScisummNet": scisummnet(), "SciTLDR": scitldr()},
        (3e-4, 1e-3),
        {"extend_positions": True},
        start=starter,
    ),
    "published": on_published(
        "What the methods are worth on a published model, with 1,000 examples of each task", METHODS, TASKS
    ),
    "published-methods": on_published(
        "What more methods are worth on a published model, with 1,000 examples of each task",
        MORE_METHODS,
        TASKS,
        **BF16,
    ),
    "published-tasks": on_published(
        "What the methods are worth on a published model, with 1,000 examples of more tasks",
        {**METHODS, **MORE_METHODS},
        MORE_TASKS,
        **BF16,
    ),
    "published-robustness": on_published(
        "What the methods are worth on a published model where words mislead, with 1,000 examples",
        METHODS,
        ROBUSTNESS,
        **BF16,
    ),
    "published-discovered": on_published(
        "Patterns found in the heads of a published model, put into it again",
        {
            "PAL with patterns": METHODS["PAL with patterns"],
            **found("SciTLDR"),
            "wrong patterns, PAL": {"plan": Found("SciTLDR", pal=True, wrong=True)},
        },
        {"ScisummNet": scisummnet(maybe_seen=True), "SciTLDR": scitldr(1000, maybe_seen=True)},
        **BF16,
    ),
}
