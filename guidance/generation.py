"""``model.generate`` of a guided model: it takes features of the prompt, which the tokens that it adds do not have.

Each call of the model gets its guidance as any other; see `guidance.calls`.  What guides read of earlier tokens is kept with the
cache; see `guidance.prefix`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from guidance.errors import InputError
from guidance.guided_model import GuidedModel, leading
from guidance.patterns.features import FEATURES, is_feature
from guidance.prefix import cache_of

_PROMPT: ContextVar[tuple[GuidedModel | None, Mapping[str, Tensor]]] = ContextVar("guide_prompt", default=(None, {}))
"""The handle of the model that is generating, and the features of its prompt."""


def generate(model: Any, *args: Any, guidance: Any = None, **kwargs: Any) -> Any:
    """As transformers does, with features of the prompt among the arguments.

    Args:
        guidance: the handle of the plan that the model follows.  The plan acts without it too.

    Raises:
        InputError: ``guidance`` is something else, or a feature has another length than the prompt.
    """
    handle = leading(model)
    if guidance is not None and guidance is not handle:
        raise InputError(
            f"generate takes the handle of the plan that this model follows as guidance, not this {type(guidance).__name__}",
            hint="features of the prompt are arguments of their own: generate(**inputs, guidance=handle, marked=marked)",
        )
    features = {name: kwargs.pop(name) for name in list(kwargs) if is_feature(name)}
    marked = {side: features[f"{side}marked"] for side in ("", "decoder_") if f"{side}marked" in features}
    features = features | {f"{side}written": torch.zeros_like(each) for side, each in marked.items()} | features
    prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    for name, column in features.items():
        if isinstance(prompt, Tensor) and not name.startswith("decoder_") and column.shape[1] != prompt.shape[1]:
            raise InputError(
                f"{name} has a length of {column.shape[1]}, and the prompt one of {prompt.shape[1]}",
                hint="give it for the tokens of the prompt, padding included; new tokens do not have it",
            )
    if handle is not None and handle.reads_prefix and model.device.type != "cpu":
        # transformers would compile steps with a static cache there, and each reads a text of another length
        if (settings := kwargs.get("generation_config")) is None:
            kwargs["disable_compile"] = True
        else:
            kwargs["generation_config"] = settings = copy.copy(settings)
            settings.disable_compile = True
    _, outer = _PROMPT.get()  # of the model for which this one guesses tokens
    token = _PROMPT.set((handle, {**outer, **features}))
    running = [] if handle is None else handle.generating
    running.append(True)  # in one step, also among threads
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        running.pop()
        _PROMPT.reset(token)


def new_tokens(guided: GuidedModel, batch: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """The arguments of a call for the tokens that are not in its cache, with the features of the prompt during generation.

    Args:
        batch: the arguments of the call that guidance is made from.
        given: its ``past_key_values``.

    Raises:
        InputError: a feature has values for pairs of tokens, and some of them are in the cache.
    """
    handle, features = _PROMPT.get() if guided.generating else (None, {})  # compiled code cannot look
    features = features if handle is guided else {}
    side = "" if guided.is_decoder else "decoder_"
    states, found = states_of(batch, side), {**features, **batch}
    if states is None:
        return found
    cached = cache_of(given)
    past = 0 if cached is None else int(cached.get_seq_length())
    new, mask = slice(past, past + states.shape[1]), f"{side}attention_mask"
    if given is not None and found.get(mask) is not None:
        is_static = cached is not None and cached.is_compileable
        found[mask] = _of_mask(found[mask], new) if is_static else found[mask][..., -states.shape[1] :]
    for name, column in found.items():
        if not is_feature(name) or not isinstance(column, Tensor) or name.startswith("decoder_") != bool(side):
            continue
        if past and column.dim() == 3:
            raise InputError(
                f"{name} has a value for each pair of tokens, and some of these are in a cache", hint="use_cache=False"
            )
        if name in features:
            feature = FEATURES[name.removeprefix("decoder_")]
            column = _of_text(column, len(states), new.stop, feature.name == "written" or feature.fill)
        found[name] = column[:, past:] if column.shape[1] == new.stop else column
    return found


def states_of(batch: Mapping[str, Any], side: str) -> Any:
    """The ids or the embeddings that an encoder or, with ``decoder_``, a decoder reads; None for neither."""
    names = (f"{side}input_ids", f"{side}inputs_embeds")
    return next((batch[name] for name in names if batch.get(name) is not None), None)


def _of_text(column: Tensor, batch_size: int, length: int, fill: float) -> Tensor:
    """A feature of prompts, padded to the texts that begin with them; there may be several texts for each prompt."""
    missing, dims = max(0, length - column.shape[1]), column.dim() - 1
    column = nn.functional.pad(column, (0, missing) * dims, value=fill)
    return column[(slice(None), *(slice(length),) * dims)].repeat_interleave(batch_size // len(column), dim=0)


def _of_mask(masks: Any, new: slice) -> Tensor | None:
    """Which new tokens are valid, (B, Q), read off the masks of a static cache, (B, 1, Q, K): whether they see themselves."""
    each = masks.values() if isinstance(masks, Mapping) else [masks]
    mask = next((mask for mask in each if mask is not None), None)
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask[..., new]
    diagonal = new.start - max(0, new.stop - mask.shape[-1])
    valid_BQ: Tensor = mask[:, 0].diagonal(diagonal, 1, 2)
    return valid_BQ
