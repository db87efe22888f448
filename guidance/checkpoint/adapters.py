"""Adapters of PEFT: folders of small weights that are added to those of another model.

An adapter names the folder of its model, and PEFT saves no plan.  So the plan and what it has learned are taken from the folder
of the adapter, where `guidance.checkpoint.save` puts them, else from the folder of the model.  Only LoRA is opened.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.checkpoint.layout import ADAPTER_FILE, ADAPTER_WEIGHTS_FILE
from guidance.checkpoint.opening import FAILURES, check_finite, read_json, read_tensors
from guidance.errors import InputError, MachineError

_PREFIX = "base_model.model."
"""What stands before the names of weights in an adapter's file."""

_PATTERNS = (
    *("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"),
    *("rank_pattern", "alpha_pattern"),
)
"""Settings of LoRA that name modules; PEFT matches most of them as regular expressions."""

_NAME = re.compile(r"[\w.-]*")
"""Names of modules: without any repetition, matching one takes no longer than reading it."""


def has_adapter(model: nn.Module) -> bool:
    """True if layers of a model are wrapped by an adapter that was not merged."""
    return any("base_layer" in module._modules for module in model.modules())


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapted model under the names that they have without the adapter, whose own are left out."""
    return {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if "lora_" not in name
    }


def adapter_files(model: Any) -> dict[str, bytes]:
    """The files of a model's adapter by name, as PEFT writes them."""
    peft = _peft()
    configs = getattr(model, "peft_config", {})
    if len(configs) != 1:
        raise InputError(
            f"the model has the adapters {sorted(configs)}, and a folder holds one",
            hint="merge_and_unload(), or delete_adapter() those that are not wanted",
        )
    ((name, config),) = configs.items()
    base = config.base_model_name_or_path or getattr(model, "name_or_path", None) or ""
    # with a name that is no folder, "auto" would ask the hub how large its vocabulary is
    embeddings: Any = "auto" if base and Path(base).is_dir() else False
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=embeddings)
    tensors = {_PREFIX + n.removeprefix(_PREFIX): t.detach().to("cpu", copy=True) for n, t in state.items()}
    config = _with_names(copy.copy(config), model)
    config.inference_mode, config.base_model_name_or_path = True, base or None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        written = (Path(folder) / ADAPTER_FILE).read_bytes()
    _check_settings(json.loads(written), "the adapter")
    weights = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, metadata={"format": "pt"})
    return {ADAPTER_WEIGHTS_FILE: weights, ADAPTER_FILE: written}


def base_folder(folder: Path, given: str | Path | None) -> Path:
    """The folder of an adapter's model: the given one, or the one that the adapter names, from here or from its folder."""
    named = given if given is not None else _settings(folder).get("base_model_name_or_path")
    for base in (Path(str(named)), folder / str(named)):
        if named and base.is_dir():
            return base
    raise InputError(
        f"{folder}: an adapter of {named!r}, which is no folder here", hint="guidance.load(folder, base=MODEL_FOLDER)"
    )


def add_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """A model with the adapter of a folder, as a ``PeftModel`` whose adapter can be trained."""
    peft = _peft()
    settings, stored = _settings(folder), read_tensors(folder / ADAPTER_WEIGHTS_FILE)
    names = _names_for_expressions(settings, stored)
    _check_settings({**settings, **names}, str(folder))
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        vars(config).update(names)
        adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=config)
        own = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    except FAILURES as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{folder}: the adapter does not fit its model ({line})") from error
    if missing := sorted(set(own) - set(stored)):
        raise InputError(f"{folder}: the adapter lacks {missing[0]}", hint="it belongs to another model")
    whole = set(config.modules_to_save or ())  # modules that were trained as a whole, such as a classifier
    if lost := sorted(name for name in set(stored) - set(own) if whole & set(name.split("."))):
        raise InputError(
            f"{folder}: the adapter has {lost[0]}, and {type(model).__name__} has no place for it",
            hint="open it with the class of its task, such as AutoModelForSequenceClassification",
        )
    check_finite(own, str(folder))
    return adapted


def restore_adapter(model: Any, folder: Path) -> None:
    """Copy the adapter of a folder into a model that has one of the same shape."""
    stored = read_tensors(folder / ADAPTER_WEIGHTS_FILE)
    if not isinstance(model, _peft().PeftModel):
        stored = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    _peft().set_peft_model_state_dict(model, stored, adapter_name=next(iter(model.peft_config)))


