"""The task ``classification``: one label for each text, or for each pair of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.labels import are_numbers
from pipelines.training.models import WORD_MODELS
from pipelines.training.objective import Card, Evaluation, Task, classifies, predicts_a_value
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


class Settings(Config):
    """Settings of tasks with classes."""

    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Weights of the classes in the loss; with balanced every class weighs the same."
    )


def _fits(counts: Mapping[str, Any]) -> bool:
    return not are_numbers(counts)


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import classification

    return classification.prepare(given, TASK, classification.Classes)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "examples" and classifies(config) and not predicts_a_value(config)


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.classification import Classes
    from pipelines.training.learners.task_scores import evaluate

    evaluate(run, folder, model, handle, TASK, Classes)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.classification import Classes
    from pipelines.training.learners.task_scores import answers

    return answers(run, model, handle, TASK, Classes)


def _head() -> Any:
    from pipelines.training.learners.classification import Classes

    return Classes


TASK = Task(
    name="classification",
    learns="a label for each text or pair",
    needs="classification and regression learn from the labelled texts that `guide build-dataset` reads.",
    families=("bert", "roberta", "electra", "modernbert", *WORD_MODELS),
    card=Card("text classifier", "text-classification", "AutoModelForSequenceClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    settings=(Settings,),
    needs_mask_token=False,
    examples=(
        "guide finetune reviews --init my-model",
        "guide finetune reviews --init ./bert-base --plan preset:asa --learning-rate 2e-5 --warmup-fraction 0.06",
        "guide finetune trec --architecture role-transformer --layers 2 --hidden 96 --heads 6 --ffn 256 --plan preset:roles --parser spacy:en_core_web_sm --learning-rate 1e-3 --epochs 30 --patience 5",
    ),
    evaluation=Evaluation("classification", _is_for, _evaluate, auto_class="AutoModelForSequenceClassification"),
    columns=("text",),
    shape="examples",
    fits=_fits,
    metrics=("accuracy", "f1_macro", "f1", "matthews"),
    answers=_answers,
    head=_head,
)
