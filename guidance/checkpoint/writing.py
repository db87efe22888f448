"""Writes model folders: collects the files as bytes, then replaces the folder's content step by step."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.checkpoint.adapters import adapter_files, has_adapter, plain_names
from guidance.checkpoint.layout import (
    ADAPTER_FILE,
    CONFIG_FILE,
    EXTRA_FILE,
    INDEX_FILE,
    MARKER,
    PICKLED_FILES,
    PLAN_FILE,
    PLAN_KEY,
    PROGRESS_FILE,
    PROGRESS_KEY,
    WEIGHTS_FILE,
)
from guidance.errors import InputError, MachineError
from guidance.guided_model import installed_in
from guidance.installation import Handle
from guidance.plan import Plan
from guidance.sites import is_added


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model by name, copied to the CPU, with those that a plan added; tied tensors come once."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors_of(model).items()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What `weights` copies."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def weight_files(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, bytes]:
    """The files for the tensors that `weights` returns: the model's own, and those that the plan added."""
    own = {name: tensor for name, tensor in tensors.items() if not is_added(name)}
    if plan.shapes_outputs:
        own[MARKER] = torch.zeros(1, dtype=torch.uint8)
    return {WEIGHTS_FILE: safetensors.torch.save(own, metadata={"format": "pt"}), **extra_files(tensors)}


def extra_files(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The file for the tensors that a plan added; none if there are none."""
    extra = {name: tensor for name, tensor in tensors.items() if is_added(name)}
    return {EXTRA_FILE: safetensors.torch.save(extra, metadata={"format": "pt"})} if extra else {}


def model_files(model: PreTrainedModel, plan: Plan) -> dict[str, bytes]:
    """The files of a model folder by name: configuration, weights and plan; of an adapted model, those of its adapter."""
    if has_adapter(model):
        files = {**adapter_files(model), PLAN_FILE: plan.dumps().encode(), **extra_files(plain_names(weights(model)))}
        if (progress := getattr(model.config, PROGRESS_KEY, None)) is not None:
            files[PROGRESS_FILE] = json.dumps(progress).encode()
        return files
    files = {CONFIG_FILE: config_file(model, plan), **weight_files(weights(model), plan)}
    files[PLAN_FILE] = plan.dumps().encode()
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def config_file(model: PreTrainedModel, plan: Plan) -> bytes:
    """The configuration of a model, which names the file of its plan if the plan shapes outputs."""
    settings = model.config.to_dict().items()
    config = {key: value for key, value in settings if not key.startswith(("_attn", "_name_or_path"))}
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    config.pop(PLAN_KEY, None)
    if plan.shapes_outputs:
        config[PLAN_KEY] = PLAN_FILE
    return (json.dumps(config, indent=2, sort_keys=True, default=str) + "\n").encode()


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def save(
    guided: Handle | PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, plan: Plan | None = None
) -> None:
    """Write a guided model to a folder, from which `load` restores it; of a model with an adapter of PEFT, the adapter.

    Args:
        guided: the handle that `install` returned, or a model together with its ``plan``.
        folder: a new folder, or a model folder, whose weights and plan are replaced.
        tokenizer: saved beside the model, for patterns that read token features off it.

    Raises:
        InputError: the folder holds other files and no model, or a guided model comes without its plan.
        MachineError: the folder cannot be written.
    """
    if isinstance(guided, Handle):
        model, plan = guided.model, plan or guided.plan
    else:
        model = guided
        if plan is None and (installed_in(model) or any(map(is_added, model.state_dict()))):
            raise InputError("a guided model is saved with its plan", hint="save(handle, folder), or give plan=")
    plan = plan or Plan()
    files = model_files(model, plan) | (tokenizer_files(tokenizer) if tokenizer is not None else {})
    write_folder(Path(folder), files)


def write_folder(folder: Path, files: Mapping[str, bytes], *, among: bool = False) -> None:
    """Write the files of a model folder, its configuration last: without it, an interrupted write is no model folder.

    Args:
        among: the folder may hold other files, as a checkpoint of a Trainer does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        last = CONFIG_FILE if CONFIG_FILE in files else ADAPTER_FILE
        partials = {path.name for path in folder.glob(".*.partial")}
        present = {path.name for path in folder.iterdir()} - partials
        others = present - set(files)
        if last == ADAPTER_FILE and CONFIG_FILE in present:
            raise InputError(f"{folder}: holds a whole model", hint="an adapter needs a folder of its own")
        is_ours = last in present or f".{last}.partial" in partials  # an interrupted write leaves the second alone
        if others and not is_ours and not among:
            raise InputError(
                f"{folder}: holds {min(others)!r} and is no model folder", hint="name a folder that is empty or new"
            )
        for name in partials - {f".{name}.partial" for name in files}:
            (folder / name).unlink()
        for name, data in files.items():
            with (folder / f".{name}.partial").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        (folder / last).unlink(missing_ok=True)
        for name in others:
            if name in (INDEX_FILE, *PICKLED_FILES) or name.endswith(".safetensors"):
                (folder / name).unlink()  # weights of the previous model
        for name in sorted(files, key=lambda name: name == last):
            os.replace(folder / f".{name}.partial", folder / name)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written ({error.strerror or error})") from error
