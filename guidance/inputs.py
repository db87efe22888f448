"""From the arguments of a call to the guidance of its batch: the features of its tokens, checked against what the plan reads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guidance.batch import BatchGuidance
from guidance.errors import InputError, did_you_mean
from guidance.guided_model import GuidedModel
from guidance.patterns.features import FEATURES, INPUTS, Tokens, TokensWithoutIds, Vocabulary, is_feature


def guide_batch(
    guided: GuidedModel, batch: Mapping[str, Any], *, step: int = 0, measuring: bool = True
) -> BatchGuidance:
    """The guidance of a batch.

    Args:
        batch: the arguments of `guidance.Handle.guide`.
        measuring: losses will be asked for.
    """
    tokens = tokens_of(guided, batch)
    _check_features(guided, tokens, measuring)
    return BatchGuidance(guided, tokens, step, measuring=measuring, strengths=guided.strengths())


def tokens_of(guided: GuidedModel, batch: Mapping[str, Any]) -> dict[str, Tokens]:
    """The features of a batch by stack; the batch need not have all that the plan reads."""
    if not guided.is_installed:
        raise InputError("this plan is not installed in its model any more", hint="handle.install() puts it in again")
    columns = _columns(guided, batch)
    mine = {name: column for name, column in columns.items() if not name.startswith("decoder_")}
    theirs = {name.removeprefix("decoder_"): column for name, column in columns.items() if name not in mine}
    tokens: dict[str, Tokens] = {}
    for prefix, stack, own in (("", guided.stack_of_inputs, mine), ("decoder_", "decoder", theirs)):
        ids, embeddings = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}inputs_embeds")
        if ids is not None or embeddings is not None:
            tokens[stack] = _tokens(guided, ids, embeddings, batch.get(f"{prefix}attention_mask"), own, prefix)
    if not tokens:
        raise InputError(
            "there is no batch to guide", hint="give input_ids, and decoder_input_ids where a decoder is guided"
        )
    return tokens


def _columns(guided: GuidedModel, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The features in a batch; what is neither a feature nor an argument of the model is refused."""
    columns = {name: value for name, value in batch.items() if is_feature(name)}
    others = [name for name in batch if name not in INPUTS and name not in columns]
    known = inspect.signature(guided.model.forward).parameters if others else {}
    for name in others:
        if name not in known:
            feature = name.removeprefix("decoder_")
            raise InputError(
                f"there is no feature {feature!r}{did_you_mean(feature, FEATURES)}",
                hint=f"known: {', '.join(sorted(FEATURES))}",
            )
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise InputError(
                f"the feature {name!r} is a {type(column).__name__}, not a tensor (B, T)",
                hint="guidance.FeatureCollator makes tensors of lists",
            )
    return columns


def _tokens(
    guided: GuidedModel,
    ids_BT: Tensor | None,
    embeddings_BTD: Any,
    mask_BT: Tensor | None,
    columns: Mapping[str, Tensor],
    prefix: str,
) -> Tokens:
    """The tokens of a stack, of which the ids or the embeddings are given."""
    if ids_BT is not None and (ids_BT.dim() not in (2, 3) or ids_BT.is_floating_point()):
        raise InputError(
            f"input_ids are {ids_BT.dtype} {tuple(ids_BT.shape)}, not whole numbers (B, T)",
            hint="give the batch that the model gets",
        )
    like_BT = embeddings_BTD[..., 0] if ids_BT is None else ids_BT
    if mask_BT is not None and mask_BT.dim() == 4:
        raise InputError(
            f"the attention mask is {tuple(mask_BT.shape)}, and patterns read which tokens are padding, (B, T)",
            hint="pass guidance=handle.guide(input_ids, padding_mask) beside a mask of your own, which must be boolean",
        )
    valid_BT = torch.ones_like(like_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
    if like_BT.dim() == 3:  # (B, choices, T), which models of multiple choice flatten too
        like_BT, valid_BT = like_BT.flatten(0, 1), valid_BT.flatten(0, 1)
        columns = {name: column.flatten(0, 1) for name, column in columns.items()}
    if ids_BT is None:
        return TokensWithoutIds(like_BT, valid_BT, columns, guided.tables)
    vocabulary = guided.decoder_vocabulary if prefix else guided.vocabulary
    reads = guided.reads()
    names = [name for name in Vocabulary.FEATURES if prefix + name in reads]
    known = vocabulary.columns(like_BT, names) if vocabulary else {}
    return Tokens(like_BT, valid_BT, {**known, **columns}, guided.tables)


def _check_features(guided: GuidedModel, tokens: Mapping[str, Tokens], measuring: bool) -> None:
    """Raises InputError if a batch lacks features that the plan reads."""
    lacking: dict[str, str] = {}
    for name, label in guided.needs(training=measuring).items():
        stack = "decoder" if name.startswith("decoder_") else guided.stack_of_inputs
        if stack in tokens and name.removeprefix("decoder_") not in tokens[stack].columns:
            lacking[name] = label
    if lacking:
        names, labels = (", ".join(map(repr, dict.fromkeys(each))) for each in (lacking, lacking.values()))
        sources = dict.fromkeys(FEATURES[name.removeprefix("decoder_")].source for name in lacking)
        raise InputError(
            f"the batch has no feature {names}, which the plan reads (guide {labels})", hint="\n".join(sources)
        )
