"""The task ``segmentation``: where the sections of a document end (cross-segment BERT)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from guidance.errors import counted
from guidance.tasks.scores import Agreement
from pipelines.engine.stage import Config
from pipelines.lazy import np, pa
from pipelines.training.objective import Card
from pipelines.training.task import Batch, Prediction, YesNoTask, scores_of_yes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipelines.engine.stage import Run
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.metrics.significance import Statistic
    from pipelines.training.batches import Examples


class Settings(Config):
    """Settings of segmentation."""

    negatives: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the places without a boundary that training uses, drawn by --seed; validation has all.",
    )


class Segmentation(YesNoTask):
    """Says of the boundary between two sentences whether a section ends there, from the state of ``[CLS]``.

    Source: Lukasik et al. 2020, cross-segment BERT.
    """

    name = "segmentation"
    learns = "where the sections of a document end"
    needs = "segmentation learns from documents in sections."
    card = Card("topic segmenter", "text-classification", "AutoModelForSequenceClassification")
    settings = (Settings,)
    examples = (
        "guide finetune topics --init my-model --max-length 258 --learning-rate 1e-5 --batch-size 64 --select f1",
    )
    columns = ("text", "segment")
    shape = "segments"
    selectable = ("f1", "precision", "recall")
    output = "section_ends"

    @classmethod
    def one_answer(cls, answers: set[str]) -> str:
        if "1" in answers:
            return "every sentence of the training documents is a section of its own"
        return "no training document has a boundary between sections"

    def kept(self, rows: Examples, config: Any) -> np.ndarray | None:
        """All boundaries, and the share of the other examples that ``negatives`` says."""
        if config.negatives == 1:
            return None
        drawn = np.random.default_rng(config.seed).random(len(rows)) < config.negatives
        return np.flatnonzero(drawn | (rows.labels == "1"))

    def judged_together(self, rows: Examples, number: int) -> int:
        """The boundaries of the documents that end within the first ``number``, or else of the first document, since Pk and
        WindowDiff score whole documents."""
        ends = np.append(np.flatnonzero(np.diff(rows.numbers)) + 1, len(rows))
        whole = int(np.searchsorted(ends, number, side="right"))
        return int(ends[max(0, whole - 1)])

    def outputs(self, logits: Tensor, batch: Batch) -> Tensor:
        from guidance.objectives.replaced_token import two_classes

        return two_classes(logits[:, 0])

    def targets(self, batch: Batch) -> list[int]:
        return [int(label or "0") for label in batch.labels]

    def predictions(self, outputs: Tensor, batch: Batch) -> list[Prediction]:
        return [
            Prediction(number, label, str(int(score > 0.5)), [score])
            for number, label, score in zip(batch.numbers, batch.labels, scores_of_yes(outputs), strict=True)
        ]

    def metrics(self, predictions: Sequence[Prediction]) -> dict[str, float | None]:
        """Precision, recall and F1 of boundaries, all documents together, and the means of Pk and WindowDiff over documents.

        A document with no more sentences than its window has no Pk; `report` counts such documents.
        """
        from guidance.tasks.segments import pk, window_diff

        if not predictions:
            return {}
        agreed = Agreement.on("1", [p.gold for p in predictions], [p.prediction for p in predictions])
        metrics: dict[str, float | None] = {**agreed.scores()}
        for name, measure in (("pk", pk), ("window_diff", window_diff)):
            values = [measure(*ends) for ends in documents_of(predictions)]
            if defined := [value for value in values if value is not None]:
                metrics[name] = math.fsum(defined) / len(defined)
        return metrics

    def report(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """How many documents there are, and how many of them are too short for a window."""
        from guidance.tasks.segments import pk

        documents = documents_of(predictions)
        short = sum(pk(*ends) is None for ends in documents)
        return {"documents": len(documents), "documents_without_pk": short}

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        """Precision, recall and F1 of the boundaries, Pk and WindowDiff."""
        from guidance.tasks.segments import window_size
        from pipelines.training.learners import task_scores
        from pipelines.training.metrics_files import write_metrics

        task, data = cls(), run.inputs["sequences"]
        predictions, tokens = task_scores.predict(run, model, handle, task)
        limit, all_boundaries = run.config.limit, int(data.files[f"{run.config.split}.parquet"]["rows"])
        if limit and len(predictions) not in (limit, all_boundaries):
            boundaries = counted(len(predictions), "boundary", "boundaries")
            run.warn(f"--limit {limit} ends within a document: {boundaries} of whole documents are evaluated")
        sentences = [number for (number,) in task_scores.sentences_of(run)[: len(predictions)]]
        sources = task_scores.write_predictions(
            run, predictions, tokens, list(zip(boundary_fields(), [sentences], strict=True))
        )
        counts = {
            "examples": len(predictions),
            **task.report(predictions),
            **task_scores.seen_in_training(run, predictions),
        }
        windows = [window_size(ends) for ends, _ in documents_of(predictions)]
        windowed = "mean over documents; k = half the mean section of the reference, rounded, at least 2; N - k windows"
        about = {
            **dict.fromkeys(("precision", "recall", "f1"), "boundaries of all documents together, at a score over 0.5"),
            **dict.fromkeys(("pk", "window_diff"), windowed),
            "k": f"{min(windows)} to {max(windows)}",
        }
        if data.counts.get("sharing_test_documents") and run.config.split == "test":
            counts["sharing_test_documents"] = data.counts["sharing_test_documents"]
            shared = counted(counts["sharing_test_documents"], "test document shares", "test documents share")
            run.warn(f"contaminated: {shared} a sentence with a training document")
        more = task_scores.sparsity(run, model, handle, task)
        slices = task_scores.slices(task, predictions, {"source": sources})
        write_metrics(run, cls.name, task.metrics(predictions), about, counts, **more, slices=slices)

    @classmethod
    def answers(cls, run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
        """For each document of a split its sections, as lists of sentences, and for each sentence but the last the score of a
        boundary behind it."""
        from pipelines.text.document_sequences import texts_of
        from pipelines.training.learners.task_scores import documents, predict

        predictions, _ = predict(run, model, handle, cls())
        ids, _ = documents(run.inputs["corpus"])
        behind: dict[int, list[float]] = {}
        for prediction in predictions:
            behind.setdefault(prediction.number, []).append(prediction.scores[0])
        for text in texts_of(run.inputs["corpus"]):
            scores = behind.get(text.number, [])
            if len(scores) < len(text.sentences) - 1:
                continue  # beyond --limit
            starts = [0, *(number for number, score in enumerate(scores, 1) if score > 0.5), len(text.sentences)]
            sections = [text.sentences[start:end] for start, end in itertools.pairwise(starts)]
            yield {"id": ids[text.number], "sections": sections, "scores": scores}

    @classmethod
    def compare(cls, one: Table, other: Table) -> list[Compared]:
        """F1, precision and recall of boundaries, Pk and WindowDiff; documents are drawn, since boundaries of one depend on each
        other."""
        from pipelines.metrics.comparison import compare_statistics

        both = zip(_of_documents(one), _of_documents(other), strict=True)
        return [
            compared
            for (first, size), (second, _) in both
            for compared in compare_statistics({name: (first[name], second[name]) for name in first}, size, "documents")
        ]

    @classmethod
    def compare_sets(cls, one: Table, other: Table) -> list[Compared]:
        from pipelines.metrics.comparison import compare_unpaired

        both = zip(_of_documents(one), _of_documents(other), strict=True)
        return [
            compared
            for sides in both
            if sides[0][1] and sides[1][1]
            for compared in compare_unpaired(*sides, "documents")
        ]


def _of_documents(table: Table) -> list[tuple[dict[str, Statistic], int]]:
    """Metrics as functions of chosen documents, and how many documents there are: those of boundaries, of all documents; those of
    windows, of the documents that have more sentences than their window."""
    from guidance.tasks.segments import pk, window_diff
    from pipelines.metrics.comparison import mean_of, of_agreements

    numbers = np.cumsum(np.diff(table["sentence"], prepend=0) <= 0).tolist()
    rows = zip(numbers, table["gold"], table["prediction"], strict=True)
    documents = documents_of([Prediction(number, gold, prediction, []) for number, gold, prediction in rows])
    # the last sentence always ends a section
    agreements = [Agreement.on(True, gold[:-1], predicted[:-1]) for gold, predicted in documents]
    defined = [ends for ends in documents if pk(*ends) is not None]
    windows: dict[str, Statistic] = {}
    for name, measure in (("pk", pk), ("window_diff", window_diff)) if defined else ():
        windows[name] = mean_of([measure(*ends) or 0.0 for ends in defined])
    return [({**of_agreements(agreements)}, len(documents)), (windows, len(defined))]


def documents_of(predictions: Sequence[Prediction]) -> list[tuple[list[bool], list[bool]]]:
    """For each document, of each of its sentences whether a section ends there: as it is, and as predicted."""
    documents: list[tuple[list[bool], list[bool]]] = []
    for _, own in itertools.groupby(predictions, key=lambda prediction: prediction.number):
        answers = [(p.gold == "1", p.prediction == "1") for p in own]
        # the last sentence has no row; it always ends a section
        documents.append(([*(gold for gold, _ in answers), True], [*(guess for _, guess in answers), True]))
    return documents


def boundary_fields() -> list[pa.Field]:
    """Further columns of ``predictions.parquet`` of sections."""
    unit = "running number in the document of the one before the boundary"
    return [pa.field("sentence", pa.int32(), False, {"unit": unit})]
