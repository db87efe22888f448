"""How a run of the trial is made, and where its figures are kept."""

from __future__ import annotations

import fcntl
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import PARSER, shared_data
from benchmarks.finetuning.data import plan_file
from benchmarks.trial.runs import COMMON, Results, Row, Run
from benchmarks.trial.uses import Use, scores_of
from pipelines.stages import cooccurrence, corpus, dependencies, floors, idf, masks, pretrain, sequences, tokenizer
from pipelines.storage.artifacts import Artifact
from pipelines.storage.store import Store
from pipelines.training.learners import masked_lm
from pipelines.views.curves import Curve
from pipelines.views.timing import step_seconds

WINDOW = 50
POINTS = 120
"""Number of points to keep of each curve."""


# inputs


def packed(store: Store, part: str, length: int = 64, **reading: Any) -> tuple[str, str, str]:
    """References of a corpus, a byte-level BPE of 4,000 tokens, and packed sequences."""
    text = corpus.run([str(shared_data(part))], corpus.Config(**reading), store=store).reference
    bpe = tokenizer.run(text, tokenizer.Config(vocab_size=4000), store=store).reference
    return text, bpe, sequences.run(text, bpe, sequences.Config(max_length=length), store=store).reference


def books(store: Store) -> tuple[str, str, str]:
    """26 English novels."""
    return packed(store, "lm-litbank-books/books")


SEQUENCES = {
    "books": lambda store: books(store)[2],
    "novels, 256 tokens": lambda store: packed(store, "lm-litbank-books/books", 256)[2],
    "oromo": lambda store: packed(store, "cls-masakhanews/orm/train.tsv.gz", quoting=True)[2],
    "hausa": lambda store: packed(store, "lm-masakhane-text/hausa.txt.gz", sentences="line")[2],
}


def inputs_of(run: Run, store: Store) -> tuple[str, dict[str, Any]]:
    """The sequences of a run, and the artifacts that its plan needs."""
    if run.data != "books":
        return SEQUENCES[run.data](store), {}
    text, bpe, reference = books(store)
    more: dict[str, Any] = {}
    if run.reads_words:
        rarity = idf.run(text, None, idf.Config(), store=store)
        trees = dependencies.run(text, dependencies.Config(parser=PARSER), store=store)
        assert rarity is not None and trees is not None
        config = masks.Config(idf=rarity.reference, deps=trees.reference)
        made = masks.run(reference, config, store=store)
        assert made is not None
        more["masks"] = made.reference
    if run.reads_counts:
        counts = cooccurrence.run(text, bpe, cooccurrence.Config(), store=store)
        assert counts is not None
        more["cooccur"] = counts.reference
    return reference, more


# training


class Neighbours(nn.Module):
    """A learned sum of each token with its two neighbours, at first the token itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Conv1d(width, width, 3, padding=1, groups=width)
        nn.init.zeros_(self.weights.weight)
        nn.init.zeros_(self.weights.bias)  # type: ignore[arg-type]

    def forward(self, states_BTD: Tensor) -> Tensor:
        found: Tensor = states_BTD + self.weights(states_BTD.transpose(1, 2)).transpose(1, 2)
        return found


@contextmanager
def convolutions() -> Iterator[None]:
    """Models that are built meanwhile have a convolution before each of their two lowest layers."""
    build = masked_lm.build_model

    def built(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for layer in model.model.layers[:2]:
            layer.neighbours = Neighbours(model.config.hidden_size)
            layer.register_forward_pre_hook(lambda module, args: (module.neighbours(args[0]), *args[1:]))
        return model

    masked_lm.build_model = built
    try:
        yield
    finally:
        masked_lm.build_model = build


def train(run: Run, store: Store) -> Artifact:
    """The model of a run."""
    reference, more = inputs_of(run, store)
    settings = {**COMMON, **more, **run.settings, "seed": run.seed, "steps": run.steps}
    if run.plan:
        settings["plan"] = plan_file(run.plan, store)
    if run.convolution:
        # the recipe of the stage does not know of the convolution, so its models have a place of their own
        beside = Store(store.root / "convolution")
        inputs_of(run, beside)
        with convolutions():
            made = pretrain.run(reference, pretrain.Config(**settings), store=beside)
    else:
        made = pretrain.run(reference, pretrain.Config(**settings), store=store)
    assert made is not None
    return made.artifact


def figures_of(run: Run, made: Artifact) -> dict[str, Any]:
    """The figures of a run, for the JSON."""
    curve = Curve.of(made, run.label)
    smooth = curve.smoothed(WINDOW)
    shown = np.unique(np.linspace(0, len(smooth) - 1, POINTS).astype(int))
    return {
        "phase": run.phase,
        "label": run.label,
        "seed": run.seed,
        "steps": run.steps,
        "key": run.key,
        "settings": dict(run.settings),
        "plan": run.plan.dumps() if run.plan else "",
        "parameters": made.counts["parameters"],
        "loss": float(smooth[-1]),
        "average": float(np.mean(curve.losses)),
        "valid": [[int(step), float(value)] for step, value in curve.valid],
        "seconds": float(curve.elapsed()[-1]),
        "curve": [[int(step) + 1, float(smooth[step])] for step in shown],
    }


# figures


def row_of(run: Run | Use, store: Store) -> dict[str, Any]:
    """The figures of a run, for the JSON."""
    if isinstance(run, Run):
        return figures_of(run, train(run, store))
    scores = scores_of(run, train(run.model, store), store)
    return {"phase": run.phase, "label": run.label, "seed": run.seed, "key": run.key, "scores": scores}


def add(path: Path, *rows: Row, **about: Any) -> None:
    """Add figures of runs, or others, to the JSON, to which several processes may write."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        known = _known(path)
        found = {**known, **machine, "common": dict(COMMON), **about, "rows": [*known.get("rows", []), *rows]}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)  # others read meanwhile


