"""The objective ``translation``: an encoder-decoder that translates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pipelines.engine.stage import Config
from pipelines.training.objective import Card, Objective

if TYPE_CHECKING:
    from guidance.guide import Guide
    from pipelines.metrics.comparison import Compared, Table
    from pipelines.storage.artifacts import Artifact


class Settings(Config):
    """Settings of translation alone."""

    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Label smoothing of translation.")
    decoder_layers: int | None = Field(None, ge=1, description="Layers of the decoder in translation, else --layers.")


class Decoding(Config):
    """How a translation is searched for."""

    beams: int = Field(5, ge=1, le=1000, description="Beams of the beam search; 1 is greedy search.")
    length_penalty: float = Field(
        1.0,
        ge=-10,
        le=10,
        description="Power of the length by which log-likelihoods are divided; 0 favours short translations.",
    )
    max_length: int = Field(0, ge=0, description="Longest translation, in tokens; 0 for as many as the model allows.")


class EvaluationSettings(Decoding):
    """Settings of the evaluation of translation alone."""

    bleu_tokenizer: Literal["13a", "intl", "char", "zh", "none"] = Field(
        "13a", description="Tokenization of BLEU, which its signature names."
    )


class Translation(Objective):
    """An encoder-decoder that translates."""

    name = "translation"
    learns = "to translate"
    source = "Vaswani et al. 2017"
    needs = (
        "translation (an encoder-decoder) reads the sequences that `guide build-sequences --packing pairs` makes of "
        "parallel text, which `guide build-dataset --train TEXT --train-pair TRANSLATION` reads."
    )
    families = ("marian",)
    card = Card("translation model", "translation", "AutoModelForSeq2SeqLM")
    settings = (Settings,)
    needs_mask_token = False
    examples = (
        "guide pretrain de-en-pairs --objective translation --plan preset:gaussian --layers 2 --hidden 256 --heads 8 --ffn 512 --batch-tokens 4096",
        "guide pretrain de-en-pairs --objective translation --plan preset:ag-translation-both --layers 6 --hidden 512 --heads 8 --batch-tokens 25000 --steps 50000 --learning-rate 5e-4 --schedule inverse-sqrt --warmup-steps 4000",
    )
    learner = "pipelines.training.learners.translation:prepare"
    measured_as = "translation"
    evaluation = "pipelines.training.learners.translation_scores:evaluate"
    evaluation_settings = (EvaluationSettings,)
    needs_corpus = True

    @classmethod
    def refusal(cls, guide: Guide) -> str:
        from guidance.patterns.features import Vocabulary

        if reason := super().refusal(guide):
            return reason
        if guide.makes("attack"):
            return f"{guide.mechanism} needs a second pass, which translation does not have"
        if guide.attention == "cross" and not guide.makes("target"):
            return (
                f"only losses work in cross-attention: a {guide.mechanism} there could not act while the model decodes"
            )
        if not guide.bound_pattern or (guide.stack, guide.attention) != ("decoder", "self"):
            return ""
        needs = guide.bound_pattern.needs
        if unknown := [need for need in needs if need not in Vocabulary.FEATURES]:
            return f"it needs {', '.join(unknown)}, and the tokens that the decoder writes have no such features"
        if not needs and _looks_ahead(guide):
            return f"{guide.pattern} names only later tokens, and the decoder sees none of them"
        return ""

    @classmethod
    def measures(cls, config: Any, data: Artifact) -> bool:
        return bool(config.is_encoder_decoder)

    compared_by = ("bleu_tokenizer",)

    @classmethod
    def compare(cls, one: Table, other: Table, bleu_tokenizer: str = "13a") -> list[Compared]:
        """BLEU and chrF, by the approximate randomisation of sacrebleu."""
        from pipelines.training.learners.translation_scores import compare

        return compare(one, other, bleu_tokenizer)


def _looks_ahead(guide: Guide) -> bool:
    """Whether the pattern of a guide, which reads no features, names no key at or before any query."""
    import torch

    from guidance.patterns.features import Tokens

    ids_BT = torch.zeros(1, 8, dtype=torch.long)
    assert guide.bound_pattern is not None
    return not guide.bound_pattern.on(Tokens(ids_BT, torch.ones_like(ids_BT).bool())).dense().tril().any()
