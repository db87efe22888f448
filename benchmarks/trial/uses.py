"""What models are good for: their scores in tasks, after fine-tuning, and in a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import PARSER, shared_data
from benchmarks.finetuning.data import files
from benchmarks.finetuning.runs import tuned_runs
from benchmarks.finetuning.tables import SENTENCES
from benchmarks.trial.runs import Run
from pipelines.stages import probe_induction, probe_pairs
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.storage.store import Store


@dataclass(frozen=True)
class Task:
    """A data set to fine-tune on.

    Attributes:
        files: arguments of `benchmarks.finetuning.data.files`.
        metric: of its test split.
    """

    files: Sequence[Any]
    reading: Mapping[str, Any]
    metric: str
    settings: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 2})


HAUSA = "ner-masakhaner/hau"
TASKS = {
    "SST": Task(("cls-sst/stsa.binary.train", "cls-sst/stsa.binary.dev", 4000), {"format": "label-text"}, "accuracy"),
    "TREC": Task(("cls-trec/TREC.train.all", "cls-trec/TREC.test.all"), SENTENCES, "accuracy", {"epochs": 3}),
    "NER in Hausa": Task((f"{HAUSA}/train.txt", f"{HAUSA}/test.txt"), {"format": "conll"}, "f1", {"epochs": 4}),
}
TUNED_ALIKE: Mapping[str, Any] = {"batch_size": 32, "max_length": 64, "bucket": True}
TASK_RATES, TASK_SEEDS = (3e-4, 1e-3), 3
BLIMP_PAIRS = 300
"""Pairs of each of the nine paradigms."""


@dataclass(frozen=True)
class Use:
    """A score of a model.

    Attributes:
        task: a name of `TASKS`, ``BLiMP``, or ``induction``.
        model: the run that makes the model.
    """

    phase: str
    label: str
    seed: int
    task: str
    model: Run

    @property
    def key(self) -> str:
        """A digest of all that decides its figures."""
        about: list[Any] = [self.task, self.model.key]
        if self.task == "BLiMP":
            return digest([*about, BLIMP_PAIRS])[:16]
        if self.task == "induction":
            return digest(about)[:16]
        task = TASKS[self.task]
        settings = {**TUNED_ALIKE, **task.settings}
        return digest([*about, list(task.files), dict(task.reading), settings, list(TASK_RATES), TASK_SEEDS])[:16]


def scores_of(use: Use, made: Artifact, store: Store) -> list[float]:
    """The scores of a model: for a task one for each seed of fine-tuning, with the rate of the best validation; for ``induction``
    the highest score of a head at each snapshot and at the end."""
    model = made.reference
    if use.task == "induction":
        weights = [str(made.path / f"snapshots/step-{step}") for step in use.model.settings["snapshots"]]
        return [
            float(
                probe_induction.run(each, probe_induction.Config(), store=store).artifact.counts["best"]["induction"][
                    "induction"
                ]
            )
            for each in (*weights, model)
        ]
    if use.task == "BLiMP":
        pairs = sorted(map(str, shared_data("probe-blimp").glob("*.jsonl.gz")))
        made = probe_pairs.run(model, pairs, probe_pairs.Config(limit=BLIMP_PAIRS), store=store)
        return [float(made.artifact.counts["accuracy"])]
    task = TASKS[use.task]
    data = files(store, *task.files, **task.reading)
    settings = {**TUNED_ALIKE, **task.settings, "init": model}
    if use.model.reads_words:
        settings["parser"] = PARSER
    if use.model.reads_counts:
        settings["cooccur"] = store.load_input(made, "cooccur").reference
    runs = tuned_runs(data, settings, TASK_RATES, TASK_SEEDS, store)
    return [row[f"test/{task.metric}"] for row in runs]
