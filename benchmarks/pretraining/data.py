"""The texts, as sequences, and the models that runs start from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from benchmarks import published, shared
from benchmarks.finetuning.data import plan_file
from guidance.guide import Guide
from guidance.plan import Plan
from pipelines.stages import cooccurrence, corpus, dataset, pretrain, sequences, tokenizer
from pipelines.storage.store import Store

Prepare = Callable[[Store], tuple[str, dict[str, Any]]]
"""Builds the sequences of a table; returns their reference and the settings that they require."""


SMALL = {
    "layers": 8,
    "hidden": 128,
    "heads": 4,
    "ffn": 512,
    "attention_dropout": 0.0,
    "steps": 600,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "evaluate_every": 300,
    "save_every": 100,
}


def packed(store: Store, part: str, length: int = 64, **reading: Any) -> tuple[str, str, str]:
    """References of a corpus, a byte-level BPE of 4,000 tokens, and packed sequences."""
    text = corpus.run([str(shared(f"data/{part}"))], corpus.Config(**reading), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
    return text, bpe, sequences.run(text, bpe, sequences.Config(max_length=length), store=store).reference


def books(store: Store) -> tuple[str, dict[str, Any]]:
    """26 English novels."""
    return packed(store, "lm-litbank-books/books")[2], {}


def counted_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels, and the co-occurrence of their tokens within sentences."""
    text, bpe, reference = packed(store, "lm-litbank-books/books")
    counts = cooccurrence.run(text, bpe, cooccurrence.Config(), store=store)
    assert counts is not None
    return reference, {"cooccur": counts.artifact.reference}


def generated_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels with co-occurrence, and an ELECTRA whose generator predicts: generator and discriminator start from one
    masked language model, in whose two lowest layers two heads were pulled to the neighbours."""
    reference, more = counted_books(store)
    keys = {"distance": "kl", "weight": 3.0, "reference_length": 512, "schedule": "linear"}
    guides = (
        Guide(pattern, "attention_loss", layers=("first 2",), heads=(head,), **keys)
        for head, pattern in enumerate(("next", "previous"))
    )
    config = {**SMALL, "architecture": "electra", "steps": 2000, "plan": plan_file(Plan(tuple(guides)), store)}
    learned = pretrain.run(reference, pretrain.Config(**config), store=store)
    assert learned is not None
    both = store.root / "starters" / learned.artifact.id
    for folder in (both, both / "generator"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(learned.artifact.path / name, folder)
    return reference, {**more, "init": str(both)}


def swahili(store: Store) -> tuple[str, dict[str, Any]]:
    """News in Swahili, with one sentence per line."""
    return packed(store, "lm-masakhane-text/swahili_voa.txt.gz", sentences="line")[2], {}


def oromo(store: Store) -> tuple[str, dict[str, Any]]:
    """News in Oromo: 1,128 articles."""
    return packed(store, "cls-masakhanews/orm/train.tsv.gz", quoting=True)[2], {}


def learned_books(store: Store) -> tuple[str, dict[str, Any]]:
    """The novels, and a plain ModernBERT that has learned more from them than pairs of tokens tell, so that its heads have
    something to attack.  Its settings are those with which plain training is best in `benchmarks.trial`."""
    reference = books(store)[0]
    tuned = {"architecture": "modernbert", "beta2": 0.98, "warmup_steps": 50, "steps": 1200}
    first = pretrain.run(reference, pretrain.Config(**{**SMALL, **tuned}), store=store)
    assert first is not None
    return reference, {"init": first.artifact.reference}


def of_published(part: str, **reading: Any) -> Prepare:
    """Sequences of a text for all-MiniLM-L6-v2, a published English model without a head for masked words; runs start from it."""

    def prepare(store: Store) -> tuple[str, dict[str, Any]]:
        init = str(published())
        text = corpus.run([str(shared(f"data/{part}"))], corpus.Config(**reading), store=store).reference
        return sequences.run(text, init, sequences.Config(max_length=64), store=store).reference, {"init": init}

    return prepare


def captions(store: Store) -> tuple[str, dict[str, Any]]:
    """Pairs of German and English captions, with a joint vocabulary of 8,000."""
    folder = shared("data/mt-multi30k")
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    sides = [{split: [str(folder / f"{name}.{side}.gz")] for split, name in names.items()} for side in ("de", "en")]
    pairs = dataset.run(sides[0], dataset.Config(sentences="line"), pairs=sides[1], store=store).reference
    bpe = tokenizer.run(pairs, tokenizer.Config(vocab_size=8000), store=store).reference
    config = sequences.Config(max_length=70, packing="pairs")
    return sequences.run(pairs, bpe, config, store=store).reference, {}
