"""Groups of settings that several objectives share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.engine.stage import Config


class Masking(Config):
    """For objectives that mask tokens."""

    mask_probability: float = Field(0.15, gt=0, lt=1, description="Share of tokens that are masked and predicted.")


class Filling(Config):
    """For objectives in which a generator can fill in the masked tokens."""

    generator: Literal["auto", "none", "unigram", "transformer"] = Field(
        "auto",
        description="What fills in the masked tokens, for electra and for McMisP in mlm; auto is a transformer if the "
        "objective or the plan needs a generator.",
    )
    generator_size: float = Field(
        1 / 3, gt=0, le=1, description="Width of a transformer generator as a fraction of the model's; it is as deep."
    )
