"""What is measured: each probe on the model, and on one of its shape with random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import shared
from benchmarks.finetuning.data import files, plan_file
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.metrics.correlations import spearman
from pipelines.probing.heads import head_name, heads_of
from pipelines.probing.one_text import look
from pipelines.stages import (
    evaluate,
    finetune,
    probe_coreference,
    probe_dependencies,
    probe_distance,
    probe_importance,
    probe_reflexives,
    probe_relevance,
    probe_sinks,
)
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store

PUBLISHED = "all-MiniLM-L6-v2"
NOVEL = "lm-litbank-books/books/1023_bleak_house.txt.gz"
TUNING: Mapping[str, Any] = {"steps": 100, "learning_rate": 1e-4, "max_length": 64, "bucket": True}
GUIDED_TUNING = {**TUNING, "steps": 40, "batch_size": 16, "learning_rate": 3e-4, "valid_sequences": 64}
RELATIONS = 15
"""Relations of the table, the most frequent ones."""

SENTENCE = "The keys to the cabinet that the old man had lost are on the table, and he could not find them"
GUIDED = {(4, 5): "next", (2, 9): "previous"}
"""Heads that are guided, with their patterns."""


@dataclass(frozen=True)
class Models:
    """The model, and one of its shape with random weights, as folders; what is made of them is in the store."""

    trained: Path
    random: Path
    store: Store

    def both(self, probe: Callable[[str], Artifact]) -> dict[str, Artifact]:
        """What a probe finds in each."""
        return {name: probe(str(folder)) for name, folder in (("trained", self.trained), ("random", self.random))}


def models_of(folder: Path, name: str, store: Store) -> Models:
    """The models, by a name of which the page speaks; the random one is made with seed 0."""
    from transformers import AutoConfig, AutoModel

    links = store.root / "models"
    trained, made = links / name, links / f"{name}-random"
    links.mkdir(parents=True, exist_ok=True)
    if not trained.exists():
        trained.symlink_to(folder.resolve())
    if not made.exists():
        torch.manual_seed(0)
        part = made.with_suffix(".part")
        AutoModel.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(part)
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            if (folder / file).exists():
                shutil.copyfile(folder / file, part / file)
        part.rename(made)
    return Models(trained, made, store)


# what is measured


def coreference(models: Models, paths: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Antecedents that the best head finds, by kind of mention, and what rules find."""
    config, files = probe_coreference.Config(**settings), [str(shared(f"data/{path}")) for path in paths]
    found = models.both(lambda m: probe_coreference.run(m, files, config, store=models.store).artifact)
    counts = found["trained"].counts
    return {
        "documents": counts["documents"],
        "asked": counts["asked"],
        "rules": counts["baselines"],
        **{name: {key: made.counts[key] for key in ("best", "best_by", "split_half")} for name, made in found.items()},
        "heads": matrix(found["trained"], "accuracy"),
        "random_heads": matrix(found["random"], "accuracy"),
    }


def dependencies(models: Models) -> dict[str, Any]:
    """The best head for each relation, and the best fixed distance."""
    path, config = str(shared("data/ud-english-ewt/en_ewt-ud-dev.conllu.gz")), probe_dependencies.Config(limit=1000)
    found = models.both(lambda m: probe_dependencies.run(m, [path], config, store=models.store).artifact)
    own, other = found["trained"].counts, found["random"].counts
    keys = ("attachment_of_best_heads", "attachment_of_best_offsets")
    return {
        "sentences": own["sentences"],
        "words": own["words"],
        "all": {key: own[key] for key in keys} | {"random": other[keys[0]]},
        "relations": {
            name: {**figures, "random": other["relations"][name]["best"]}
            for name, figures in list(own["relations"].items())[:RELATIONS]
        },
    }


def reflexives(models: Models, sentences: int = 10_000) -> dict[str, Any]:
    """Reflexives whose best head looks at what they refer to."""
    config = probe_reflexives.Config(sentences=sentences)
    found = models.both(lambda m: probe_reflexives.run(m, config, store=models.store).artifact)
    return {name: {key: made.counts[key] for key in ("sentences", "best", "mean")} for name, made in found.items()}


def patterns(models: Models) -> dict[str, Any]:
    """The head that spends most on each pattern, and how much even attention would."""
    config = probe_relevance.Config(limit=200)
    found = models.both(
        lambda m: probe_relevance.run(m, str(shared(f"data/{NOVEL}")), config, store=models.store).artifact
    )
    own, other = (found[name].counts["patterns"] for name in ("trained", "random"))
    return {
        "sequences": found["trained"].counts["sequences"],
        "patterns": {
            name: {
                "best": head_name(figures["best"]),
                "share": figures["best"][name],
                "mean": figures["mean"],
                "by_chance": figures["by_chance"],
                "random": other[name]["best"][name],
            }
            for name, figures in own.items()
        },
        "heads": {name: matrix(found["trained"], name) for name in ("previous", "next")},
        "random_heads": {name: matrix(found["random"], name) for name in ("previous", "next")},
    }


def sinks(models: Models) -> dict[str, Any]:
    """Attention on special tokens, the first token and the query itself, by layer."""
    config = probe_sinks.Config(limit=200)
    found = models.both(lambda m: probe_sinks.run(m, str(shared(f"data/{NOVEL}")), config, store=models.store).artifact)
    kept = ("sequences", "best", "by_layer", "by_chance")
    return {
        **{name: {key: made.counts[key] for key in kept} for name, made in found.items()},
        "heads": matrix(found["trained"], "special"),
        "random_heads": matrix(found["random"], "special"),
    }


