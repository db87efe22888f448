"""The objective ``mlm``: masked language modelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Objective, has_head
from pipelines.training.plan_checks import GENERATOR_CARD, check_generator_guides
from pipelines.training.settings import Filling, MaskedEvaluation, Masking, WordEvaluation

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.plan import Plan
    from pipelines.engine.stage import Run
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Learner, Setup


class MaskedLanguageModelling(Objective):
    """Masked language modelling, with or without a generator that fills in what is masked."""

    name = "mlm"
    learns = "masked words"
    needs = "mlm predicts masked words, in any sequences."
    families = ("modernbert", "roberta", "bert", "electra")
    card = Card("masked language model", "fill-mask", "AutoModelForMaskedLM", GENERATOR_CARD)
    settings = (Masking, Filling)
    examples = (
        "guide pretrain wiki-128 --plan preset:neighbours --size mini --steps 5000",
        "guide pretrain wiki-512 --architecture roberta --plan preset:ag --size base --epochs 10 --weight-decay 0   # as paper A",
        "guide pretrain wiki-128 --masks wiki-masks --plan preset:roles --size small",
        "guide pretrain wiki-128 --cooccur wiki-pairs --plan preset:mcmisp-bert --size base",
        "guide pretrain wiki-128-of-bert --init ./bert-base --plan preset:asa-pretraining --batch-size 128 --steps 20000   # batch and steps of paper D",
        "guide pretrain wiki-128 --plan preset:random-mask-scheduled --masking-run an-asa-run --size small",
    )
    measured_as = "masked-lm"
    evaluation_settings = (MaskedEvaluation, WordEvaluation)
    floors = "sequences"

    @classmethod
    def check_plan(cls, plan: Plan, config: Any, source: str) -> None:
        check_generator_guides(plan, config, source)

    @classmethod
    def prepare(cls, setup: Setup) -> Learner:
        from pipelines.training.learners import masked_lm

        return masked_lm.prepare(setup, cls)

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        return has_head(config, "ForMaskedLM")

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        from pipelines.training.learners.masked_scores import evaluate_words

        evaluate_words(run, folder, model, handle)
