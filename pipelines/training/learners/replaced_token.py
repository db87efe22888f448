"""The learner of ``electra``: a generator fills in masked tokens, and a discriminator finds those that were replaced.

The loss is L_G + weight * L_D, plus the losses of guides (Clark et al. 2020, section 2; Xing et al. 2020, equation 14).
The discriminator reads the filled-in text and judges every token, special ones too.  A masked token that was filled in with
the original token counts as not replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from guidance.errors import InputError
from guidance.objectives.masked_lm import IGNORED, cross_entropy
from guidance.objectives.replaced_token import two_classes
from guidance.objectives.selection import places_of
from pipelines.training.batches import pad
from pipelines.training.learner import Setup
from pipelines.training.learners.generator import build_generator
from pipelines.training.learners.guided import Inputs
from pipelines.training.learners.language_model import check_packing
from pipelines.training.learners.masked_lm import FilledLM
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model
from pipelines.training.objective import Objective
from pipelines.training.plan_checks import generator_kind


def prepare(setup: Setup, objective: type[Objective]) -> ReplacedToken:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    kind = generator_kind(setup.plan, setup.config, always=True)
    if kind == "none":
        raise InputError("--objective electra needs a generator", hint="--generator auto, or unigram")
    model = build_model(setup, objective, setup.plan.for_part(*ReplacedToken.PARTS))
    if model.config.model_type not in objective.families:
        raise InputError(
            f"--objective {objective.name} trains a discriminator of {' or '.join(objective.families)}, and the model to "
            f"start from is {model.config.model_type}"
        )
    check_lengths(model.config, {"train": setup.train, "valid": setup.valid}, setup.sequences.reference)
    check_packing(setup, model)
    network = build_generator(setup, model, shares_embeddings=True) if kind == "transformer" else None
    return ReplacedToken(setup, model, network)


class ReplacedToken(FilledLM):
    """Replaced-token detection; see `pipelines.training.learners.guided.Learner`.  The discriminator's loss decides which step is best;
    its ``recall`` is the share of the replaced tokens that it finds."""

    PARTS: ClassVar[tuple[str, ...]] = ("model", "discriminator")
    TASKS: ClassVar[tuple[str, ...]] = (
        "discriminator",
        "accuracy/discriminator",
        "recall/discriminator",
        "share/replaced",
    )

    def __init__(self, setup: Setup, model: Any, network: Any = None) -> None:
        super().__init__(setup, model, network)
        self.discriminator_weight = setup.config.discriminator_weight

    def weights(self, step: int) -> dict[str, float]:
        generator = self.generator.weights(step) if self.generator else {}
        return {"discriminator": self.discriminator_weight, **generator, **self.guided.weights(step)}

    def tensors(self, batch: Any) -> Inputs:
        """The filled-in batch on the device of the model: the ids after filling in, and which of them were replaced."""
        inputs = super().tensors(batch)
        columns = dict(inputs.columns)
        places_N = places_of(pad([np.ones(len(row), bool) for row in batch.seen], False, batch.length))
        places_N = places_N.to(inputs.labels_N.device, non_blocking=True)
        return replace(
            inputs,
            model={**inputs.model, "input_ids": columns.pop("predicted")},
            places_N=places_N,
            labels_N=columns["mispredicted"].flatten()[places_N].long(),
            columns=columns,
        )

    def call(self, model: nn.Module, inputs: Inputs, **extra: Any) -> Any:
        read, places_N = self.guided.read(inputs, extra)
        output = model(**read)
        output.logits = two_classes(output.logits.flatten()[places_N])
        return output

    def num_predicted(self, batch: Any) -> float:
        return float(batch.tokens)

    def task_counts(self, batch: Any) -> dict[str, float]:
        labels = np.concatenate([row[row != IGNORED] for row in batch.labels])
        replaced = float((batch.drawn_N.cpu() != torch.from_numpy(labels)).sum())
        return {**dict.fromkeys(self.TASKS, batch.tokens), "recall/discriminator": replaced}

    def task_losses(self, output: Any, inputs: Any) -> dict[str, Tensor]:
        replaced_N, found_N = inputs.labels_N, output.logits.argmax(-1)
        values = (
            cross_entropy(output.logits, replaced_N),
            (found_N == replaced_N).sum().double(),
            (found_N & replaced_N).sum().double(),
            replaced_N.sum().double(),
        )
        return dict(zip(self.TASKS, values, strict=True))
