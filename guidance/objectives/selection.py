"""Output logits only where they are asked for: the widest matrix of a language model, at 15 % of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def logits_at(model: nn.Module, places_N: Tensor, /, **inputs: Any) -> Any:
    """Call a language model; its output has ``logits`` of the chosen tokens alone, (N, V) instead of (B, T, V), also
    where a model with a second head calls them ``prediction_logits``.

    The projection to the vocabulary reads only these tokens, so what it would cost in time and memory for the others is
    saved; everything before it is computed as always.

    Args:
        model: a model with a language modelling head, or one that wraps it for training.
        places_N: int64, places of tokens in the batch, b * T + t.
        inputs: what the model is called with; no ``labels``.  Where the module holds several models, ``part`` names one.
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
    # a head may not pass through the module, as that of DeBERTa-v3
    output.logits = logits.flatten(0, 1)[places_N] if logits.dim() == 3 else logits
    return output


class _Call:
    """The places that the running call of `logits_at` wants.  Compiled models look here in every call; a hook of every
    call's own would be compiled in with the places of the first."""

    places_N: Tensor | None = None


_call = _Call()


def _select(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lets a head read the chosen tokens alone; all of them when it is called in another way."""
    return args if _call.places_N is None else (args[0].flatten(0, 1)[_call.places_N], *args[1:])


def places_of(chosen_BT: Tensor) -> Tensor:
    """The places of chosen tokens, (N,), for `logits_at`; on the CPU, or the device has to be waited for."""
    return torch.nonzero(chosen_BT.flatten())[:, 0]


def put_at(ids_BT: Tensor, places_N: Tensor, new_N: Tensor | int) -> Tensor:
    """A copy of the ids with others at some places."""
    flat = ids_BT.flatten().clone()
    flat[places_N] = new_N
    return flat.view_as(ids_BT)