def read(path: Path) -> Results:
    """The figures that are known."""
    return Results(_known(path).get("rows", []))


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def floors_of(path: Path, results: Results, store: Store) -> dict[str, dict[str, float]]:
    """The n-gram floors of each text that was learned; those that the JSON lacks are computed and added."""
    nats: dict[str, dict[str, float]] = _known(path).get("floors", {})
    for text in sorted({text_of(row["phase"]) for row in results.rows} - nats.keys()):
        limit = pretrain.Config.model_fields["valid_sequences"].default
        config = floors.Config(limit=limit, layout="causal" if text == "novels, 256 tokens" else "sequences")
        nats[text] = dict(floors.run(SEQUENCES[text](store), config, store=store).artifact.counts["nats"])
        add(path, floors=nats)
    return nats


def text_of(phase: str) -> str:
    """The text that a phase learns."""
    if phase.startswith("causal"):
        return "novels, 256 tokens"
    return next((text for text in ("oromo", "hausa") if text in phase), "books")


def costs_of(path: Path, runs: Mapping[str, Run], store: Store) -> dict[str, float]:
    """How long a step takes with each plan, over one without guides; timed and added if the JSON lacks it.

    Args:
        runs: a run of each plan by label; ``none`` is the one without guides.
    """
    costs: dict[str, float] = _known(path).get("costs", {})
    if missing := [label for label in runs if label not in costs and label != "none"]:
        short = {label: train(replace(runs[label], steps=4), store).reference for label in ("none", *missing)}
        seconds = step_seconds(list(short.values()), store)
        costs |= {label: seconds[short[label]] / seconds[short["none"]] for label in missing}
        add(path, costs=costs)
    return costs


def train_all(runs: Sequence[Run | Use], path: Path, store: Store) -> None:
    """Train the runs whose figures are not in the JSON; several processes may share them."""
    store.root.mkdir(parents=True, exist_ok=True)
    while pending := [run for run in runs if not _is_known(run, path)]:
        for run in pending:
            with open(store.root / f"{run.key}.lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another process trains it
                    continue
                if _is_known(run, path):
                    continue
                row = row_of(run, store)
                add(path, row)
            figures = ", ".join(f"{value:.3f} at {step:,}" for step, value in row.get("valid", ()))
            figures = figures or ", ".join(f"{score:.3f}" for score in row["scores"])
            print(f"{run.phase}: {run.label}, seed {run.seed}: {figures}", flush=True)
        time.sleep(2)


def _is_known(run: Run | Use, path: Path) -> bool:
    """Whether the figures of a run are in the JSON.

    Raises:
        SystemExit: they are, with other settings.
    """
    mine = (run.phase, run.label, run.seed)
    old = next((row for row in read(path).rows if (row["phase"], row["label"], row["seed"]) == mine), None)
    if old is not None and old["key"] != run.key:
        raise SystemExit(f"{path}: {run.phase}, {run.label} was trained with other settings; remove its entry")
    return old is not None
