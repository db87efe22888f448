"""The task ``choice``: which of several choices is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Evaluation, Task, classifies, predicts_a_value
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import choice

    return choice.prepare(given, TASK)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "choices" and classifies(config) and predicts_a_value(config)


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.choice import Choices
    from pipelines.training.learners.task_scores import evaluate

    evaluate(run, folder, model, handle, TASK, Choices)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.choice import Choices
    from pipelines.training.learners.task_scores import answers

    return answers(run, model, handle, TASK, Choices)


def _head() -> Any:
    from pipelines.training.learners.choice import Choices

    return Choices


TASK = Task(
    name="choice",
    learns="which choice is right",
    needs="choice learns from multiple-choice questions (--format dream, hellaswag, arc, or --choices-column).",
    families=("bert", "roberta", "electra", "modernbert"),
    card=Card("multiple-choice model", "multiple-choice", "AutoModelForSequenceClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    needs_mask_token=False,
    examples=("guide finetune dream --init my-model --max-length 512 --plan preset:asa --epochs 6",),
    evaluation=Evaluation("choice", _is_for, _evaluate, auto_class="AutoModelForSequenceClassification"),
    columns=("text",),
    shape="choices",
    metrics=("accuracy",),
    answers=_answers,
    head=_head,
    output="right",
)
