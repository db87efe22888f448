"""The task ``tagging``: a tag for each word, such as named entities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Evaluation, Task, has_head
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import tagging

    return tagging.prepare(given, TASK)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "tags" and has_head(config, "ForTokenClassification")


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.tagging import Tags
    from pipelines.training.learners.task_scores import evaluate

    evaluate(run, folder, model, handle, TASK, Tags)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.tagging import Tags
    from pipelines.training.learners.task_scores import answers

    return answers(run, model, handle, TASK, Tags)


def _head() -> Any:
    from pipelines.training.learners.tagging import Tags

    return Tags


TASK = Task(
    name="tagging",
    learns="a tag for each word",
    needs="tagging learns from words in CoNLL columns (--format conll).",
    families=("bert", "roberta", "electra", "modernbert"),
    card=Card("token tagger", "token-classification", "AutoModelForTokenClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    needs_mask_token=False,
    examples=("guide finetune ner --init my-model --select f1 --epochs 10",),
    evaluation=Evaluation("tagging", _is_for, _evaluate, auto_class="AutoModelForTokenClassification"),
    columns=("text", "word"),
    shape="tags",
    metrics=("f1", "precision", "recall", "token_f1", "accuracy"),
    answers=_answers,
    head=_head,
)
