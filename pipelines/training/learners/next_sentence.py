"""The learner of ``mlm+nsp``: masked language modelling of two texts, and whether the second follows the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from guidance.errors import InputError
from guidance.objectives.masked_lm import IGNORED
from guidance.objectives.next_sentence import SPECIAL, CutDocuments, next_sentence_loss
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.batches import Examples, check_sizes, compact, pad, read_column
from pipelines.training.learner import Setup
from pipelines.training.learners.guided import Inputs
from pipelines.training.learners.masked_batches import MaskedBatch
from pipelines.training.learners.masked_lm import MaskedLM
from pipelines.training.model_checks import check_lengths
from pipelines.training.models import build_model
from pipelines.training.objective import Objective


def prepare(setup: Setup, objective: type[Objective]) -> NextSentence:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    data = setup.sequences
    splits: dict[str, Any] = {}
    corpora = setup.corpora or (data,)
    splits["train"], sizes = read_documents(corpora, "train", setup.tokenizer, setup.max_length)
    splits["valid"], _ = read_documents(corpora, "valid", setup.tokenizer, setup.max_length)
    if not splits["train"].has_pair.any():
        raise InputError(
            f"{data.reference}: its training text gives no pair of texts from different documents",
            hint="mlm+nsp needs at least two documents of at least two sentences each; --objective mlm does not",
        )
    model = build_model(setup, objective, setup.plan)
    _check_model(model.config, objective)
    check_lengths(model.config, splits, data.reference)
    return NextSentence(dataclasses.replace(setup, **splits), model, sizes)


def read_documents(
    corpora: Sequence[Artifact], split: str, tokenizer: Any, length: int
) -> tuple[CutDocuments, list[int]]:
    """The text of a split, unpacked from its sequences, without special tokens; and how many examples each artifact gives.

    Args:
        length: the greatest length of an example, in tokens.

    Raises:
        ArtifactDamaged: the columns ``document`` and ``sentence`` are missing, not in order, or not one value for a token.
    """
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    before = 0
    for artifact in corpora:
        packed = Examples.read(artifact, split, len(tokenizer))
        document, sentence = (_place(artifact, split, column, packed.lengths) for column in ("document", "sentence"))
        is_text = document >= 0
        document = document[is_text].astype(np.int64) + before
        if (np.diff(document) < 0).any():
            raise ArtifactDamaged(f"{artifact.path}: column document of {split}.parquet is not in order")
        before = int(document[-1]) + 1 if len(document) else before
        parts.append((packed.ids[is_text], document, sentence[is_text]))
    ids, documents, sentences = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    most = length - SPECIAL
    sizes = [len(part) for part, _, _ in parts]
    text = CutDocuments.of(ids, documents, sentences, most, sizes)
    if alone := len(text) - int(text.has_pair.sum()):
        log.info(
            "%s: %s of %s examples have no second text: they are a single sentence, or no other document has so long a text",
            *(split, f"{alone:,}", f"{len(text):,}"),
        )
    if text.cut:
        log.info("%s: %s sentences are longer than an example (%s tokens) and are cut", split, text.cut, most)
    return text, np.diff(np.searchsorted(text.starts[text.stretches], np.cumsum(sizes)), prepend=0).tolist()


def spread(number: int, kept: int) -> np.ndarray:
    """``kept`` of ``number`` examples, at equal distances."""
    return np.arange(kept) * number // max(kept, 1)


def _place(artifact: Artifact, split: str, column: str, expected: np.ndarray) -> np.ndarray:
    """The document or the sentence of each token of a split, whose sequences have these lengths."""
    name = f"{split}.parquet"
    if name not in artifact.files:
        return np.zeros(0, np.int16)
    values, lengths = read_column(artifact, name, column, pa.int32(), compact)
    check_sizes(lengths, expected, artifact.path / name, column)
    return values


def _check_model(found: Any, objective: type[Objective]) -> None:
    """Raises InputError when the model to start from cannot tell two texts apart."""
    if found.model_type not in objective.families:
        raise InputError(
            f"--objective {objective.name} trains {' or '.join(objective.families)}, and the model to start from is "
            f"{found.model_type}"
        )
    if found.type_vocab_size < 2:
        raise InputError(f"the model to start from has {found.type_vocab_size} token types, and pairs need 2")


@dataclass(frozen=True)
class PairBatch(MaskedBatch):
    """One micro-batch of pairs.

    Attributes:
        types: 0 for tokens of the first text, 1 for those of the second.
        relations: the labels of `guidance.objectives.next_sentence`, one for each example.
    """

    types: list[np.ndarray] = field(default_factory=list)
    relations: list[int] = field(default_factory=list)

    @cached_property
    def pairs(self) -> float:
        """How many examples have a second text."""
        return float(sum(label != IGNORED for label in self.relations))


@dataclass(frozen=True)
class PairInputs(Inputs):
    """A `PairBatch` as tensors on a device; the labels of the pairs are (B,)."""

    relations_B: Tensor


class NextSentence(MaskedLM):
    """Masked language modelling and next-sentence prediction; see `pipelines.training.learners.guided.Learner`.  The splits are
    `CutDocuments`."""

    TASKS: ClassVar[tuple[str, ...]] = ("mlm", "nsp", "accuracy/nsp")

    def __init__(self, setup: Setup, model: Any, sizes: Sequence[int]) -> None:
        super().__init__(setup, model)
        self.sizes = sizes
        self.validation = spread(len(setup.valid), self.num_valid)
        self.begin_id, self.separator_id = setup.tokenizer.cls_token_id, setup.tokenizer.sep_token_id
        self.has_segments = "segment" in setup.plan.needs()

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> PairBatch:
        documents: Any = self.splits[split]
        if split == "valid":  # spread the validation examples over all documents
            examples = [(epoch, int(self.validation[i])) for epoch, i in examples]
        pairs = [documents.pair(i, seed=self.seed, epoch=epoch) for epoch, i in examples]
        laid = [documents.lay_out(pair, self.begin_id, self.separator_id) for pair in pairs]
        masked = [
            self.masker(row.ids, seed=self.seed, epoch=epoch, example=i)
            for row, (epoch, i) in zip(laid, examples, strict=True)
        ]
        return PairBatch(
            seen=[seen for seen, _ in masked],
            labels=[labels for _, labels in masked],
            origins=examples,
            columns={"segment": [row.segments for row in laid]} if self.has_segments else {},
            types=[row.types for row in laid],
            relations=[pair.label for pair in pairs],
        )

    def tensors(self, batch: Any) -> PairInputs:
        inputs = super().tensors(batch)
        device = inputs.labels_N.device
        types_BT = pad(batch.types, 0, batch.length, device)
        relations_B = torch.tensor(batch.relations).to(device, non_blocking=True)
        return PairInputs(
            **{**vars(inputs), "model": {**inputs.model, "token_type_ids": types_BT}}, relations_B=relations_B
        )

    def weights(self, step: int) -> dict[str, float]:
        return {"mlm": 1.0, "nsp": 1.0, **self.guided.weights(step)}

    def task_counts(self, batch: Any) -> dict[str, float]:
        return {**super().task_counts(batch), "nsp": batch.pairs, "accuracy/nsp": batch.pairs}

    def task_losses(self, output: Any, inputs: Any) -> dict[str, Tensor]:
        loss, right = next_sentence_loss(output.seq_relationship_logits, inputs.relations_B)
        return {**super().task_losses(output, inputs), "nsp": loss, "accuracy/nsp": right}
