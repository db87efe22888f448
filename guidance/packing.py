"""Packing: documents end to end in one row, without padding, each read as if it stood alone.

Only attention looks beyond a token, so attention alone has to know where documents end.  There they are taken apart into a padded
batch (B, T), on which plans work as always; everything else computes the N tokens of the row (1, N).

transformers finds packed documents by positions that start anew, but in decoders only: an encoder that is given such positions
ignores them in silence and lets documents see each other.

Source: Krell et al. 2021, section 3.3 (attention and positions of packed documents).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

from guidance.errors import InputError, UnsupportedModel


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row are.

    Attributes:
        lengths: tokens of each document; a document may be empty.
        places_N: the place of each token of the row in the flattened batch (B, T), b * T + t, ascending.
    """

    lengths: tuple[int, ...]
    places_N: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: Any = None) -> Documents:
        """The documents of a batch that is padded on the right to the longest.

        Raises:
            InputError: there is no token.
        """
        most = max(lengths, default=0)
        if not most:
            raise InputError("there is nothing to pack: every document is empty")
        valid_BT = torch.arange(most) < torch.tensor(lengths)[:, None]
        places_N = torch.nonzero(valid_BT.flatten())[:, 0].to(device, non_blocking=True)
        return cls(tuple(lengths), places_N)

    @classmethod
    def of_mask(cls, valid_BT: Tensor) -> Documents:
        """The documents of a batch whose tokens are those where the mask is True.

        Raises:
            InputError: there is no token, or padding stands before one.
        """
        lengths_B = valid_BT.sum(-1)
        if not torch.equal(valid_BT, torch.arange(valid_BT.shape[1], device=valid_BT.device) < lengths_B[:, None]):
            raise InputError("only a batch that is padded on the right can be packed", hint='padding_side="right"')
        documents = cls.of(lengths_B.tolist(), valid_BT.device)
        if documents.shape != tuple(valid_BT.shape):
            raise InputError(
                f"the longest text has {documents.shape[1]} tokens, and the batch is padded to {valid_BT.shape[1]}",
                hint="pad to the longest text",
            )
        return documents

    @property
    def shape(self) -> tuple[int, int]:
        """Documents, and tokens of the longest: (B, T)."""
        return len(self.lengths), max(self.lengths)

    def is_packed(self, states_BTx: Tensor) -> bool:
        """Whether states are those of a packed row, (1, N, ...), and not of the padded batch, (B, T, ...)."""
        return tuple(states_BTx.shape[:2]) != self.shape

    def apart(self, states_1Nx: Tensor) -> Tensor:
        """The states of a row as a padded batch, (B, T, ...), with zeros at padding."""
        batch, length = self.shape
        empty = states_1Nx.new_zeros(batch * length, *states_1Nx.shape[2:])
        return empty.index_copy(0, self.places_N, states_1Nx[0]).unflatten(0, (batch, length))

    def together(self, states_BTx: Tensor) -> Tensor:
        """The states of a padded batch as a row, (1, N, ...)."""
        return states_BTx.flatten(0, 1).index_select(0, self.places_N)[None]

    def at(self, places_M: Tensor) -> Tensor:
        """Where tokens of the flattened batch (B, T) are in the row; none of them may be padding."""
        return torch.searchsorted(self.places_N, places_M)

    def inputs(self, model: Any, ids_BT: Tensor) -> dict[str, Any]:
        """The arguments with which a model reads the row: ids and positions, (1, N), and the mask of the batch (B, T).

        The mask passes through transformers as it is, to the attention function.

        Args:
            ids_BT: padded on the right.

        Raises:
            InputError: the ids are of another batch.
            UnsupportedModel: the model takes no positions.
        """
        if tuple(ids_BT.shape) != self.shape:
            raise InputError(f"the documents are a batch {self.shape}, and the ids one of {tuple(ids_BT.shape)}")
        bare = getattr(model, "module", model)
        if "position_ids" not in inspect.signature(bare.forward).parameters:
            raise UnsupportedModel(
                f"{type(bare).__name__} takes no position_ids, without which documents cannot be packed"
            )
        ids_1N = self.together(ids_BT)
        first = _first_position(bare)
        positions_1N = (self.places_N % self.shape[1] + first)[None]
        return {"input_ids": ids_1N, "position_ids": positions_1N, "attention_mask": self._mask(bare, ids_1N)}

    def _mask(self, model: Any, ids_1N: Tensor) -> Any:
        """What to give a model as its attention mask: (B, 1, T, T), or one for each kind of layer."""
        if any(isinstance(part, DebertaV2Encoder) for part in model.modules()):
            return torch.ones_like(ids_1N)  # it multiplies embeddings by it; its adapter knows the batch
        full = self.padding(ids_1N.device)
        if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
            return full
        places_T = torch.arange(self.shape[1], device=ids_1N.device)
        near_TT = (places_T[:, None] - places_T).abs() <= model.config.sliding_window
        return {"full_attention": full, "sliding_attention": full & near_TT}

    def padding(self, device: Any = None) -> Tensor:
        """Which keys each query of the batch may see: bool (B, 1, T, T)."""
        batch, length = self.shape
        lengths_B = torch.tensor(self.lengths, device=device)
        valid_BT = torch.arange(length, device=device) < lengths_B[:, None]
        return valid_BT[:, None, None].expand(batch, 1, length, length)

    def one_by_one(self, states: Tensor) -> bool:
        """Whether plain heads compute documents one after the other.  On a GPU one call for all is quicker, and compiled code
        would be made anew for other lengths."""
        return not (states.is_cuda or torch.compiler.is_compiling())

    def plain_attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask_B1TT: Tensor, **kwargs: Any
    ) -> Tensor:
        """Attention of unguided heads, document by document, without padding: from (1, H, N, D) to (1, N, H, D)."""
        window = kwargs.get("sliding_window") or max(self.lengths)
        outputs, lengths = [], list(self.lengths)
        parts = zip(lengths, *(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
        for number, (length, q, k, v) in enumerate(parts):
            mask = mask_B1TT[number : number + 1, :, :length, :length] if length > window else None
            if length:
                outputs.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
        return torch.cat(outputs, dim=1)


def _first_position(model: nn.Module) -> int:
    """The number of the first position: RoBERTa and its like count from the one after their padding id."""
    for part in model.modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            return int(part.padding_idx) + 1  # type: ignore[arg-type]
    return 0
