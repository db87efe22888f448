"""The objective ``mlm+nsp``: masked language modelling of two texts, and whether the second follows the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.training.objective import Card, Objective
from pipelines.training.settings import FloorEvaluation, MaskedEvaluation, Masking, PseudoEvaluation

if TYPE_CHECKING:
    from guidance.guide import Guide


class NextSentencePrediction(Objective):
    """Masked language modelling of two texts, and whether the second follows the first."""

    name = "mlm+nsp"
    learns = "masked words and whether two texts follow each other"
    source = "Devlin et al. 2019, section 3.1"
    needs = (
        "mlm+nsp (a BERT) also predicts whether the second of two texts follows the first; it needs a corpus with at least "
        "two documents of at least two sentences each."
    )
    families = ("bert",)
    card = Card("masked language model that predicts next sentences", "fill-mask", "AutoModelForPreTraining")
    settings = (Masking,)
    examples = ("guide pretrain wiki-128 --objective mlm+nsp --epochs 40",)
    learner = "pipelines.training.learners.next_sentence:prepare"
    measured_as = "masked-lm-nsp"
    head = "BertForPreTraining"
    evaluation = "pipelines.training.learners.masked_scores:evaluate_pairs"
    evaluation_settings = (MaskedEvaluation, FloorEvaluation, PseudoEvaluation)
    floors = "pairs"

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        from guidance.patterns.features import Vocabulary

        if reason := super().refusal(guide):
            return reason
        known = {*Vocabulary.FEATURES, "segment"}
        if guide.bound_pattern and (unknown := [need for need in guide.bound_pattern.needs if need not in known]):
            return f"it needs {', '.join(unknown)}, which are known for whole sequences and not for the pairs that mlm+nsp makes"
        return ""
