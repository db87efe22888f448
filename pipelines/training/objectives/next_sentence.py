"""The objective ``mlm+nsp``: masked language modelling of two texts, and whether the second one follows the first."""

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
from guidance.objectives.next_sentence import SPECIAL, Documents, next_sentence_loss
from guidance.patterns.features import Vocabulary
from guidance.plan import Guide, Plan
from pipelines.engine.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.batches import Examples, compact, pad, read_column
from pipelines.training.models import FAMILIES, build_model, check_lengths
from pipelines.training.objectives import Given
from pipelines.training.objectives.guided import Inputs, refuse_guides
from pipelines.training.objectives.masked_batches import MaskedBatch
from pipelines.training.objectives.masked_lm import MaskedLM


def check_plan(plan: Plan, config: Any, source: str) -> None:
    """Raises PlanError when a guide cannot work in this objective."""
    refuse_guides(plan, source, _refusal)


def _refusal(guide: Guide) -> str:
    """Why a guide cannot work with pairs of sentences; empty where it can."""
    if guide.part != "model":
        return f"it is for a {guide.part}, and mlm+nsp trains one model"
    if guide.makes("row_losses"):
        return f"{guide.mechanism} acts where a generator mis-predicts, and mlm+nsp has none"
    known = {*Vocabulary.FEATURES, "segment"}
    if guide.bound_pattern and (unknown := [need for need in guide.bound_pattern.needs if need not in known]):
        return (
            f"it needs {', '.join(unknown)}, which are known of whole sequences and not of the pairs that mlm+nsp makes"
        )
    return ""


def prepare(given: Given) -> NextSentence:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    from transformers import AutoModelForPreTraining

    data, tokenizer = given.sequences, given.tokenizer
    splits: dict[str, Any] = {}
    splits["train"], sizes = _documents(given, "train")
    splits["valid"], _ = _documents(given, "valid")
    if not splits["train"].has_pair.any():
        raise InputError(
            f"{data.reference}: its training text gives no pair of a sentence and one of another document",
            hint="mlm+nsp needs two documents with two sentences each at least; --objective mlm does not",
        )
    model = build_model(
        given.config,
        tokenizer,
        given.max_length,
        given.init,
        seed=given.config.seed,
        auto_class=AutoModelForPreTraining,
        objective="mlm+nsp",
        plan=given.plan,
    )
    _check_model(model.config)
    check_lengths(model.config, splits, data.reference)
    return NextSentence(dataclasses.replace(given, **splits), model, sizes)


def _documents(given: Given, split: str) -> tuple[Documents, list[int]]:
    """The text of a split, out of the sequences that it is packed in, without their special tokens; and how many examples
    each of the corpora gives.

    Raises:
        ArtifactDamaged: the places of the tokens are missing, not one for each, or in disorder.
    """
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    before = 0
    for artifact in given.corpora or (given.sequences,):
        packed = Examples.read(artifact, split, len(given.tokenizer))
        document, sentence = (_place(artifact, split, column, packed.lengths) for column in ("document", "sentence"))
        is_text = document >= 0
        document = document[is_text].astype(np.int64) + before
        if (np.diff(document) < 0).any():
            raise ArtifactDamaged(f"{artifact.path}: column document of {split}.parquet is not in order")
        before = int(document[-1]) + 1 if len(document) else before
        parts.append((packed.ids[is_text], document, sentence[is_text]))
    ids, documents, sentences = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    room = given.max_length - SPECIAL
    sizes = [len(part) for part, _, _ in parts]
    found = Documents.of(ids, documents, sentences, room, sizes)
    if alone := len(found) - int(found.has_pair.sum()):
        log.info(
            "%s: %s of %s examples have no second text: one sentence alone, or too long to be stood for by another document",
            *(split, f"{alone:,}", f"{len(found):,}"),
        )
    if found.cut:
        log.info("%s: %s sentences are longer than the %s tokens of an example and are cut", split, found.cut, room)
    return found, np.diff(np.searchsorted(found.starts[found.stretches], np.cumsum(sizes)), prepend=0).tolist()


def _place(artifact: Artifact, split: str, column: str, expected: np.ndarray) -> np.ndarray:
    """The document or sentence of each token, where there are sequences of these lengths."""
    name = f"{split}.parquet"
    if name not in artifact.files:
        return np.zeros(0, np.int16)
    values, lengths = read_column(artifact, name, column, pa.int32(), compact)
    if not np.array_equal(lengths, expected):
        raise ArtifactDamaged(f"{artifact.path / name}: column {column} does not have one value for each token")
    return values


def _check_model(found: Any) -> None:
    """Raises InputError when a model to start from cannot tell two texts apart."""
    if found.model_type not in (known := FAMILIES["mlm+nsp"]):
        raise InputError(
            f"--objective mlm+nsp trains {' or '.join(known)}, and the model to start from is {found.model_type}"
        )
    if found.type_vocab_size < 2:
        raise InputError(f"the model to start from knows {found.type_vocab_size} types of tokens, and a pair has 2")


@dataclass(frozen=True)
class PairBatch(MaskedBatch):
    """One micro-batch of pairs.

    Attributes:
        types: which of both texts each token is of.
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
    """The same as tensors on a device; the labels of the pairs are (B,)."""

    relations_B: Tensor


class NextSentence(MaskedLM):
    """See `pipelines.training.loop.Objective`; the splits are `Documents`.

    Attributes:
        sizes: how many training examples each of the corpora gives.
    """

    TASKS: ClassVar[tuple[str, ...]] = ("mlm", "nsp", "accuracy/nsp")

    def __init__(self, given: Given, model: Any, sizes: Sequence[int]) -> None:
        super().__init__(given, model)
        self.sizes = sizes
        self.validation = np.arange(self.num_valid) * len(given.valid) // max(self.num_valid, 1)
        tokenizer = given.tokenizer
        self.begin_id, self.separator_id = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.has_segments = "segment" in given.plan.needs()

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> PairBatch:
        documents: Any = self.splits[split]
        if split == "valid":  # the few that are validated are of all its documents
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
        loss, found = next_sentence_loss(output.seq_relationship_logits, inputs.relations_B)
        return {**super().task_losses(output, inputs), "nsp": loss, "accuracy/nsp": found}
