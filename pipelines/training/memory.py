"""Less memory or quicker steps for a model: activation checkpointing and ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from guidance.errors import InputError

COMPILER = "inductor"
"""The backend of ``torch.compile``."""


def checkpoint_activations(models: Iterable[Any]) -> None:
    """Let models keep only the inputs of their layers for the backward pass, which computes the rest again.

    Raises:
        InputError: a model does not support this.
    """
    for model in models:
        if not model.supports_gradient_checkpointing:
            raise InputError(
                f"--gradient-checkpointing: {type(model).__name__} does not support it",
                hint="--micro-batches saves memory too",
            )
        with warnings.catch_warnings():  # newer versions of transformers rename the method
            warnings.simplefilter("ignore", FutureWarning)
            # reentrant checkpointing would lose the gradients of what guides read inside layers
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def compile_model(model: nn.Module) -> None:
    """Compile a model in place; losses on raw scores read a number of rows off the batch, which stays in the graph."""
    import torch
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        # attacks read hidden states; torch.compile cannot trace the installation of the hooks that capture them
        if isinstance(module, PreTrainedModel) and getattr(module, "_can_record_outputs", None):
            maybe_install_capturing_hooks(module)
    torch._dynamo.config.capture_scalar_outputs = True
    model.compile(backend=COMPILER)
