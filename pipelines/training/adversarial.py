"""The settings of adversarial training, which all tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelines.engine.stage import Config

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "freelb": {"rate": 0.1, "start": 0.02},
    "smart": {"rate": 1e-3, "start": 1e-5},
}
"""What ``--adversarial-rate`` and ``--adversarial-start`` are by default."""

_ONLY = {"adversarial_steps": "freelb", "adversarial_bound": "freelb", "adversarial_weight": "smart"}


class AdversarialConfig(Config):
    """FreeLB or SMART: perturbations of word embeddings that raise the loss; see `guidance.perturbations`."""

    adversarial: Literal["none", "freelb", "smart"] = Field(
        "none", description="Training under perturbations of the word embeddings: by FreeLB or by SMART."
    )
    adversarial_steps: int = Field(3, ge=1, description="FreeLB: passes in a step; 2 and 3 are FreeLB-2 and FreeLB-3.")
    adversarial_rate: float | None = Field(
        None, gt=0, description="Length of one step of the perturbation; by default 0.1 for FreeLB, 0.001 for SMART."
    )
    adversarial_start: float | None = Field(
        None, ge=0, description="Size of the noise that it starts from; by default 0.02 for FreeLB, 0.00001 for SMART."
    )
    adversarial_bound: float = Field(
        0.0, ge=0, description="FreeLB: largest norm of the perturbation of an example; 0 for none."
    )
    adversarial_weight: float = Field(1.0, gt=0, description="SMART: weight of the divergence.")

    @model_validator(mode="after")
    def _check_adversarial(self) -> Self:
        for name in AdversarialConfig.model_fields.keys() - {"adversarial"}:
            wanted = _ONLY.get(name, "freelb or smart")
            if getattr(self, name) != AdversarialConfig.model_fields[name].default and self.adversarial not in wanted:
                raise ValueError(
                    f"--{name.replace('_', '-')} belongs to --adversarial {wanted}, not to {self.adversarial}"
                )
        return self


AdversarialConfig.later = AdversarialConfig.model_fields.keys()
