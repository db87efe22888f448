"""Causal language modelling: each token is predicted from the tokens of its own document before it.

A sequence may hold several documents, ``begin A separator B separator``.  A separator between two documents belongs to both: it is
the last token that is predicted in the first one, and the token from which the first word of the second one is predicted.  No
attention crosses from one document to another, and positions count from the start of the document, so a document is read as if it
stood alone.

Source: Radford et al. 2019, section 2, equation 1; Grattafiori et al. 2024, section 3.2 (a mask that keeps the documents of a
sequence apart).
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from guidance.errors import UnsupportedModel
from guidance.models.canary import evaluating
from guidance.objectives.masked_lm import IGNORED

_WINDOWS = ("sliding_window", "local_attention")
"""Settings in the configuration of a model that limit some of its layers to a window of tokens."""

_ROUNDING = 1e-4
"""The largest change of logits, relative to the largest logit, that counts as rounding.  It arises in half precision, and where
the experts of a model share a batch."""


def starts_of(ids: NDArray[np.int64], separator: int) -> NDArray[np.bool_]:
    """Whether a document begins at each token, (T,): at the first token, and at each separator that is not the last token."""
    starts = ids == separator
    starts[:1], starts[1:][-1:] = True, False
    return starts


def positions_of(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The place of each token in its document, (T,), from 0.

    Example:
        Documents that begin at 0 and 3 of a sequence of five tokens give 0, 1, 2, 0, 1.
    """
    places = np.arange(len(starts))
    first: NDArray[np.int64] = np.maximum.accumulate(np.where(starts, places, 0))
    return places - first


def next_words(ids: NDArray[np.int64], starts: NDArray[np.bool_], words: NDArray[np.int64]) -> NDArray[np.int64]:
    """The label of each token, (T,): the token after it, if that is a word or the separator before the next document; else
    `IGNORED`.

    The last separator of a sequence is no label, since its document may go on in the next sequence.

    Args:
        words: the ids that are always predicted; see `words_of`.
    """
    labels = np.full(len(ids), IGNORED)
    labels[:-1] = np.where(np.isin(ids[1:], words) | starts[1:], ids[1:], IGNORED)
    return labels


def documents_of(
    ids: NDArray[np.int64], separator: int, words: NDArray[np.int64]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The documents of a sequence, each as if it stood alone: its ids, and its labels.

    Unlike the labels of `next_words`, these are not moved: a token that is predicted is its own label, and others have
    `IGNORED`.  A separator between two documents is part of both.
    """
    starts = starts_of(ids, separator)
    labels = np.append(IGNORED, next_words(ids, starts, words)[:-1])
    bounds = [*np.flatnonzero(starts).tolist(), len(ids)]
    documents = []
    for start, end in itertools.pairwise(bounds):
        shared = slice(start, end + 1)  # with the separator that begins the next one
        own = labels[shared].copy()
        own[0] = IGNORED
        documents.append((ids[shared], own))
    return documents


def words_of(tokenizer: Any) -> NDArray[np.int64]:
    """The ids of a tokenizer that are always predicted, ascending: those of all tokens that are not special, and of the unknown
    token."""
    never = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} | {tokenizer.sep_token_id}
    return np.setdiff1d(np.arange(len(tokenizer)), sorted(never))


def packed(model: Any, ids_BT: Tensor, positions_BT: Tensor) -> dict[str, Tensor]:
    """The inputs with which a model reads several documents in one sequence, none of which sees another.

    If all layers see all earlier tokens, the inputs have an attention mask, (B, 1, T, T), True where a query sees a key.  Where
    some layers see a window only, such a mask would replace the window.  There transformers finds the documents by their
    positions, which it does in decoders that are called without mask and cache.  Call the model with ``use_cache=False`` in
    either case.

    Args:
        positions_BT: see `positions_of`; 0 at padding, so that each padding token is a document of its own.

    Raises:
        UnsupportedModel: the model takes no positions.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{type(model).__name__} takes no position_ids, by which documents are kept apart")
    inputs = {"input_ids": ids_BT, "position_ids": positions_BT}
    if any(getattr(model.config, name, None) for name in _WINDOWS):
        return inputs
    documents_BT = (positions_BT == 0).cumsum(-1)
    allowed_BTT = (documents_BT[:, :, None] == documents_BT[:, None]).tril()
    mask_B1TT = allowed_BTT[:, None]
    if model.config._attn_implementation == "eager":  # it adds masks to scores
        lowest = torch.finfo(model.dtype).min
        mask_B1TT = torch.zeros_like(mask_B1TT, dtype=model.dtype).masked_fill(~mask_B1TT, lowest)
    return {**inputs, "attention_mask": mask_B1TT}


def check_causal(model: nn.Module) -> None:
    """Raises UnsupportedModel when tokens of a model see later ones, or those of another document of their sequence.

    Reads two documents of four tokens, in evaluation mode and without random numbers.  Call it before a plan is installed.
    """
    any_model: Any = model
    device, size = next(model.parameters()).device, any_model.config.vocab_size
    ids_T = torch.arange(8, device=device) % size
    positions_BT = torch.arange(8, device=device)[None] % 4

    def logits(ids_T: Tensor, packs: bool) -> Tensor:
        given = packed(model, ids_T[None], positions_BT) if packs else {"input_ids": ids_T[None]}
        found: Tensor = model(**given, use_cache=False).logits[0].float()
        return found

    def moves(changed: slice, read: slice, *, packs: bool) -> bool:
        other_T = ids_T.clone()
        other_T[changed] = (other_T[changed] + 3) % size
        before, after = (logits(ids, packs)[read] for ids in (ids_T, other_T))
        return bool((after - before).abs().max() > _ROUNDING * before.abs().max())

    name = type(model).__name__
    with evaluating(model), torch.no_grad():
        if moves(slice(4, None), slice(0, 4), packs=False):
            raise UnsupportedModel(
                f"{name}: its tokens see later ones, so it would read what it is to predict",
                hint="causal language models, such as GPT-2 or Llama, do not; BERT and its like need is_decoder in config.json",
            )
        if moves(slice(0, 4), slice(4, None), packs=True):
            raise UnsupportedModel(f"{name}: documents in one sequence see each other, whatever it is told")
