"""Batches of examples of different lengths, with the features of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding

from guidance.errors import InputError
from guidance.patterns.features import FEATURES, Feature, is_feature


class FeatureCollator:
    """Makes a batch of examples, and pads the features of their tokens like the token ids.

    Another collator makes the rest of the batch, so that it may mask tokens or pad labels.  It never sees the features, which
    most collators cannot pad.

    Attributes:
        tokenizer: pads on its side, left or right.
        inner: from examples without features to a batch with ``input_ids``; by default ``DataCollatorWithPadding``.

    Example:
        >>> FeatureCollator(tokenizer, DataCollatorForLanguageModeling(tokenizer))
    """

    def __init__(self, tokenizer: Any, inner: Callable[[list[dict[str, Any]]], Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.inner = inner or DataCollatorWithPadding(tokenizer)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch: what ``inner`` makes, and every feature that the examples have, (B, T), or (B, T, T) for pairs.

        Raises:
            InputError: an example lacks a feature that others have, or has not one value for each token.
        """
        names = sorted({name for example in examples for name in example if is_feature(name)})
        batch = dict(self.inner([{k: v for k, v in example.items() if k not in names} for example in examples]))
        for name in names:
            batch[name] = self._padded(name, examples, batch)
        return batch

    def _padded(self, name: str, examples: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> Tensor:
        feature = FEATURES[name.removeprefix("decoder_")]
        keys = ("decoder_input_ids", "labels") if name.startswith("decoder_") else ("input_ids",)
        length = next((batch[key].shape[-1] for key in keys if key in batch), None)
        if length is None:
            raise InputError(f"{name} belongs to {' or '.join(keys)}, and the batch has none")
        axes = 2 if feature.of_pairs else 1
        padded = torch.full((len(examples), *[length] * axes), feature.fill, dtype=feature.dtype)
        for number, example in enumerate(examples):
            size = next((len(example[key]) for key in keys if key in example), None)
            if size is None:
                raise InputError(
                    f"{name} belongs to {' or '.join(keys)}, and example {number} has none",
                    hint="tokenise the examples before they are collated",
                )
            values = _values(name, feature, example.get(name), size, number)
            if size > length:
                raise InputError(f"example {number} has {size} tokens, and its batch {length}: {name} cannot follow")
            on_left = getattr(self.tokenizer, "padding_side", "right") == "left"
            tokens = slice(length - size, length) if on_left else slice(size)
            index: tuple[int | slice, ...] = (number, *[tokens] * axes)
            padded[index] = values
        return padded


def _values(name: str, feature: Feature, column: Any, size: int, number: int) -> Tensor:
    """The values of a feature in an example, one for each of its tokens or pair of tokens."""
    try:
        values = torch.as_tensor(column)
    except (TypeError, ValueError, RuntimeError) as error:
        what = "no values" if column is None else "values that are no table of numbers"
        raise InputError(f"example {number}: {name} has {what}", hint=feature.summary) from error
    wanted = (size, size) if feature.of_pairs else (size,)
    if tuple(values.shape) != wanted:
        raise InputError(
            f"example {number}: {name} has the shape {tuple(values.shape)}, and its {size} tokens want {wanted}",
            hint="one value for each token of the example, special tokens included",
        )
    if feature.kind == "int" and values.is_floating_point():
        raise InputError(f"example {number}: {name} has {values.dtype}, not whole numbers", hint=feature.summary)
    return values.to(feature.dtype)
