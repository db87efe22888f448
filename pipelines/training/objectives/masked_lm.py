"""The objective ``mlm``: masked language modelling."""

from __future__ import annotations

from pipelines.training.objective import Card, Objective
from pipelines.training.plan_checks import GENERATOR_CARD
from pipelines.training.settings import (
    Filling,
    FloorEvaluation,
    MaskedEvaluation,
    Masking,
    Packing,
    PseudoEvaluation,
)


class MaskedLanguageModelling(Objective):
    """Masked language modelling, with or without a generator that fills in what is masked."""

    name = "mlm"
    learns = "masked words"
    source = "Devlin et al. 2019, section 3.1; Liu et al. 2019, section 4.1"
    needs = "mlm predicts masked words, in any sequences."
    families = ("modernbert", "roberta", "bert", "electra")
    card = Card("masked language model", "fill-mask", "AutoModelForMaskedLM", GENERATOR_CARD)
    settings = (Masking, Filling, Packing)
    examples = (
        "guide pretrain wiki-128 --plan preset:neighbours --size mini --steps 5000",
        "guide pretrain wiki-512 --architecture roberta --plan preset:ag --size base --epochs 10 --weight-decay 0   # as paper A",
        "guide pretrain wiki-128 --masks wiki-masks --plan preset:roles --size small",
        "guide pretrain wiki-128 --cooccur wiki-pairs --plan preset:mcmisp-bert --size base",
        "guide pretrain wiki-128-of-bert --init ./bert-base --plan preset:asa-pretraining --batch-size 128 --steps 20000   # batch and steps of paper D",
        "guide pretrain wiki-128 --plan preset:random-mask-scheduled --masking-run an-asa-run --size small",
    )
    learner = "pipelines.training.learners.masked_lm:prepare"
    measured_as = "masked-lm"
    head = "ForMaskedLM"
    evaluation = "pipelines.training.learners.masked_scores:evaluate_words"
    evaluation_settings = (MaskedEvaluation, FloorEvaluation, PseudoEvaluation)
    floors = "sequences"
