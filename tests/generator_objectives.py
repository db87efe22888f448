"""Objectives with a generator, on tiny examples, for tests of their internals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from guidance.patterns.features import Cooccurrence
from guidance.plan import Plan
from pipelines.training.batches import Examples
from pipelines.training.learner import Setup
from pipelines.training.objectives import OBJECTIVES
from tests import trainings

CONFLICT = '[[guide]]\npattern = "conflict"\nmechanism = "logit_loss"\nheads = [0]\n'


def tokenizer() -> Any:
    """The tokenizer of `tests.trainings`."""
    files = trainings.tokenizer_files()
    names = json.loads(files["special_tokens_map.json"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(files["tokenizer.json"].decode()), **names)


def table() -> Cooccurrence:
    """Scores of the ids 5 to 44; the others are not in the table."""
    rows_V = torch.full((64,), -1)
    rows_V[5:45] = torch.arange(40)
    return Cooccurrence(rows_V, torch.rand(40, 40, generator=torch.Generator().manual_seed(0)))


def examples(rows: list[list[int]]) -> Examples:
    return Examples(np.concatenate([np.array(row, np.uint16) for row in rows]), np.cumsum([0, *map(len, rows)]))


def objective(
    rows: list[list[int]] | None = None,
    plan: str = "",
    *,
    init: Any = None,
    valid: list[list[int]] | None = None,
    **changes: Any,
) -> Any:
    """The objective of a run of `tests.trainings`, in float64 and without dropout, so that only sums are rounded."""
    rows = rows or trainings.rows_of_ids(12, 16)
    config = trainings.config(**({"dropout": 0.0, "attention_dropout": 0.0} | changes))
    parsed = Plan.parse(plan)
    if plan:
        OBJECTIVES[config.objective].check_plan(parsed, config, "plan")
    sequences: Any = SimpleNamespace(manifest={"config": {"max_length": 16}}, reference="sequences/tiny")
    splits = examples(rows), examples(valid or rows)
    given = Setup(config, parsed, sequences, tokenizer(), *splits, {"cooccurrence": table()}, init)
    found: Any = OBJECTIVES[config.objective].prepare(given)
    found.begin(config.steps)
    found.model.double()
    return found


def passes(found: Any, places: list[tuple[int, int]], step: int = 0) -> tuple[Any, dict[str, float], dict[str, Any]]:
    """Run all passes over one batch; returns the batch, the denominators and the undivided losses."""
    batch = found.prepare(places)
    counts: dict[str, float] = {}
    losses: dict[str, Any] = {}
    for one in found.passes:
        counts |= one.counts(batch)
        losses |= one.losses(found.model, batch, step)
    assert set(losses) <= set(counts)
    return batch, counts, losses