def _settings(folder: Path) -> Mapping[str, Any]:
    settings = read_json(folder / ADAPTER_FILE)
    if not isinstance(settings, dict):
        raise InputError(f"{folder / ADAPTER_FILE}: not the configuration of an adapter")
    return settings


def _with_names(config: Any, model: nn.Module) -> Any:
    """The configuration of a model's adapter, with the names of the modules in place of regular expressions."""
    if all(map(_is_names, (getattr(config, setting, None) for setting in _PATTERNS))):
        return config
    from peft.utils.other import get_pattern_key

    adapted = [name.removeprefix(_PREFIX) for name, module in model.named_modules() if hasattr(module, "lora_A")]
    for setting in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, setting) or {}
        keys = {name: get_pattern_key(list(values), name) for name in adapted}
        setattr(config, setting, {name: values[key] for name, key in keys.items() if key in values})
    config.target_modules = set(adapted)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    return config


def _names_for_expressions(settings: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """Settings with the names of modules, for those of a stored adapter that have regular expressions.

    Python could match an expression for ever, so it matches none: the weights say which modules are adapted and with what rank.
    Of alpha they say nothing, so RE2 matches its expressions, in linear time.
    """
    ranks: dict[str, int] = {}
    for name, tensor in stored.items():
        module, _, part = name.removeprefix(_PREFIX).rpartition(".lora_")
        if part.startswith(("A", "embedding_A")) and tensor.ndim:
            ranks[module] = tensor.shape[0]
    names: dict[str, Any] = {}
    if any(_has_expressions(settings.get(name)) for name in ("target_modules", "exclude_modules", "layers_pattern")):
        names |= {
            "target_modules": set(ranks),
            **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        }
    if _has_expressions(settings.get("rank_pattern")):
        names["rank_pattern"] = ranks
    alphas = settings.get("alpha_pattern")
    if isinstance(alphas, Mapping) and _has_expressions(alphas):
        names["alpha_pattern"] = _alphas(alphas, list(ranks))
    return names


def _alphas(alphas: Mapping[str, Any], modules: Sequence[str]) -> Mapping[str, Any]:
    """An ``alpha_pattern`` with the names of modules; unchanged if RE2, which pyarrow has, cannot read an expression."""
    try:
        import pyarrow
        from pyarrow import compute
    except ImportError:
        return alphas
    chosen: dict[str, Any] = {}
    for expression, alpha in alphas.items():
        try:
            # as PEFT matches it
            matches = compute.match_substring_regex(
                pyarrow.array(modules, pyarrow.string()), rf"^(?:(.*\.)?({expression})$)"
            )
        except pyarrow.ArrowException:
            return alphas
        chosen = {name: alpha for name, is_match in zip(modules, matches.to_pylist(), strict=True) if is_match} | chosen
    return chosen


def _is_names(value: Any) -> bool:
    """Whether a setting names modules, in a text, a list or the keys of a table."""
    return _is_texts(value) and not _has_expressions(value)


def _has_expressions(value: Any) -> bool:
    """Whether a setting chooses modules by regular expressions."""
    texts = [value] if isinstance(value, str) else value or ()
    return _is_texts(value) and not all(map(_NAME.fullmatch, texts))


def _is_texts(value: Any) -> bool:
    return value is None or (isinstance(value, Collection) and all(isinstance(text, str) for text in value))


def _check_settings(settings: Mapping[str, Any], source: str) -> None:
    """Raises InputError for an adapter that could name code, is not LoRA, or has names that PEFT could match for ever."""
    if settings.get("peft_type") != "LORA" or settings.get("megatron_config") is not None:
        raise InputError(
            f"{source}: an adapter of type {settings.get('peft_type')!r}",
            hint="only LoRA is known; merge_and_unload() it",
        )
    for setting in _PATTERNS:
        if not _is_names(settings.get(setting)):
            raise InputError(
                f"{source}: {setting} is {str(settings[setting])[:100]!r}, and only names of modules are taken",
                hint="a regular expression could be matched for ever; list the names of the modules, or merge_and_unload() it",
            )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MachineError("adapters need PEFT, which is not installed", hint="pip install peft") from error
    return peft
