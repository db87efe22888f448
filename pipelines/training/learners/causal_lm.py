"""The learner of ``clm``: causal language modelling, in which no document of a sequence sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from guidance.errors import InputError, UnsupportedModel
from guidance.objectives.causal_lm import check_causal, next_words, packed, positions_of, starts_of, words_of
from guidance.objectives.selection import logits_at
from pipelines.training.batches import pad
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Inputs
from pipelines.training.learners.language_model import LanguageModel
from pipelines.training.learners.masked_batches import MaskedBatch
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model
from pipelines.training.objective import Objective


def prepare(setup: Setup, objective: type[Objective]) -> CausalLM:
    """The learner of a run.  Raises InputError when data, plan, model and settings do not fit each other, or the model is not
    causal."""
    model = build_model(setup, objective, setup.plan.for_part("model"))
    check_lengths(model.config, {"train": setup.train, "valid": setup.valid}, setup.sequences.reference)
    check_is_causal(model, setup.folder)
    return CausalLM(setup, model)


def check_is_causal(model: Any, folder: Path | None) -> None:
    """See `check_causal`.  Raises InputError, which names the folder of the model, if it has one."""
    try:
        check_causal(model)
    except UnsupportedModel as error:
        where = f"{folder}: " if folder else ""
        raise InputError(f"{where}{error.message}", hint=error.hint) from error


@dataclass(frozen=True)
class CausalBatch(MaskedBatch):
    """One micro-batch of rows, in which the label of a token is the token after it; see `next_words`.

    Attributes:
        positions: the place of each token in its document, from 0.
    """

    positions: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(cls, ids: list[np.ndarray], separator: int, words: np.ndarray, **more: Any) -> CausalBatch:
        """The batch of some sequences.

        Args:
            separator: the id between documents.
            words: the ids that are always predicted; see `guidance.objectives.causal_lm.words_of`.
            more: columns and origins, as in `MaskedBatch`.
        """
        starts = [starts_of(row, separator) for row in ids]
        labels = [next_words(row, its, words) for row, its in zip(ids, starts, strict=True)]
        return cls(seen=ids, labels=labels, positions=[positions_of(its) for its in starts], **more)

    def tensors_for(self, model: Any, pad_id: int) -> CausalInputs:
        """The rows, padded, on the device of a model."""
        inputs = self.tensors(pad_id, next(model.parameters()).device)
        ids_BT, valid_BT = inputs.model["input_ids"], inputs.model["attention_mask"]
        columns = {name: column for name, column in inputs.columns.items() if name != "original"}
        read = packed(model, ids_BT, pad(self.positions, 0, self.length, ids_BT.device))
        return CausalInputs(read, inputs.places_N, inputs.labels_N, columns, valid_BT)


@dataclass(frozen=True)
class CausalInputs(Inputs):
    """A `CausalBatch` as tensors on a device.

    Attributes:
        valid_BT: 0 at padding.  Guides read it as their attention mask; that of the model, if it gets one, is (B, 1, T, T).
    """

    valid_BT: Tensor

    @property
    def seen(self) -> dict[str, Tensor]:
        return {"input_ids": self.model["input_ids"], "attention_mask": self.valid_BT} | dict(self.columns)


class CausalLM(LanguageModel):
    """Causal language modelling.

    An attack is judged by the predicted tokens alone.  The first token, which stands for the sequence in masked models, sees
    only itself here.
    """

    TASKS = ("clm",)
    JUDGED = ("tokens",)

    def __init__(self, setup: Setup, model: Any) -> None:
        super().__init__(setup, model, words_of(setup.tokenizer))
        self.separator = setup.tokenizer.sep_token_id

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> CausalBatch:
        rows = self.splits[split]
        columns = {name: [rows.column(name, i) for _, i in examples] for name in rows.columns}
        ids = [rows[i] for _, i in examples]
        return CausalBatch.of(ids, self.separator, self.words, columns=columns, origins=examples)

    def tensors(self, batch: Any) -> CausalInputs:
        inputs: CausalInputs = batch.tensors_for(self.model, self.pad_id)
        return inputs

    def call(self, model: nn.Module, inputs: Inputs, **extra: Any) -> Any:
        # with a cache transformers would not keep documents apart
        return logits_at(model, inputs.places_N, **inputs.model, **extra, use_cache=False)
