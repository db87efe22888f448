"""The learner of ``translation``: an encoder-decoder, guided in encoder and decoder.

A new model is the transformer of Vaswani et al. as Marian builds it: sinusoidal positions, normalisation after each layer,
and one matrix for embeddings and output (with two vocabularies, for those of the decoder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guidance.checkpoint import TARGET_FOLDER
from guidance.errors import InputError
from guidance.installation import Handle
from guidance.objectives.selection import logits_at, places_of
from guidance.objectives.translation import shift_right, translation_losses
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training import model_checks, models
from pipelines.training.batches import Examples, ids_and_mask, pad_features
from pipelines.training.learner import Setup, folder_of
from pipelines.training.learners.guided import Guides, Inputs, Learner
from pipelines.training.objective import Objective


def prepare(setup: Setup, objective: type[Objective]) -> TranslationLearner:
    """Raises InputError when data, plan, model and settings do not fit each other."""
    corpora, tokenizer = setup.corpora or (setup.sequences,), tokenizer_of_targets(setup.sequences, setup.tokenizer)
    splits = {
        "train": Pairs.read(corpora, "train", setup.train, len(tokenizer)),
        "valid": Pairs.read(corpora, "valid", setup.valid, len(tokenizer), limit=setup.config.valid_sequences),
    }
    model = build_model(setup, objective, tokenizer)
    model_checks.check_lengths(model.config, splits, setup.sequences.reference)
    return TranslationLearner(setup, model, tokenizer, splits)


def tokenizer_of_targets(sequences: Artifact, tokenizer: Any) -> Any:
    """The tokenizer of the targets; it is ``tokenizer``, that of the sources, if both share one vocabulary."""
    if f"{TARGET_FOLDER}/tokenizer.json" not in sequences.files:
        return tokenizer
    return models.read_tokenizer(sequences, TARGET_FOLDER, masked=False)


def build_model(setup: Setup, objective: type[Objective], target_tokenizer: Any) -> Any:
    """A new encoder-decoder of the configured size, or the one to start from.

    Weights start with a standard deviation of width ** -0.5, which is Glorot's for square matrices and gives scaled
    embeddings a deviation of 1.

    Args:
        target_tokenizer: the tokenizer of the sources, the same object, if both sides share one vocabulary.

    Raises:
        InputError: the tokenizers pad differently; or the model to start from has other vocabularies.
    """
    from transformers import MarianConfig, MarianMTModel

    config, tokenizer = setup.config, setup.tokenizer
    if tokenizer.pad_token_id != target_tokenizer.pad_token_id:
        raise InputError(
            f"sources are padded with {tokenizer.pad_token_id} and targets with {target_tokenizer.pad_token_id}, but a model "
            "has one padding id",
            hint="train both tokenizers with the same --kind",
        )
    end = target_tokenizer.sep_token_id
    if setup.init is not None:
        model = models.build_model(setup, objective, setup.plan)
        check_vocabularies(folder_of(setup.init), model.config, tokenizer, target_tokenizer)
        return model
    objective.family(config.architecture)
    layers, hidden, heads, ffn = models.dimensions(config)
    torch.manual_seed(config.seed)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(tokenizer),
            decoder_vocab_size=len(target_tokenizer),
            share_encoder_decoder_embeddings=target_tokenizer is tokenizer,
            d_model=hidden,
            encoder_layers=layers,
            decoder_layers=config.decoder_layers or layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=ffn,
            decoder_ffn_dim=ffn,
            activation_function="relu",
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            max_position_embeddings=setup.max_length,
            scale_embedding=True,
            init_std=hidden**-0.5,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=target_tokenizer.cls_token_id,
            eos_token_id=end,
            decoder_start_token_id=target_tokenizer.cls_token_id,
            forced_eos_token_id=None,
        )
    )
    never = {target_tokenizer.cls_token_id, target_tokenizer.pad_token_id, target_tokenizer.mask_token_id} - {None, end}
    model.generation_config.suppress_tokens = sorted(never)
    return model


def check_vocabularies(folder: Path, found: Any, tokenizer: Any, target_tokenizer: Any) -> None:
    """Raises InputError when a model with this configuration was trained with other tokenizers than these."""
    model_checks.check_same_tokenizer(folder, tokenizer)
    numbers = tuple(
        "one vocabulary" if is_one else "two vocabularies"
        for is_one in (getattr(found, "share_encoder_decoder_embeddings", True), target_tokenizer is tokenizer)
    )
    if numbers[0] != numbers[1]:
        raise InputError(f"{folder}: the model has {numbers[0]}, the sequences have {numbers[1]}")
    if target_tokenizer is not tokenizer:
        model_checks.check_same_tokenizer(folder / TARGET_FOLDER, target_tokenizer)
    known = (found.vocab_size, getattr(found, "decoder_vocab_size", None) or found.vocab_size)
    used = (len(tokenizer), len(target_tokenizer))
    if any(size < wanted for size, wanted in zip(known, used, strict=True)):
        raise InputError(
            f"{folder}: has {known[0]} source tokens and {known[1]} target tokens, the sequences use {used[0]} and {used[1]}",
            hint="guide build-sequences CORPUS TOKENIZER, with the tokenizers of the model",
        )
    if found.eos_token_id != target_tokenizer.sep_token_id:
        raise InputError(
            f"{folder}: its translations end with token {found.eos_token_id}, the targets with token "
            f"{target_tokenizer.sep_token_id}"
        )


@dataclass(frozen=True)
class Pairs:
    """The examples of a split: row n of one side is the translation of row n of the other."""

    sources: Examples
    targets: Examples

    @classmethod
    def read(cls, corpora: Sequence[Artifact], split: str, sources: Examples, vocab_size: int, limit: int = 0) -> Pairs:
        """The sources of a split together with their targets; the sources were read with the same ``limit``.

        Args:
            vocab_size: of the targets.

        Raises:
            InputError: the sequences have no targets.
        """
        for artifact in corpora:
            if artifact.manifest["config"].get("packing") != "pairs":
                raise InputError(
                    f"{artifact.reference} has no targets to translate into",
                    hint="guide build-sequences ... --packing pairs",
                )
        targets = Examples.read_all(corpora, split, vocab_size, column="target", limit=limit)
        if len(targets) != len(sources):
            raise ArtifactDamaged(
                f"{corpora[0].reference}: {len(sources)} sources and {len(targets)} targets in {split}"
            )
        return cls(sources, targets)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of the longer side of each pair."""
        return np.maximum(self.sources.lengths, self.targets.lengths)

    def batch(self, indices: Sequence[int]) -> TranslationBatch:
        """The pairs of these indices, in this order."""
        columns = {name: [self.sources.column(name, i) for i in indices] for name in self.sources.columns}
        return TranslationBatch([self.sources[i] for i in indices], [self.targets[i] for i in indices], columns)


