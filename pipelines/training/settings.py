"""Groups of settings that several objectives share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.engine.stage import Config, knob


class Masking(Config):
    """For objectives that mask tokens."""

    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are masked and predicted.")


class Packing(Config):
    """For objectives of encoders, whose batches can be read without padding."""

    packing: Literal["none", "documents"] = knob(
        "none",
        "documents: the sequences of a batch stand in one row without padding, and each is read as if it stood alone; none: they "
        "are padded to the longest.",
    )


class Filling(Config):
    """For objectives in which a generator can fill in the masked tokens."""

    generator: Literal["auto", "none", "unigram", "transformer"] = Field(
        "auto",
        description="Source of tokens for masks, for electra and for McMisP in mlm; auto is a transformer if the "
        "objective or the plan needs a generator.",
    )
    generator_size: float = Field(
        1 / 3, gt=0, le=1, description="Width of a transformer generator as a fraction of the model's; it is as deep."
    )


class MaskedEvaluation(Config):
    """For evaluations that mask tokens."""

    mask_seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the masking; one seed masks the same tokens for every model with this tokenizer.",
    )
    mask_probability: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of tokens that are masked; by default as in the training of the model, or 0.15.",
    )


class FloorEvaluation(Config):
    """Settings of evaluations of predicted words."""

    floors: bool = Field(
        True, description="Also say how well n-grams, counted in the training split, predict the same tokens."
    )


class PseudoEvaluation(Config):
    """Settings of evaluations of masked language models."""

    pseudo_perplexity: int = Field(
        0, ge=0, description="Number of sequences in which every token is also masked alone (Salazar et al. 2020)."
    )
