"""Loads guided models: the model of a folder, its plan installed, and the parameters that the plan added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.checkpoint.adapters import add_adapter, base_folder, has_adapter, plain_names, restore_adapter
from guidance.checkpoint.layout import ADAPTER_FILE, CONFIG_FILE, PLAN_FILE, TARGET_FOLDER
from guidance.checkpoint.opening import (
    find_plan,
    open_model,
    read_extra,
    read_plan,
    read_progress,
    read_tokenizer,
    read_weights,
)
from guidance.errors import InputError
from guidance.installation import Handle, install
from guidance.plan import Plan
from guidance.sites import EXTRA, is_added

_log = logging.getLogger("guide.checkpoint")  # a child of the logger that the command line shows


def load(
    folder: str | Path, auto_class: Any = None, tokenizer: Any = None, *, base: str | Path | None = None, **options: Any
) -> tuple[PreTrainedModel, Handle]:
    """A guided model, in evaluation mode, with its plan installed.

    It opens what `save` and ``guide pretrain`` wrote, what ``save_pretrained`` and Trainers wrote of a guided model, and
    adapters of PEFT; the model of an adapter comes back as a ``PeftModel``.

    Args:
        auto_class: for example ``AutoModel``; by default the class that was saved.
        tokenizer: by default the one in the folder, if any.
        base: the folder of the model to which an adapter belongs; by default the one that the adapter names.
        options: further arguments of `guidance.installation.install`; ``training=True`` also needs the inputs that only
            losses read.

    Returns:
        The model and its handle, as `guidance.installation.install` returns it.

    Raises:
        InputError: the folder has no plan, or weights, plan and configuration do not fit each other.
        MachineError: PEFT is not installed, and the folder holds an adapter.
    """
    folder = Path(folder)
    if (folder / ADAPTER_FILE).exists() and not (folder / CONFIG_FILE).exists():
        return _load_adapter(folder, auto_class, tokenizer, base, options)
    plan = read_plan(folder)
    model, _ = open_model(folder, auto_class, "auto")
    handle = _install(model, plan, [folder], tokenizer, options)
    model.eval()
    return model, handle


def _install(
    model: PreTrainedModel, plan: Plan, folders: Sequence[Path], tokenizer: Any, options: Mapping[str, Any]
) -> Handle:
    """Install a plan, with the tokenizers and the added parameters of the first folder that has them."""

    def first(read: Callable[[Path], Any]) -> Any:
        return next(filter(None, map(read, folders)), None)

    own = tokenizer if tokenizer is not None else first(read_tokenizer)
    decoder_tokenizer = first(lambda folder: read_tokenizer(folder / TARGET_FOLDER))
    defaults = {"decoder_tokenizer": decoder_tokenizer, "training": False, "progress": first(read_progress)}
    handle = install(model, plan, own, **{**defaults, **options})
    extra = first(read_extra) or {}
    _fill(model, extra, str(folders[0]), partial(_names_in, extra, f"{model.base_model_prefix}."))
    return handle


def _names_in(extra: Mapping[str, Tensor], trunk: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by their names in a file, in which the model may have a head that it lacks here, or the reverse."""
    own = {name: tensor for name, tensor in state.items() if is_added(name)}
    theirs, ours = (any(name.startswith(trunk) for name in names) for names in (extra, own))
    if extra and theirs != ours:
        return {trunk + name if theirs else name.removeprefix(trunk): tensor for name, tensor in own.items()}
    return own


def _load_adapter(
    folder: Path, auto_class: Any, tokenizer: Any, base: str | Path | None, options: Mapping[str, Any]
) -> tuple[Any, Handle]:
    """A model with an adapter of PEFT, and the plan of the adapter's folder or of the model's."""
    base = base_folder(folder, base)
    plan = find_plan(folder) or find_plan(base)
    if plan is None:
        raise InputError(
            f"{folder}: neither the adapter nor its model in {base} has a plan",
            hint=f"PEFT saves no plan; guidance.save(handle, folder) does, or put it there as {PLAN_FILE}",
        )
    model, _ = open_model(base, auto_class, "auto")
    handle = _install(model, plan, [folder, base], tokenizer, options)
    return add_adapter(model, folder).eval(), handle