def distances(models: Models) -> dict[str, Any]:
    """How far heads are from each other, and each from itself after fine-tuning, in nats."""
    config, novel = probe_distance.Config(limit=25, sequence_length=128), str(shared(f"data/{NOVEL}"))
    found = models.both(lambda m: probe_distance.run(m, novel, config, store=models.store).artifact)
    tuned = tuned_on_sst(models).reference
    moved = probe_distance.run(str(models.trained), novel, config, other=tuned, store=models.store).artifact
    rows = sorted(heads_of(moved), key=lambda row: -row["counterpart"])
    nearest = {name: [row["nearest"] for row in heads_of(made)] for name, made in found.items()}
    return {
        "sequences": moved.counts["sequences"],
        "mean": {name: made.counts["mean"] for name, made in found.items()},
        "nearest": {name: sum(values) / len(values) for name, values in nearest.items()},
        "moved": sum(row["counterpart"] for row in rows) / len(rows),
        "moved_by_layer": [
            sum(row["counterpart"] for row in own) / len(own)
            for layer in sorted({row["layer"] for row in rows})
            if (own := [row for row in rows if row["layer"] == layer])
        ],
        "moved_most": {head_name(row): row["counterpart"] for row in rows[:3]},
    }


def importance(models: Models) -> dict[str, Any]:
    """How important each head is after fine-tuning on SST, by its gradient and by switching it off."""
    data, results = sst(models.store), {}
    for name, tuned in (("trained", tuned_on_sst(models)), ("random", tuned_on_sst(models, random_init=True))):
        scores = evaluate.run(tuned.reference, data, evaluate.Config(split="test"), store=models.store).artifact
        by_gradient, by_off = (
            probe_importance.run(tuned.reference, data, settings, store=models.store).artifact
            for settings in (probe_importance.Config(limit=300), probe_importance.Config(by="off", limit=150))
        )
        gradients, rises = (matrix(made, "importance") for made in (by_gradient, by_off))
        results[name] = {
            "accuracy": json.loads(scores.read("metrics.json"))["metrics"]["accuracy"],
            "examples": {"gradient": by_gradient.counts["examples"], "off": by_off.counts["examples"]},
            "loss": by_off.counts["loss"],
            "correlation": spearman(*([value for row in each for value in row] for each in (gradients, rises))),
            "gradient": gradients,
            "off": rises,
        }
    return results


def guided(models: Models) -> dict[str, Any]:
    """How much attention two heads spend on their pattern in one sentence, before and after fine-tuning with two guides."""
    tuned = tuned_on_sst(models, guided=True)
    shares = {}
    for name, folder in (("before", models.trained), ("after", tuned.path)):
        heads = {(head.layer, head.head): {p: s for p, s, _ in head.closest} for head in look(folder, SENTENCE).heads}
        shares[name] = {f"{layer}-{head}": heads[layer, head][p] for (layer, head), p in GUIDED.items()}
    return {
        "sentence": SENTENCE,
        "share": shares,
        "steps": GUIDED_TUNING["steps"],
        "batch": GUIDED_TUNING["batch_size"],
    }


MEASURED: Mapping[str, Callable[[Models], dict[str, Any]]] = {
    "GAP": lambda m: coreference(m, ["coref-gap/gap-validation.tsv"]),
    "WinoBias": lambda m: coreference(
        m, [f"coref-winobias/{kind}_stereotyped_type1.txt.dev" for kind in ("pro", "anti")]
    ),
    "GUM": lambda m: coreference(m, ["coref-gum/ontogum"]),
    "LitBank": lambda m: coreference(m, ["coref-litbank/conll"]),
    "dependencies": dependencies,
    "reflexives": reflexives,
    "patterns": patterns,
    "sinks": sinks,
    "importance": importance,
    "distances": distances,
    "guided": guided,
}
"""What can be measured, by name."""


def matrix(probe: Artifact, figure: str) -> list[list[float]]:
    """A figure of every head, by layer and head."""
    rows = heads_of(probe)
    layers = sorted({row["layer"] for row in rows})
    return [[row[figure] for row in rows if row["layer"] == layer] for layer in layers]


def sst(store: Store) -> str:
    """Sentences with a sentiment; the development split serves as test, a tenth of training for validation."""
    return files(store, "cls-sst/stsa.binary.train", "cls-sst/stsa.binary.dev", format="label-text")


def tuned_on_sst(models: Models, *, random_init: bool = False, guided: bool = False) -> Artifact:
    """The model after it was fine-tuned on SST.

    Args:
        random_init: from new weights.
        guided: for fewer steps, with a loss on the heads of `GUIDED`.
    """
    config: dict[str, Any] = {**(GUIDED_TUNING if guided else TUNING), "init": str(models.trained)}
    if guided:
        rows = (
            Guide(p, "attention_loss", layers=(layer,), heads=(head,), distance="kl", weight=30.0)
            for (layer, head), p in GUIDED.items()
        )
        config["plan"] = plan_file(Plan(tuple(rows)), models.store)
    settings = finetune.Config(random_init=random_init, **config)
    made = finetune.run(sst(models.store), settings, store=models.store)
    assert made is not None
    return made.artifact
