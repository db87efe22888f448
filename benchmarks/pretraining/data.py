"""The texts, as sequences, and the models that runs start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import published, shared
from pipelines.stages import corpus, pretrain, sequences, tokenizer
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
