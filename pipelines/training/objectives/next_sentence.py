"""The objective ``mlm+nsp``: masked language modelling of two texts, and whether the second follows the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Evaluation, Objective, has_head
from pipelines.training.plan_checks import refuse_guides
from pipelines.training.settings import MaskedEvaluation, Masking, WordEvaluation

if TYPE_CHECKING:
    from guidance.plan import Guide, Plan
    from pipelines.training.learner import Given, Learner


def _check_plan(plan: Plan, config: Any, source: str) -> None:
    refuse_guides(plan, source, _refusal)


def _refusal(guide: Guide) -> str:
    """Why a guide cannot work with pairs of texts; empty if it can."""
    from guidance.patterns.features import Vocabulary

    if guide.part != "model":
        return f"it is for a {guide.part}, and mlm+nsp trains one model"
    if guide.makes("row_losses"):
        return f"{guide.mechanism} acts where a generator mis-predicts, and mlm+nsp has none"
    known = {*Vocabulary.FEATURES, "segment"}
    if guide.bound_pattern and (unknown := [need for need in guide.bound_pattern.needs if need not in known]):
        return f"it needs {', '.join(unknown)}, which are known for whole sequences and not for the pairs that mlm+nsp makes"
    return ""


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import next_sentence

    return next_sentence.prepare(given, OBJECTIVE)


def _evaluate(*given: Any) -> None:
    from pipelines.training.learners.masked_scores import evaluate_pairs

    evaluate_pairs(*given)


OBJECTIVE = Objective(
    name="mlm+nsp",
    learns="masked words and whether two texts follow each other",
    needs="mlm+nsp (a BERT) also predicts whether the second of two texts follows the first; it needs a corpus with at least "
    "two documents of at least two sentences each.",
    families=("bert",),
    card=Card("masked language model that predicts next sentences", "fill-mask", "AutoModelForPreTraining"),
    prepare=_prepare,
    check_plan=_check_plan,
    settings=(Masking,),
    examples=("guide pretrain wiki-128 --objective mlm+nsp --epochs 40",),
    evaluation=Evaluation(
        "masked-lm-nsp",
        lambda config, data: has_head(config, "BertForPreTraining"),
        _evaluate,
        (MaskedEvaluation, WordEvaluation),
        needs_corpus=False,
        floors="pairs",
    ),
)
