"""Methods of a model that say or do something else while a plan is installed.

They are replaced on the object, not in its class, whose name configurations and auto classes know.  Each is a function of this
module with the model bound to it, so that the model can still be copied and pickled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from guidance.errors import InputError

MARKER = "open_with.guidance_load.because_this_model_needs_its_plan"
"""The name of a tensor of one zero among the saved weights of a model whose plan shapes its outputs."""


class WholeForward:
    """What stands in the place of ``model.forward``: called by itself, it calls the model as a whole.

    Guidance comes by hooks, which ``model(...)`` runs, and ``model.forward(...)`` does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.in_use = model, True

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(type(self.model).forward, self.model))

    def __call__(self, *args: Any, guide_called: nn.Module | None = None, **kwargs: Any) -> Any:
        if guide_called is None and self.in_use:
            return self.model(*args, **kwargs)
        return type(self.model).forward(guide_called or self.model, *args, **kwargs)


def replace_forward(model: nn.Module) -> Callable[[], None]:
    """Make ``model.forward(...)`` call the model as a whole; returns a function that undoes it."""
    if "forward" in model.__dict__:
        raise InputError("another library has replaced model.forward", hint="install the plan before that")
    model.__dict__["forward"] = forward = WholeForward(model)
    return partial(_forward_as_before, forward, model.register_forward_pre_hook(_name_called, with_kwargs=True))


def _name_called(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Tell `WholeForward` that the hooks have run, and on which copy of the model: data parallelism makes several."""
    return args, {**kwargs, "guide_called": module}


def _forward_as_before(forward: WholeForward, hook: Any) -> None:
    forward.in_use = False  # another library may have kept it
    if forward.model.__dict__.get("forward") is forward:
        del forward.model.__dict__["forward"]
    hook.remove()


def drop_marker(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the marker out of weights before they are loaded into a guided model, which has no such tensor."""
    state_dict.pop(prefix + MARKER, None)


def save_pretrained(
    whole: Any,
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """As transformers does, with the marker, which it then reports to whoever opens the folder without the plan."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(
            "save_pretrained would write an adapter without the plan", hint="guidance.save(handle, folder) writes both"
        )
    if any(handle.plan.shapes_outputs for handle in whole.guide_handles):
        state_dict = dict(model.state_dict() if state_dict is None else state_dict)
        state_dict[MARKER] = torch.zeros(1, dtype=torch.uint8)
    return type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def refuse_implementation(model: nn.Module, *_: Any, **__: Any) -> None:
    """Takes the place of ``set_attn_implementation`` of a guided model, and always raises InputError."""
    raise InputError(
        "a plan is installed in this model, and another attention implementation would not follow it",
        hint="handle.remove() first, or choose how heads are computed by install(..., backend=...)",
    )
