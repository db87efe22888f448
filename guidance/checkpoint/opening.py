"""Opens model folders that may come from strangers.

Only safetensors are read.  Code that comes with a model is never run, and of a configuration only the keys that its class
declares are used.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from guidance.checkpoint.layout import (
    CONFIG_FILE,
    INDEX_FILE,
    MARKER,
    PICKLED_FILES,
    PLAN_FILE,
    PLAN_KEY,
    WEIGHTS_FILE,
)
from guidance.errors import InputError
from guidance.plan import Plan

_NEVER = {"auto_map", "trust_remote_code", "quantization_config", "name_or_path", "torch_dtype", "dtype"}
"""Keys that are dropped from a configuration wherever they stand."""
_UNDECLARED: Mapping[str, set[str]] = {
    "deberta-v2": {
        *("attention_head_size", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size"),
        *("norm_rel_ebd", "position_buckets", "share_att_key"),
    }
}
"""Settings that a model reads although its configuration class does not declare them."""


MOST_LAYERS_OR_HEADS = 10_000
"""Configurations with more are refused."""

# configuration and plan


def read_config(data: bytes, source: str) -> Any:
    """A model's configuration, reduced to the keys that its class declares.

    Args:
        source: names the file in messages.

    Raises:
        InputError: not a JSON object, an architecture that transformers does not have, or one that brings its own code.
    """
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not a model configuration ({error})") from error
    if not isinstance(settings, dict):
        raise InputError(f"{source}: not a model configuration")
    if "auto_map" in settings:
        raise InputError(f"{source}: this model comes with its own code, which is never run")
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{source}: transformers has no architecture {model_type!r}")
    try:
        known = set(CONFIG_MAPPING[model_type]().to_dict()) - {"model_type", "transformers_version"}
        known |= _UNDECLARED.get(model_type, set())
        kept = {key: value for key, value in settings.items() if key in known}
        _check_sizes(kept)
        return AutoConfig.for_model(model_type, **_clean(kept))
    except Exception as error:  # every configuration class checks its values in its own way
        raise InputError(f"{source}: not a configuration of {model_type} ({_first_line(error)})") from error


def _check_sizes(settings: Any) -> None:
    """Raises ValueError for a number of heads or layers that no model has, here or in a nested configuration.

    transformers would divide by zero heads, or build layers for ever.
    """
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        _check_sizes(value)
        if type(value) is int and key.endswith(("layers", "heads")):
            least = 1 if key.endswith("heads") else 0
            if not least <= value <= MOST_LAYERS_OR_HEADS:
                raise ValueError(f"{key} is {value}, not {least} to {MOST_LAYERS_OR_HEADS:,}")


def _clean(value: Any) -> Any:
    """A configuration and those nested in it, without keys that could name code or kernels."""
    if isinstance(value, Mapping):
        return {
            key: _clean(item)
            for key, item in value.items()
            if not str(key).startswith("_") and "attn_implementation" not in str(key) and key not in _NEVER
        }
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_configuration(folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """The configuration of a model folder, and the raw content of its file."""
    try:
        data = (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable {CONFIG_FILE})") from error
    return read_config(data, str(folder / CONFIG_FILE)), json.loads(data)


def read_plan(folder: Path) -> Plan:
    """The plan of a model folder.

    Raises:
        InputError: the folder has no plan, or an unreadable one.
    """
    if (folder / PLAN_FILE).exists():
        return Plan.load(folder / PLAN_FILE)
    _, settings = _read_configuration(folder)
    if PLAN_KEY in settings:
        raise InputError(
            f"{folder}: this model needs the plan that guided it, and {PLAN_FILE} is missing",
            hint=f"another tool saved the model without it; copy {PLAN_FILE} from the original folder",
        )
    raise InputError(
        f"{folder}: an ordinary model (no {PLAN_FILE})", hint="open it with transformers, then install(model, plan)"
    )


# tensors and tokenizer


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    Raises:
        InputError: the file cannot be read, or is damaged.
    """
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened ({_first_line(error)})") from error


