"""Output logits of chosen tokens only: the output matrix is the widest of a language model, and 15 % of the tokens need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def logits_at(model: nn.Module, places_N: Tensor, /, **inputs: Any) -> Any:
    """Call a language model; its output has ``logits`` of the chosen tokens only, (N, V) instead of (B, T, V).

    The output projection reads only these tokens, which saves its time and memory for all others.  A model with a second
    head calls its logits ``prediction_logits``; they are returned as ``logits`` too.

    Args:
        model: a model with a language modelling head, or its wrapper for data parallelism.
        places_N: int64, positions of tokens in the flattened batch, b * T + t.
        inputs: the arguments of the model, without ``labels``.  If the module holds several models, ``part`` names one.
    """
    bare: Any = getattr(model, "module", model)
    head = (getattr(bare, inputs["part"]) if "part" in inputs else bare).get_output_embeddings()
    if head is not None and _select not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_select)
    _call.places_N = places_N
    try:
        output = model(**inputs)
    finally:
        _call.places_N = None
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    # some heads do not run their module, such as that of DeBERTa-v3
    output.logits = logits.flatten(0, 1)[places_N] if logits.dim() == 3 else logits
    return output


class _Call:
    """The places of the current call of `logits_at`.  Compiled models read them here in every call; a new hook for each call
    would be compiled with the places of the first."""

    places_N: Tensor | None = None


_call = _Call()


def _select(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook that lets the head read only the chosen tokens; outside `logits_at` it reads all."""
    return args if _call.places_N is None else (args[0].flatten(0, 1)[_call.places_N], *args[1:])


def places_of(chosen_BT: Tensor) -> Tensor:
    """The places of chosen tokens, (N,), for `logits_at`.  Call it on the CPU: on a device it would wait for the device."""
    return torch.nonzero(chosen_BT.flatten())[:, 0]


def put_at(ids_BT: Tensor, places_N: Tensor, new_N: Tensor | int) -> Tensor:
    """A copy of the ids with new ids at some places."""
    flat = ids_BT.flatten().clone()
    flat[places_N] = new_N
    return flat.view_as(ids_BT)