def load_model(folder: str | Path, auto_class: Any, plan: Plan | None = None, **fields: Any) -> PreTrainedModel:
    """A model from a local folder, in float32 and without its plan.

    Args:
        auto_class: for example ``AutoModelForMaskedLM``.
        plan: the plan that the caller will install, knowing that of the model; without one, warns if the model needs its plan.
        fields: of its configuration to change, such as ``num_labels``.  A head that they give another size starts anew.
    """
    folder = Path(folder)
    model, needs_plan = open_model(folder, auto_class, torch.float32, fields)
    if needs_plan and plan is None:
        _log.warning(
            "%s: this model was trained with heads that its plan guides, and computes something else without; "
            "its plan is not applied (guidance.load does)",
            folder,
        )
    return model


def restore(model: PreTrainedModel, folder: Path, plan: Plan) -> None:
    """Copy the weights of a folder that `save` wrote into a model on which the same plan is installed."""
    if read_plan(folder) != plan:
        raise InputError(f"{folder}: was written with another plan", hint=f"compare it with {folder / PLAN_FILE}")
    if has_adapter(model):
        restore_adapter(model, folder)
        _fill(model, read_extra(folder), str(folder), plain_names)
        return
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    own = {name: tensor for name, tensor in model.state_dict().items() if not is_added(name) and name not in tied}
    stored = read_weights(folder)
    _check_names(own, stored, str(folder))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    _fill(model, read_extra(folder), str(folder))


def take_over(handle: Handle, folder: Path) -> None:
    """Copy what the plan of another folder had learned: gates, adversaries and added heads.

    A guide takes over from a row that is equal, or else from one of the same mechanism with parameters of the same shapes.
    """
    if not (stored := _by_key(read_extra(folder))):
        return
    own = _by_key({name: tensor for name, tensor in handle.model.state_dict().items() if is_added(name)})
    pairs = [*_counterparts(handle, folder), *zip(stored, stored, strict=True)]
    for key, other in pairs:
        there, here = stored.get(key), own.get(other)
        if there and here and {n: t.shape for n, t in there.items()} == {n: t.shape for n, t in here.items()}:
            for name, tensor in there.items():
                if not torch.isfinite(tensor).all():
                    raise InputError(f"{folder}: what {key} learned is not finite")
                with torch.no_grad():
                    here[name].copy_(tensor)
            del stored[key], own[other]


def _counterparts(handle: Handle, folder: Path) -> Iterator[tuple[str, str]]:
    """The keys of the guides of another folder, each with those of guides here that may take over from it, best first."""
    try:
        plan, progress = find_plan(folder) or Plan(), read_progress(folder)
    except InputError:  # the folder has lost its plan
        return
    for number, guide in enumerate(plan.guides):
        same = (guide, guide.inherited(progress))
        alike = [n for n, other in enumerate(handle.plan.guides) if other.mechanism == guide.mechanism]
        for n in sorted(alike, key=lambda n: handle.plan.guides[n] not in same):
            yield plan.key_of(number), handle.plan.key_of(n)


def _by_key(extra: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors that a plan added, by the key of their guide and by the rest of their name; see `Plan.key_of`."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in extra.items():
        before, _, rest = name.rpartition(f"{EXTRA}.")
        key, _, parameter = rest.partition(".")
        tensors.setdefault(key, {})[f"{before}{parameter}"] = tensor
    return tensors


def _fill(
    model: nn.Module,
    extra: Mapping[str, Tensor],
    source: str,
    named: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> None:
    """Copy stored parameters, whose names in the file ``named`` gives, into the modules that a plan added."""
    wanted = {name: tensor for name, tensor in named(model.state_dict()).items() if is_added(name)}
    _check_names(wanted, extra, source)
    for name, stored in extra.items():
        if not torch.isfinite(stored).all():
            raise InputError(f"{source}: {name} is not finite")
        if stored.dtype != wanted[name].dtype:
            raise InputError(f"{source}: {name} is {stored.dtype}, the model has {wanted[name].dtype}")
        with torch.no_grad():
            wanted[name].copy_(stored)


def _check_names(wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor], source: str) -> None:
    for name in sorted(set(wanted) - set(stored)):
        raise InputError(f"{source}: lacks {name}", hint="the folder was not written by guidance.save")
    for name in sorted(set(stored) - set(wanted)):
        raise InputError(f"{source}: has {name}, which the plan does not add", hint=f"was {PLAN_FILE} changed?")
    for name, tensor in stored.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"shape {tuple(tensor.shape)}, the model expects {tuple(wanted[name].shape)}"
            raise InputError(f"{source}: {name} has {shapes}")
