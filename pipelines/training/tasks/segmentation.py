"""The task ``segmentation``: where the sections of a document end (cross-segment BERT)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Card, Evaluation, Task, has_head
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


class Settings(Config):
    """Settings of segmentation."""

    negatives: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the places without a boundary that training uses, drawn by --seed; validation has all.",
    )


def _fits(counts: Mapping[str, Any]) -> bool:
    return True


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import binary

    return binary.prepare(given, TASK, binary.Boundaries)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "segments" and has_head(config, "ForSequenceClassification")


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.document_scores import evaluate_segmentation

    evaluate_segmentation(run, model, handle, TASK)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.document_scores import sections

    return sections(run, model, handle, TASK)


def _head() -> Any:
    from pipelines.training.learners.binary import Boundaries

    return Boundaries


TASK = Task(
    name="segmentation",
    learns="where the sections of a document end",
    needs="segmentation learns from documents in sections.",
    families=("bert", "roberta", "electra", "modernbert"),
    card=Card("topic segmenter", "text-classification", "AutoModelForSequenceClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    needs_mask_token=False,
    examples=(
        "guide finetune topics --init my-model --max-length 258 --learning-rate 1e-5 --batch-size 64 --select f1",
    ),
    evaluation=Evaluation("segmentation", _is_for, _evaluate, auto_class="AutoModelForSequenceClassification"),
    settings=(Settings,),
    columns=("text", "segment"),
    shape="segments",
    fits=_fits,
    metrics=("f1", "precision", "recall"),
    answers=_answers,
    head=_head,
    output="section_ends",
)
