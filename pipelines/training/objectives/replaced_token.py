"""The objective ``electra``: a generator fills in masked tokens, and a discriminator finds those that were replaced."""

from __future__ import annotations

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Card, Objective
from pipelines.training.plan_checks import GENERATOR_CARD
from pipelines.training.settings import Filling, MaskedEvaluation, Masking, Packing


class Settings(Config):
    """Settings of electra alone."""

    discriminator_weight: float = Field(
        50.0,
        ge=0,
        description="Factor of the discriminator's loss in electra; 50 suits the loss of a transformer generator beside it.",
    )


class ReplacedTokenDetection(Objective):
    """ELECTRA: a generator fills in masked tokens, and the model finds those that are not the original ones."""

    name = "electra"
    learns = "which words a generator replaced"
    source = "Clark et al. 2020, section 2"
    needs = "electra predicts which words a small generator has replaced."
    families = ("electra",)
    card = Card("discriminator of replaced tokens", "feature-extraction", "AutoModelForPreTraining", GENERATOR_CARD)
    trains_generator = True
    settings = (Masking, Filling, Packing, Settings)
    examples = (
        "guide pretrain wiki-512 --objective electra --plan preset:mcmisp --cooccur wiki-pairs --size base --batch-size 256 --steps 1000000 --warmup-steps 10000 --beta2 0.98 --epsilon 1e-6   # as paper C",
        "guide pretrain wiki-128 --objective electra --generator unigram --plan preset:ag --size base",
    )
    learner = "pipelines.training.learners.replaced_token:prepare"
    measured_as = "replaced-tokens"
    head = "ElectraForPreTraining"
    evaluation = "pipelines.training.learners.masked_scores:evaluate_discriminator"
    evaluation_settings = (MaskedEvaluation,)
