"""The task ``regression``: one number for each text, or for each pair of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipelines.training.labels import are_numbers
from pipelines.training.models import WORD_MODELS
from pipelines.training.objective import Card, Evaluation, Task, classifies, predicts_a_value
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import classification

    return classification.prepare(given, TASK, classification.Value)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "examples" and classifies(config) and predicts_a_value(config)


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.classification import Value
    from pipelines.training.learners.task_scores import evaluate

    evaluate(run, folder, model, handle, TASK, Value)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.classification import Value
    from pipelines.training.learners.task_scores import answers

    return answers(run, model, handle, TASK, Value)


def _head() -> Any:
    from pipelines.training.learners.classification import Value

    return Value


TASK = Task(
    name="regression",
    learns="a number for each text or pair",
    needs="",
    families=("bert", "roberta", "electra", "modernbert", *WORD_MODELS),
    card=Card("text regressor", "text-classification", "AutoModelForSequenceClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    needs_mask_token=False,
    examples=("guide finetune sts --init my-model --task regression --select spearman",),
    evaluation=Evaluation("regression", _is_for, _evaluate, auto_class="AutoModelForSequenceClassification"),
    columns=("text",),
    shape="examples",
    fits=are_numbers,
    metrics=("pearson", "spearman"),
    answers=_answers,
    head=_head,
    output="value",
)
