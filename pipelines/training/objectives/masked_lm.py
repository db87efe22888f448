"""The objective ``mlm``: masked language modelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Evaluation, Objective, has_head
from pipelines.training.plan_checks import GENERATOR_CARD, check_generator_guides
from pipelines.training.settings import Filling, MaskedEvaluation, Masking, WordEvaluation

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training.learner import Given, Learner


def _check_plan(plan: Plan, config: Any, source: str) -> None:
    check_generator_guides(plan, config, source)


def _prepare(given: Given) -> Learner:
    from pipelines.training.learners import masked_lm

    return masked_lm.prepare(given, OBJECTIVE)


def _evaluate(*given: Any) -> None:
    from pipelines.training.learners.masked_scores import evaluate_words

    evaluate_words(*given)


OBJECTIVE = Objective(
    name="mlm",
    learns="masked words",
    needs="mlm predicts masked words, in any sequences.",
    families=("modernbert", "roberta", "bert", "electra"),
    card=Card("masked language model", "fill-mask", "AutoModelForMaskedLM", GENERATOR_CARD),
    prepare=_prepare,
    check_plan=_check_plan,
    settings=(Masking, Filling),
    examples=(
        "guide pretrain wiki-128 --plan preset:neighbours --size mini --steps 5000",
        "guide pretrain wiki-512 --architecture roberta --plan preset:ag --size base --epochs 10 --weight-decay 0   # as paper A",
        "guide pretrain wiki-128 --masks wiki-masks --plan preset:roles --size small",
        "guide pretrain wiki-128 --cooccur wiki-pairs --plan preset:mcmisp-bert --size base",
        "guide pretrain wiki-128-of-bert --init ./bert-base --plan preset:asa-pretraining --batch-size 128 --steps 20000   # batch and steps of paper D",
        "guide pretrain wiki-128 --plan preset:random-mask-scheduled --masking-run an-asa-run --size small",
    ),
    evaluation=Evaluation(
        "masked-lm",
        lambda config, data: has_head(config, "ForMaskedLM"),
        _evaluate,
        (MaskedEvaluation, WordEvaluation),
        needs_corpus=False,
        floors="sequences",
    ),
)
