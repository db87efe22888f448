"""Methods of a model that say or do something else while a plan is installed.

They are replaced on the object, not in its class, whose name configurations and auto classes know.  Each is a function of this
module with the model bound to it, so that the model can still be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from guidance.errors import InputError

MARKER = "open_with.guidance_load.because_this_model_needs_its_plan"
"""The name of a tensor of one zero among the saved weights of a model whose plan shapes its outputs."""


def replace_methods(model: nn.Module) -> Callable[[], None]:
    """Make ``save_pretrained`` mark the weights of a model that needs its plan, and ``set_attn_implementation`` refuse.

    Returns:
        A function that undoes it.
    """
    replaced: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        if name not in module.__dict__:  # by the plan that was installed before
            module.__dict__[name] = partial(function, module)
            replaced.append((module, name))

    replace(model, "save_pretrained", _save_pretrained)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            replace(part, "set_attn_implementation", _refuse_implementation)
    return partial(_give_back, replaced)


def drop_marker(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the marker out of weights before they are loaded into a guided model, which has no such tensor."""
    state_dict.pop(prefix + MARKER, None)


def _give_back(replaced: list[tuple[nn.Module, str]]) -> None:
    for module, name in replaced:
        module.__dict__.pop(name, None)


def _save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """As transformers does; transformers then reports the marker to whoever opens the folder without the plan."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(
            "save_pretrained would write an adapter without the plan", hint="guidance.save(handle, folder) writes both"
        )
    if any(handle.shaping for handle in model.guide_handles):
        state_dict = dict(model.state_dict() if state_dict is None else state_dict)
        state_dict[MARKER] = torch.zeros(1, dtype=torch.uint8)
    return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def _refuse_implementation(model: nn.Module, *_: Any, **__: Any) -> None:
    raise InputError(
        "a plan is installed in this model, and another attention implementation would not follow it",
        hint="handle.remove() first, or choose how heads are computed by install(..., backend=...)",
    )
