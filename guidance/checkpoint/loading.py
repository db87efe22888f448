"""Loads guided models: the model of a folder, its plan installed, and the parameters that the plan added."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.checkpoint.layout import EXTRA_FILE, MARKER, PLAN_FILE, TARGET_FOLDER, WEIGHTS_FILE, is_extra
from guidance.checkpoint.opening import open_model, read_plan, read_tensors, read_tokenizer
from guidance.errors import InputError
from guidance.installation import Handle, install
from guidance.plan import Plan

_log = logging.getLogger("guide.checkpoint")  # a child of the logger that the command line shows


def load(
    folder: str | Path, auto_class: Any = None, tokenizer: Any = None, **options: Any
) -> tuple[PreTrainedModel, Handle]:
    """The guided model that `save` or ``guide pretrain`` wrote, in evaluation mode, with its plan installed.

    Args:
        auto_class: for example ``AutoModel``; by default the class that was saved.
        tokenizer: by default the one in the folder, if any.
        options: further arguments of `guidance.installation.install`; ``training=True`` also needs the inputs that only
            losses read.

    Returns:
        The model and its handle, as `guidance.installation.install` returns it.

    Raises:
        InputError: the folder has no plan, or weights, plan and configuration do not fit each other.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    model, _ = open_model(folder, auto_class, "auto")
    extra = _read_extra(folder)
    options = {"decoder_tokenizer": read_tokenizer(folder / TARGET_FOLDER), "training": False, **options}
    handle = install(model, plan, tokenizer if tokenizer is not None else read_tokenizer(folder), **options)
    _fill(model, extra, str(folder / EXTRA_FILE))
    model.eval()
    return model, handle


def load_model(folder: str | Path, auto_class: Any, plan: Plan | None = None) -> PreTrainedModel:
    """A model from a local folder, in float32 and without its plan.

    Args:
        auto_class: for example ``AutoModelForMaskedLM``.
        plan: the plan that the caller will install; warns if the model needs another one.

    Raises:
        InputError: the folder has no configuration or no safetensors, or they do not fit each other.
    """
    folder = Path(folder)
    model, needs_plan = open_model(folder, auto_class, torch.float32)
    if needs_plan and not (plan is not None and (folder / PLAN_FILE).exists() and read_plan(folder) == plan):
        _log.warning(
            "%s: this model was trained with heads that %s guides, and computes something else without; "
            "its plan is not applied (guidance.load does)",
            folder,
            PLAN_FILE,
        )
    return model


def restore(model: PreTrainedModel, folder: Path, plan: Plan) -> None:
    """Copy the weights of a folder that `save` wrote into a model on which the same plan is installed.

    Raises:
        InputError: the folder holds another plan, or the weights of another model.
    """
    if read_plan(folder) != plan:
        raise InputError(f"{folder}: was written with another plan", hint=f"compare it with {folder / PLAN_FILE}")
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    own = {name: tensor for name, tensor in model.state_dict().items() if not is_extra(name) and name not in tied}
    stored = read_tensors(folder / WEIGHTS_FILE)
    stored.pop(MARKER, None)
    _check_names({name: tensor.shape for name, tensor in own.items()}, stored, str(folder / WEIGHTS_FILE))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    _fill(model, _read_extra(folder), str(folder / EXTRA_FILE))


def take_over(handle: Handle, folder: Path) -> bool:
    """Copy learned gates, adversaries and added heads from another folder, if both plans add the same parameters.

    Returns:
        False if the folder's plan added other parameters than this one; nothing is copied then.

    Raises:
        InputError: the file is damaged.
    """
    if not (folder / EXTRA_FILE).exists():
        return True
    stored = read_tensors(folder / EXTRA_FILE)
    own = {name: tensor for name, tensor in handle.model.state_dict().items() if is_extra(name)}
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
        return False
    stored = {name: tensor.to(own[name].dtype) for name, tensor in stored.items()}
    _fill(handle.model, stored, str(folder / EXTRA_FILE))
    return True


def _read_extra(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / EXTRA_FILE) if (folder / EXTRA_FILE).exists() else {}


def _fill(model: nn.Module, extra: Mapping[str, Tensor], source: str) -> None:
    """Copy stored parameters into the modules that a plan added."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if is_extra(name)}
    _check_names({name: tensor.shape for name, tensor in wanted.items()}, extra, source)
    for name, stored in extra.items():
        if not torch.isfinite(stored).all():
            raise InputError(f"{source}: {name} is not finite")
        if stored.dtype != wanted[name].dtype:
            raise InputError(f"{source}: {name} is {stored.dtype}, the model has {wanted[name].dtype}")
        with torch.no_grad():
            wanted[name].copy_(stored)


def _check_names(wanted: Mapping[str, torch.Size], stored: Mapping[str, Tensor], source: str) -> None:
    for name in sorted(set(wanted) - set(stored)):
        raise InputError(f"{source}: lacks {name}", hint="the folder was not written by guidance.save")
    for name in sorted(set(stored) - set(wanted)):
        raise InputError(f"{source}: has {name}, which the plan does not add", hint=f"was {PLAN_FILE} changed?")
    for name, tensor in stored.items():
        if tensor.shape != wanted[name]:
            raise InputError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model expects {tuple(wanted[name])}"
            )
