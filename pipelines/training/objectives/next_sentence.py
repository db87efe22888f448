"""The objective ``mlm+nsp``: masked language modelling of two texts, and whether the second follows the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.training.objective import Card, Objective, has_head
from pipelines.training.settings import MaskedEvaluation, Masking, WordEvaluation

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.guide import Guide
    from pipelines.engine.stage import Run
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.learner import Learner, Setup


class NextSentencePrediction(Objective):
    """Masked language modelling of two texts, and whether the second follows the first."""

    name = "mlm+nsp"
    learns = "masked words and whether two texts follow each other"
    needs = (
        "mlm+nsp (a BERT) also predicts whether the second of two texts follows the first; it needs a corpus with at least "
        "two documents of at least two sentences each."
    )
    families = ("bert",)
    card = Card("masked language model that predicts next sentences", "fill-mask", "AutoModelForPreTraining")
    settings = (Masking,)
    examples = ("guide pretrain wiki-128 --objective mlm+nsp --epochs 40",)
    measured_as = "masked-lm-nsp"
    evaluation_settings = (MaskedEvaluation, WordEvaluation)
    floors = "pairs"

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        from guidance.patterns.features import Vocabulary

        if guide.part != "model":
            return f"it is for a {guide.part}, and mlm+nsp trains one model"
        if guide.makes("row_losses"):
            return f"{guide.mechanism} acts where a generator mis-predicts, and mlm+nsp has none"
        known = {*Vocabulary.FEATURES, "segment"}
        if guide.bound_pattern and (unknown := [need for need in guide.bound_pattern.needs if need not in known]):
            return f"it needs {', '.join(unknown)}, which are known for whole sequences and not for the pairs that mlm+nsp makes"
        return ""

    @classmethod
    def prepare(cls, setup: Setup) -> Learner:
        from pipelines.training.learners import next_sentence

        return next_sentence.prepare(setup, cls)

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        return has_head(config, "BertForPreTraining")

    @classmethod
    def evaluate(cls, run: Run[Any], folder: Path, model: Any, handle: Any) -> None:
        from pipelines.training.learners.masked_scores import evaluate_pairs

        evaluate_pairs(run, folder, model, handle)
