"""Token features: what a pattern may know about a batch.

Shapes in this package: B examples, T padded length, Q query tokens, K key tokens, H heads, D width, V vocabulary.
Rows are queries, columns are keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from guidance.errors import InputError


@dataclass(frozen=True)
class Tokens:
    """A batch of token sequences as the model sees it.

    Attributes:
        ids_BT: token ids, int64; positions that objectives masked hold the mask token.
        valid_BT: bool, False at padding, which never attends and is never attended to.
        columns: further per-token features by name, each (B, T), for example ``period`` (bool).
    """

    ids_BT: Tensor
    valid_BT: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in (("attention mask", self.valid_BT), *self.columns.items()):
            if column.shape != self.ids_BT.shape:
                raise InputError(f"{name} has shape {tuple(column.shape)}, the ids have {tuple(self.ids_BT.shape)}")

    def column(self, name: str) -> Tensor:
        """A feature by name.

        Raises:
            InputError: the batch does not have it; the message says where it comes from.
        """
        if name not in self.columns:
            raise InputError(f"the batch has no feature {name!r}", hint=SOURCES.get(name))
        return self.columns[name]

    @property
    def lengths_B(self) -> Tensor:
        """Valid tokens of each example, special tokens included."""
        return self.valid_BT.sum(-1)


SOURCES: Mapping[str, str] = {
    "delimiter": "it is read off the token ids: give `install` the tokenizer",
    "period": "it is read off the token ids: give `install` the tokenizer",
}
"""Where a feature comes from, for messages."""


@dataclass(frozen=True)
class Vocabulary:
    """The features that follow from a token's id alone.

    Attributes:
        columns_V: by name, a (V,) tensor: ``delimiter`` marks the tokens that open, close or part sequences
            (``<s>``, ``</s>``, ``[CLS]``, ``[SEP]``), ``period`` every token that is a full stop and nothing else.
    """

    columns_V: Mapping[str, Tensor]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Read the features off a Hugging Face tokenizer."""
        vocabulary = tokenizer.get_vocab()
        size = max(len(tokenizer), 1 + max(vocabulary.values(), default=0))  # some leave ids out
        delimiter, period = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        for name in ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"):
            if (token_id := getattr(tokenizer, name, None)) is not None:
                delimiter[token_id] = True
        for token, token_id in vocabulary.items():
            # byte-level BPE, SentencePiece and WordPiece mark word beginnings or continuations
            if token.replace("Ġ", "").replace("▁", "").removeprefix("##") == ".":
                period[token_id] = True
        return cls({"delimiter": delimiter, "period": period})

    def columns(self, ids_BT: Tensor) -> dict[str, Tensor]:
        """Every feature for a batch of ids."""
        return {name: values.to(ids_BT.device)[ids_BT] for name, values in self.columns_V.items()}
