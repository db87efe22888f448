"""The fine-tuning comparisons of the papers, small enough for two cores; one command per table.

    python -m benchmarks.finetuning TABLE [--only TEXT] [--data TEXT] [--store artifacts] [--out docs/results]

The data come from public repositories and are expected in ``GUIDE_SHARED``/data (by default ../shared/data), the parser in
``GUIDE_SHARED``/models.

Each row of a table is trained with every learning rate of the table on the first seed.  The rate with the best validation is
kept for the other seeds, so that every row is tuned alike; the test split is only touched with that rate.  Where a data set has no test
split, the runs are the folds of a cross-validation, and the rate is chosen in each fold.  Figures in the JSON of the table are not computed
again, and interrupted runs are continued, so a table may be made in several sessions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.metrics.significance import holm, paired_t
from pipelines.stages import (
    corpus,
    dataset,
    discover_accept,
    discover_score,
    evaluate,
    pretrain,
    search,
    sequences,
    tokenizer,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store
from pipelines.views.figures import Summary

SHARED = Path(os.environ.get("GUIDE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
PARSER = f"spacy:{SHARED / 'models/spacy-en_ud_ewt_sm'}"
RUNS = 3
"""Seeds, or folds, of each row."""


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        build: makes the dataset and gives its reference.
        metric: of the test split.
        folds: whether it has no test split of its own.
        settings: of all rows on this data.
    """

    build: Callable[[Store], str]
    metric: str
    folds: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A comparison; the first row is the baseline."""

    title: str
    rows: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Data]
    rates: Sequence[float]
    settings: Mapping[str, Any]
    learned: bool = False
    """Whether rows start from the model of `starter`, unless they say otherwise."""


# data and models


def files(store: Store, train: str | Sequence[str], test: str = "", lines: int = 0, **settings: Any) -> str:
    """A dataset of files below the shared data.

    Args:
        train: a file or folder, or several.
        lines: take the first lines of the training file only.
    """
    sources = [SHARED / "data" / one for one in ([train] if isinstance(train, str) else train)]
    if lines:
        (source,) = sources
        part = store.root / "slices" / f"{source.name}-{lines}"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"\n".join(source.read_bytes().split(b"\n")[:lines]) + b"\n")
        sources = [part]
    given = {"train": [str(source) for source in sources]} | ({"test": [str(SHARED / "data" / test)]} if test else {})
    return dataset.run(given, dataset.Config(**{"valid_fraction": 0.1} | settings), store=store).reference


def starter(store: Store) -> str:
    """A model that trains well at this size, pre-trained on 26 novels: ModernBERT-shaped, 8 layers x 128."""
    text = corpus.run([str(SHARED / "data/lm-litbank-books/books")], corpus.Config(), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=8000, lowercase=True), store=store).reference
    packed = sequences.run(text, bpe, sequences.Config(max_length=64), store=store).reference
    config = pretrain.Config(
        **SHAPE,
        steps=2000,
        warmup_steps=100,
        learning_rate=1e-3,
        schedule="linear",
        evaluate_every=500,
        save_every=250,
    )
    made = pretrain.run(packed, config, store=store)
    assert made is not None
    return made.reference


def about_starter(store: Store) -> dict[str, Any]:
    """How good `starter` is on held-out words, with the n-gram floors, and how long its word vectors are, in the median."""
    model = store.load(starter(store))
    packed = store.load_input(model, "sequences")
    scores = evaluate.run(model.reference, packed.reference, evaluate.Config(split="valid"), store=store).artifact
    found = json.loads(scores.read("metrics.json"))
    weights = load_file(model.path / "model.safetensors")
    (vectors_VD,) = (tensor for name, tensor in weights.items() if name.endswith("tok_embeddings.weight"))
    return {
        "loss": found["metrics"]["loss"],
        "floors": found["floors"],
        "vector_length": float(vectors_VD.norm(dim=1).median()),
    }


def most_frequent(reference: str, store: Store) -> float:
    """The share of the most frequent label in the test split."""
    with store.load(reference).open("documents.parquet") as file:
        rows = pq.read_table(file, columns=["split", "label"]).to_pylist()
    labels = Counter(row["label"] for row in rows if row["split"] == "test")
    return max(labels.values()) / labels.total()


def plan_file(plan: Plan, store: Store) -> str:
    """The path of a plan that is no preset."""
    path = store.root / "plans" / f"{digest(plan.dumps())[:16]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.dumps(), encoding="utf-8")
    return str(path)


def masks(proportion: float) -> Plan:
    """Bernoulli masks in a second pass, as naive as an attack can be."""
    return Plan((Guide(mechanism="random_mask", options={"kind": "bernoulli", "proportion": proportion}),))


def patterns(*numbers: int) -> Plan:
    """The four patterns of paper E, each in as many heads as said, from head 0 on."""
    names = (("matching_token", "mask"), ("same_segment", "mask"), ("next", "fix"), ("previous", "fix"))
    firsts = [0, *itertools.accumulate(numbers)]
    return Plan(
        tuple(
            Guide(name, mechanism, heads=tuple(range(first, first + number)))
            for (name, mechanism), number, first in zip(names, numbers, firsts, strict=False)
        )
    )


@dataclass(frozen=True)
class Found:
    """A plan from patterns that heads of a fine-tuned model were found to look at; see `guide discover`.

    Attributes:
        data: the data set of the table on whose validation split they are looked for, in a plain model of its first seed.
        pal: into heads that are added, instead of the model's own.
        wrong: put as many patterns in their place that no head was found to look at: the token 7, 8, ... places ahead.
    """

    data: str
    pal: bool = False
    wrong: bool = False

    def plan(self, table: Table, store: Store) -> Plan:
        """The plan; empty if no head stands out."""
        found = self.scored(table, store)
        names = found.counts["proposed"]
        if not names:
            return Plan()
        if self.wrong:
            names = [f"distance == {7 + place}" for place in range(len(names))]
        settings = discover_accept.Config(patterns=names, pal=self.pal)
        made = discover_accept.run(found.reference, settings, store=store).artifact
        return Plan.load(made.path / discover_score.PLAN)

    def scored(self, table: Table, store: Store) -> Artifact:
        """The artifact that says which patterns stand out."""
        data = table.data[self.data]
        reference = data.build(store)
        first = searched(reference, settings_of(table, data, {}, store), store, grid=grid_of(table.rates))
        (run,) = chosen_runs(first)
        return discover_score.run(
            f"model/{run['model']}", reference, discover_score.Config(limit=200), store=store
        ).artifact


# tables

SHAPE: dict[str, Any] = {"architecture": "modernbert", "layers": 8, "hidden": 128, "heads": 4, "ffn": 512}
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
        learned=True,
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
        learned=True,
    ),
}


# runs

Row = Mapping[str, Any]


def settings_of(table: Table, data: Data, changes: Mapping[str, Any], store: Store) -> dict[str, Any]:
    """The settings of a search but for its rates and seeds."""
    given = {**table.settings, **data.settings, **changes}
    if (table.learned and "init" not in given) or given.get("init") == "starter":
        given["init"] = starter(store)
    if isinstance(given.get("plan"), Found):
        given["plan"] = given["plan"].plan(table, store)
    if isinstance(given.get("plan"), Plan):
        given["plan"] = plan_file(given["plan"], store)
    return {name: value for name, value in given.items() if value not in (None, "")}


def grid_of(rates: Sequence[float]) -> list[str]:
    """The rates as the grid of a search."""
    return [f"learning-rate={','.join(f'{rate:g}' for rate in rates)}"]


def searched(reference: str, settings: Mapping[str, Any], store: Store, **more: Any) -> Artifact:
    """The artifact of a search."""
    made = search.run(reference, search.Config(**settings, **more), store=store)
    assert made is not None
    return made.artifact


def chosen_runs(made: Artifact) -> list[dict[str, Any]]:
    """The rows of the runs that a search has chosen."""
    with made.open("runs.parquet") as file:
        return [row for row in pq.read_table(file).to_pylist() if row["chosen"]]


def tuned_runs(
    reference: str, settings: Mapping[str, Any], rates: Sequence[float], seeds: int, store: Store
) -> list[dict[str, Any]]:
    """The rows of runs with several seeds, at the rate with which the first seed has the best validation."""
    first = searched(reference, settings, store, grid=grid_of(rates))
    rate = float(first.counts["chosen"][0].partition("=")[2])
    return chosen_runs(searched(reference, settings, store, learning_rate=rate, seeds=seeds))


def figures_of(table: Table, label: str, name: str, store: Store) -> dict[str, Any]:
    """The figures of one row on one data set."""
    data, changes = table.data[name], table.rows[label]
    reference = data.build(store)
    settings = settings_of(table, data, changes, store)
    if data.folds:
        runs = chosen_runs(searched(reference, settings, store, grid=grid_of(table.rates), folds=RUNS))
    else:
        runs = tuned_runs(reference, settings, table.rates, RUNS, store)
    models = [store.load(f"model/{run['model']}") for run in runs]
    return {
        "label": label,
        "data": name,
        "settings": _digest(table, label, name),
        "metric": data.metric,
        "runs": [run[f"test/{data.metric}"] for run in runs],
        "valid": [run["valid"] for run in runs],
        "rates": [model.manifest["config"]["learning_rate"] for model in models],
        "steps": [model.counts["steps"] for model in models],
    }


def _digest(table: Table, label: str, name: str) -> str:
    changes = {
        key: value.dumps() if isinstance(value, Plan) else vars(value) if isinstance(value, Found) else value
        for key, value in table.rows[label].items()
    }
    changes.pop("parser", None)  # a path
    return digest([dict(table.settings), dict(table.data[name].settings), changes, list(table.rates), RUNS])[:16]


def evidence(table: Table, store: Store) -> dict[str, Any]:
    """What the figures of a table have to be read with."""
    found: dict[str, Any] = {}
    if table.learned or any(changes.get("init") == "starter" for changes in table.rows.values()):
        found["starter"] = about_starter(store)
    tested = {name: data for name, data in table.data.items() if data.metric == "accuracy" and not data.folds}
    if tested:
        found["most frequent class"] = {name: most_frequent(data.build(store), store) for name, data in tested.items()}
    for finder in (changes.get("plan") for changes in table.rows.values()):
        if isinstance(finder, Found) and "found" not in found:
            counts = finder.scored(table, store).counts
            chosen = [one for one in counts["candidates"] if one["pattern"] in counts["proposed"]]
            found["found"] = {"examples": counts["sequences"], "patterns": chosen}
    return found


# the table


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """One line for each row and data set: mean and deviation, and a paired test against the first row of the table."""
    lines = [
        "| data | row | metric | runs | mean | difference | 95 % interval | p | corrected p | rates |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, data in table.data.items():
        own = {row["label"]: row for row in rows if row["data"] == name}
        base = own.get(next(iter(table.rows)))
        tests = {}
        for label, row in own.items():
            if base is not None and row is not base:
                differences = [b - a for a, b in zip(base["runs"], row["runs"], strict=True)]
                tests[label] = paired_t(differences, shared_folds=data.folds)
        corrected = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
        for label, row in own.items():
            cells = [name, label, row["metric"], f"{len(row['runs'])} {'folds' if data.folds else 'seeds'}"]
            cells.append(_mean(row["runs"], "{:.3f}"))
            if test := tests.get(label):
                cells += [
                    f"{test.effect:+.3f}",
                    f"{test.low:+.3f} to {test.high:+.3f}",
                    f"{test.p:.3f}",
                    f"{corrected[label]:.3f}",
                ]
            else:
                cells += ["–"] * 4
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(row["rates"]))
            lines.append(f"| {' | '.join([*cells, rates])} |")
    return "\n".join(lines)


def _mean(values: Sequence[float], form: str) -> str:
    found = Summary.of(values)
    if found.mean is None:
        return "–"
    return form.format(found.mean) + (f" ± {form.format(found.sd)}" if found.sd is not None else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose label contains TEXT")
    parser.add_argument("--data", default="", metavar="TEXT", help="only data sets whose name contains TEXT")
    parser.add_argument("--store", type=Path, default=Path("artifacts"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    table, path = TABLES[arguments.table], arguments.out / f"finetuning-{arguments.table}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known.get("rows", [])
    for name in table.data:
        for label in table.rows:
            if arguments.only not in label or arguments.data not in name:
                continue
            old = next((row for row in rows if (row["label"], row["data"]) == (label, name)), None)
            if old is not None:
                if old["settings"] != _digest(table, label, name):
                    raise SystemExit(f"{path}: {label} on {name} was trained with other settings; remove its entry")
                continue
            row = figures_of(table, label, name, Store(arguments.store))
            rows.append(row)
            print(f"{name}, {label}: {_mean(row['runs'], '{:.3f}')} {row['metric']}", flush=True)
            about = {"title": table.title, "torch": torch.__version__, "threads": torch.get_num_threads()}
            about |= {"machine": platform.machine(), "rates": list(table.rates), "common": dict(table.settings)}
            known = {**known, **about, "rows": rows}
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if "evidence" not in known:
        known = {**known, "evidence": evidence(table, Store(arguments.store))}
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = as_markdown(table, rows)
    path.with_suffix(".md").write_text(
        f"# {table.title}\n\n`python -m benchmarks.finetuning {arguments.table}`\n\n{text}\n", encoding="utf-8"
    )
    print(text)


if __name__ == "__main__":
    main()