def _tensor_names(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file; empty for a damaged one, since opening it reports the damage."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, safetensors.SafetensorError, ValueError):
        return set()


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, or None; only the special tokens are taken from its settings.

    Raises:
        InputError: the files are damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    settings: dict[str, Any] = {}
    try:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (folder / name).is_file():
                settings |= json.loads((folder / name).read_bytes())
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in settings.items() if k.endswith("_token")}
        names = {key: value for key, value in texts.items() if isinstance(value, str)}
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **names)
    except Exception as error:  # the Rust library raises plain exceptions
        raise InputError(f"{path}: not a tokenizer ({_first_line(error)})", hint="give load a tokenizer") from error


# models


def open_model(folder: Path, auto_class: Any, dtype: Any) -> tuple[PreTrainedModel, bool]:
    """A model from a local folder, without its plan, and whether it needs that plan.

    Args:
        auto_class: for example ``AutoModel``; None for the class that was saved.
        dtype: of the weights; ``"auto"`` for the saved one.

    Raises:
        InputError: the folder has no configuration or no safetensors, or they do not fit each other.
    """
    config, settings = _read_configuration(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = next((name for name in PICKLED_FILES if (folder / name).exists()), None)
        convert = shlex.join(["guide", "convert", str(folder), f"{folder.resolve().name}-safetensors"])
        raise InputError(
            f"{folder}: no safetensors" + (f", only {pickled}, which could run code" if pickled else ""),
            hint=convert if pickled and pickled.startswith("pytorch") else "save it from transformers as safetensors",
        )
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: an adapter, which could point at another model", hint="merge it into its model")
    _check_index(folder / INDEX_FILE)
    model_class = auto_class or _class_of(config, settings, str(folder / CONFIG_FILE))
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    marked = (folder / WEIGHTS_FILE).is_file() and MARKER in _tensor_names(folder / WEIGHTS_FILE)
    try:
        if marked:  # pass the tensors without the marker, which transformers would report
            if auto_class is not None:
                with torch.device("meta"):
                    model_class = type(auto_class.from_config(copy.deepcopy(config)))
            # cloned: alignment in the file decides which kernels run, and so the last bit of the results
            tensors = {n: t.clone() for n, t in read_tensors(folder / WEIGHTS_FILE).items() if n != MARKER}
            source = {"pretrained_model_name_or_path": None, "state_dict": tensors}
        else:
            source["use_safetensors"] = True
        opened: Any = model_class.from_pretrained(
            config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **source
        )
        model, info = opened
        if marked and (folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        ArithmeticError,
        AssertionError,
        safetensors.SafetensorError,
    ) as error:
        raise InputError(f"{folder}: the model cannot be opened ({_first_line(error)})") from error
    # a new task head may start at random; a partly random encoder is an error
    trunk = "" if model.base_model is model else f"{model.base_model_prefix}."
    missing = sorted(k for k in info["missing_keys"] if k.startswith(trunk) and ".pooler." not in f".{k}")
    if missing:
        raise InputError(f"{folder}: the weights lack {missing[0]}" + (", and more" if missing[1:] else ""))
    return model, marked or PLAN_KEY in settings


def _class_of(config: Any, settings: Mapping[str, Any], source: str) -> Any:
    """The class of transformers that ``architectures`` names; no other code is looked up."""
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    found: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is not None
    if not (is_model and isinstance(config, found.config_class)):
        raise InputError(
            f"{source}: architectures is {names!r}, which names no model of transformers",
            hint="give load an auto class, for example AutoModelForMaskedLM",
        )
    return found


def _check_index(path: Path) -> None:
    """Raises InputError if the index of a sharded model names anything but safetensors beside it."""
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not an index of safetensors") from error
    for name in named:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{path}: names {name!r}, which is no safetensors file of this folder")
