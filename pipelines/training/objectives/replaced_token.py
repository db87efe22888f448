"""The objective ``electra``: a generator fills in masked tokens, and a discriminator finds those that were replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Card, Objective, has_head
from pipelines.training.plan_checks import GENERATOR_CARD, check_generator_guides
from pipelines.training.settings import Filling, MaskedEvaluation, Masking

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.plan import Plan
    from pipelines.engine.stage import Run
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Learner, Setup


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
    needs = "electra predicts which words a small generator has replaced."
    families = ("electra",)
    card = Card("discriminator of replaced tokens", "feature-extraction", "AutoModelForPreTraining", GENERATOR_CARD)
    trains_generator = True
    settings = (Masking, Filling, Settings)
    examples = (
        "guide pretrain wiki-512 --objective electra --plan preset:mcmisp --cooccur wiki-pairs --size base --batch-size 256 --steps 1000000 --warmup-steps 10000 --beta2 0.98 --epsilon 1e-6   # as paper C",
        "guide pretrain wiki-128 --objective electra --generator unigram --plan preset:ag --size base",
    )
    measured_as = "replaced-tokens"
    evaluation_settings = (MaskedEvaluation,)

    @classmethod
    def check_plan(cls, plan: Plan, config: Any, source: str) -> None:
        check_generator_guides(plan, config, source, always=True, discriminator=True)

    @classmethod
    def prepare(cls, setup: Setup) -> Learner:
        from pipelines.training.learners import replaced_token

        return replaced_token.prepare(setup, cls)

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        return has_head(config, "ElectraForPreTraining")

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        from pipelines.training.learners.masked_scores import evaluate_discriminator

        evaluate_discriminator(run, folder, model, handle)