@dataclass(frozen=True)
class TranslationBatch:
    """One micro-batch of rows that are not yet padded: ids of sources and targets, and features of the source tokens."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    columns: Mapping[str, list[np.ndarray]] = field(default_factory=dict)

    @cached_property
    def num_targets(self) -> float:
        """How many target tokens the model predicts."""
        return float(sum(map(len, self.targets)))

    @cached_property
    def tokens(self) -> float:
        """How many tokens both sides have."""
        return self.num_targets + sum(map(len, self.sources))


class TranslationLearner(Learner):
    """Translation; see `pipelines.training.learners.guided.Learner`.  The loss is label-smoothed; ``loss/nll``, which is only reported,
    is not."""

    validated = ("nll",)

    def __init__(self, setup: Setup, model: Any, tokenizer: Any, splits: Mapping[str, Pairs]) -> None:
        super().__init__(model, Guides(model, setup, setup.plan, decoder_tokenizer=tokenizer), setup, splits)
        self.smoothing = setup.config.label_smoothing

    def prepare(self, examples: Sequence[tuple[int, int]], split: str = "train") -> TranslationBatch:
        return self.splits[split].batch([index for _, index in examples])

    def counts(self, batch: TranslationBatch) -> dict[str, float]:
        predicted = {"translation": batch.num_targets, "loss/nll": batch.num_targets}
        guides = self.guided.counts(float(len(batch.sources)), {})
        return {**predicted, **guides, "tokens": batch.tokens}

    def losses(self, model: nn.Module, batch: TranslationBatch, step: int) -> dict[str, Tensor]:
        inputs = tensors(batch, self.model)
        guidance = self.guided.handle.guide(**inputs.model, step=step, **inputs.columns)
        output = logits_at(model, inputs.places_N, **inputs.model, **self.guided.forward(guidance), use_cache=False)
        smoothed, likelihood = translation_losses(output.logits, inputs.labels_N, self.smoothing)
        return {"translation": smoothed, "loss/nll": likelihood, **self.guided.losses(guidance)}

    def weights(self, step: int) -> dict[str, float]:
        return {"translation": 1.0, **self.guided.weights(step)}

    def validate(self, model: nn.Module, batch: TranslationBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
        nll = likelihood(model, self.guided.handle, tensors(batch, self.model))
        return {"nll": nll}, {"nll": batch.num_targets}


def tensors(batch: TranslationBatch, model: Any) -> Inputs:
    """A batch on the device of a model."""
    device, config = next(model.parameters()).device, model.config
    targets_BT, valid_BT = ids_and_mask(batch.targets, config.pad_token_id).values()
    places_N = places_of(valid_BT)
    return Inputs(
        {
            **ids_and_mask(batch.sources, config.pad_token_id, device),
            "decoder_input_ids": shift_right(targets_BT, config.decoder_start_token_id).to(device, non_blocking=True),
            "decoder_attention_mask": valid_BT.to(device, non_blocking=True),
        },
        places_N.to(device, non_blocking=True),
        targets_BT.flatten()[places_N].to(device, non_blocking=True),
        pad_features(batch.columns, max(map(len, batch.sources)), device),
    )


def likelihood(model: nn.Module, handle: Handle, inputs: Inputs) -> Tensor:
    """The negative log-likelihood of the targets of a batch, without smoothing: a sum over tokens, in nats."""
    extra = handle.at_inference(**inputs.model, **inputs.columns)
    output = logits_at(model, inputs.places_N, **inputs.model, **extra, use_cache=False)
    return translation_losses(output.logits, inputs.labels_N, 0.0)[1]
