"""Learners of ``mlm``: masked language modelling, guided, with or without a generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from guidance.batch import BatchGuidance
from guidance.objectives.masked_lm import IGNORED
from guidance.objectives.replaced_token import Unigram, uniform_numbers
from guidance.objectives.selection import put_at
from pipelines.training.learner import ModelFolder, Setup
from pipelines.training.learners.generator import Generator, Pair, build_generator
from pipelines.training.learners.guided import VALID_BATCH, VALID_EPOCH, Inputs
from pipelines.training.learners.language_model import LanguageModel, check_packing
from pipelines.training.learners.masked_batches import FilledBatch, MaskedBatch
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model, masker_of
from pipelines.training.objective import Objective
from pipelines.training.plan_checks import GENERATOR_FOLDER, generator_kind


def prepare(setup: Setup, objective: type[Objective]) -> MaskedLM:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    model = build_model(setup, objective, setup.plan.for_part("model"))
    check_lengths(model.config, {"train": setup.train, "valid": setup.valid}, setup.sequences.reference)
    check_packing(setup, model)
    kind = generator_kind(setup.plan, setup.config)
    if kind == "none":
        return MaskedLM(setup, model)
    return FilledLM(setup, model, build_generator(setup, model) if kind == "transformer" else None)


class MaskedLM(LanguageModel):
    """Masked language modelling."""

    TASKS: ClassVar[tuple[str, ...]] = ("mlm",)

    def __init__(self, setup: Setup, model: Any) -> None:
        self.masker = masker_of(setup.tokenizer, setup.config.mask_probability)
        super().__init__(setup, model, self.masker.ordinary)

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> MaskedBatch:
        rows = self.splits[split]
        pairs = [self.masker(rows[i], seed=self.seed, epoch=epoch, example=i) for epoch, i in examples]
        columns = {name: [rows.column(name, i) for _, i in examples] for name in rows.columns}
        return MaskedBatch([seen for seen, _ in pairs], [labels for _, labels in pairs], columns, examples)

    def validated_ids(self) -> np.ndarray:
        labels = [np.empty(0, np.int64)]
        for start in range(0, self.num_valid, VALID_BATCH):
            numbers = range(start, min(start + VALID_BATCH, self.num_valid))
            labels += self.prepare([(VALID_EPOCH, number) for number in numbers], "valid").labels
        read = np.concatenate(labels)
        return read[read != IGNORED]

    def distributions(self, model: nn.Module, inputs: Inputs, guidance: BatchGuidance) -> tuple[Any, Tensor, Tensor]:
        """A forward pass, and what an attack on it is judged by: the logits of the predicted tokens, (N, classes), and the
        output that stands for each example, (B, D)."""
        if self.guided.sentence == "hidden":
            output = self.call(model, inputs, guidance=guidance, output_hidden_states=True)
            states = output.hidden_states[-1]
            states_BTd = states if inputs.documents is None else inputs.documents.apart(states)
            return output, output.logits, states_BTd[:, 0]
        batch, length = inputs.model["input_ids"].shape
        first_B = torch.arange(batch, device=inputs.places_N.device) * length
        asked = dataclasses.replace(inputs, places_N=torch.cat((inputs.places_N, first_B)))
        output = self.call(model, asked, guidance=guidance)
        output.logits, first = output.logits.split((len(inputs.places_N), batch))
        return output, output.logits, first


class FilledLM(MaskedLM):
    """Masked language modelling with a generator that fills in the same tokens, for guides that act where it mis-predicts.

    The inputs of the model are those without a generator.  A mis-prediction is a masked token for which the generator
    drew another token than the original (Xing et al. 2020, equation 11).
    """

    PARTS: ClassVar[tuple[str, ...]] = ("model",)
    """The parts whose guides act in the model."""

    def __init__(self, setup: Setup, model: Any, network: Any = None) -> None:
        """
        Args:
            network: the generator; None draws from the unigram distribution of the training sequences.
        """
        super().__init__(dataclasses.replace(setup, plan=setup.plan.for_part(*self.PARTS)), model)
        self.main, self.generator, self.unigram = model, None, None
        if network is None:
            self.unigram = Unigram.of(setup.train.ids, self.masker.ordinary)
        else:
            self.generator = Generator(setup, network, self.masker, super().tensors)
            self.model, self.passes = Pair(model, network), (self.generator, self)
            self.all_guides += (self.generator.guided,)
            self.validated += Generator.LOSSES

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> FilledBatch:
        masked = super().prepare(examples, split)
        uniform = [
            uniform_numbers(len(row), seed=self.seed, epoch=epoch, example=i)[row != IGNORED]
            for row, (epoch, i) in zip(masked.labels, examples, strict=True)
        ]
        batch = FilledBatch(**vars(masked), uniform_N=torch.from_numpy(np.concatenate(uniform)))
        if self.unigram:
            batch.fill(self.unigram.draw(batch.uniform_N))
        return batch

    def tensors(self, batch: Any) -> Inputs:
        """The batch on the device of the model, after it was filled in."""
        inputs = super().tensors(batch)
        ids_BT, drawn_N = inputs.model["input_ids"], batch.drawn_N.to(inputs.labels_N.device, non_blocking=True)
        predicted_BT = put_at(ids_BT, inputs.places_N, drawn_N)
        filled = {"predicted": predicted_BT, "mispredicted": predicted_BT != inputs.columns["original"]}
        return dataclasses.replace(inputs, columns={**inputs.columns, **filled})

    def weights(self, step: int) -> dict[str, float]:
        return {**super().weights(step), **(self.generator.weights(step) if self.generator else {})}

    def validate(self, model: nn.Module, batch: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        filling = self.generator.validate(model, batch) if self.generator else {}
        sums, counts = super().validate(model, batch)
        return {**sums, **filling}, {**counts, **dict.fromkeys(filling, batch.chosen)}

    def folders(self) -> tuple[ModelFolder, ...]:
        if not self.generator:
            return super().folders()
        generator = ModelFolder(
            GENERATOR_FOLDER, "generator.", self.generator.network, self.generator.guided.handle.plan
        )
        return (ModelFolder("", "model.", self.main, self.guided.handle.plan), generator)
