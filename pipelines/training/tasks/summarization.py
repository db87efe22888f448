"""The task ``summarization``: which sentences of a document make its summary (BERTSum)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Evaluation, Task, has_head
from pipelines.training.plan_checks import check_task_guides

if TYPE_CHECKING:
    from pipelines.training.learner import Given, Learner


def _fits(counts: Mapping[str, Any]) -> bool:
    return True


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import binary

    return binary.prepare(given, TASK, binary.Sentences)


def _is_for(config: Any, data: Any) -> bool:
    return data.counts.get("shape") == "summaries" and has_head(config, "ForTokenClassification")


def _evaluate(run: Any, folder: Any, model: Any, handle: Any) -> None:
    from pipelines.training.learners.document_scores import evaluate_summarization

    evaluate_summarization(run, model, handle, TASK)


def _answers(run: Any, model: Any, handle: Any) -> Iterator[dict[str, Any]]:
    from pipelines.training.learners.document_scores import summaries

    return summaries(run, model, handle, TASK)


def _head() -> Any:
    from pipelines.training.learners.binary import Sentences

    return Sentences


TASK = Task(
    name="summarization",
    learns="the sentences that make a summary",
    needs="summarization learns from documents with reference summaries.",
    families=("bert", "roberta", "electra", "modernbert"),
    card=Card("extractive summariser", "token-classification", "AutoModelForTokenClassification"),
    prepare=_prepare,
    check_plan=check_task_guides,
    needs_mask_token=False,
    examples=("guide finetune papers --init my-model --max-length 512 --plan preset:patterns",),
    evaluation=Evaluation("summarization", _is_for, _evaluate, auto_class="AutoModelForTokenClassification"),
    columns=("text", "segment"),
    shape="summaries",
    fits=_fits,
    metrics=("oracle_f1",),
    answers=_answers,
    head=_head,
    output="in_summary",
)
