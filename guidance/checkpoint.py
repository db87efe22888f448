"""Models as files: an ordinary Hugging Face folder, plus the plan that guided it.

Only safetensors are read, no code that comes with a model is run, and of a configuration only the keys that its class
knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from guidance.errors import InputError
from guidance.plan import Plan

PLAN_FILE = "plan.toml"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")
_NEVER = {"auto_map", "trust_remote_code", "quantization_config", "name_or_path", "torch_dtype", "dtype"}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model by name, on the CPU, those that are tied once."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def model_files(model: PreTrainedModel, plan: Plan) -> dict[str, bytes]:
    """The files of a model folder by name: configuration, weights and plan."""
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_attn")}
    config["architectures"] = [type(model).__name__]
    return {
        "config.json": (json.dumps(config, indent=2, sort_keys=True, default=str) + "\n").encode(),
        "model.safetensors": safetensors.torch.save(weights(model), metadata={"format": "pt"}),
        PLAN_FILE: plan.dumps().encode(),
    }


def read_config(data: bytes, source: str) -> Any:
    """A model's configuration, reduced to what its class knows.

    Raises:
        InputError: no JSON object, an architecture that transformers does not have, or one that wants its own code.
    """
    try:
        given = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not a model configuration ({error})") from error
    if not isinstance(given, dict):
        raise InputError(f"{source}: not a model configuration")
    if "auto_map" in given:
        raise InputError(f"{source}: this model comes with its own code, which is never run")
    model_type = str(given.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{source}: transformers has no architecture {model_type!r}")
    try:
        known = set(CONFIG_MAPPING[model_type]().to_dict()) - {"model_type", "transformers_version"}
        return AutoConfig.for_model(model_type, **_clean({k: v for k, v in given.items() if k in known}))
    except Exception as error:  # each class checks its values in its own way
        raise InputError(f"{source}: not a configuration of {model_type} ({_first_line(error)})") from error


def _clean(value: Any) -> Any:
    """A configuration, and those within it, without the keys that could name code or kernels."""
    if isinstance(value, Mapping):
        return {
            key: _clean(item)
            for key, item in value.items()
            if not str(key).startswith("_") and "attn_implementation" not in str(key) and key not in _NEVER
        }
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_model(folder: Path, auto_class: Any) -> PreTrainedModel:
    """A model from a local folder, in float32.

    Args:
        auto_class: for example ``AutoModelForMaskedLM``.

    Raises:
        InputError: the folder has no configuration or no safetensors, or they do not fit each other.
    """
    try:
        config = read_config((folder / "config.json").read_bytes(), str(folder / "config.json"))
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable config.json)") from error
    if not any(folder.glob("*.safetensors")):
        pickled = next((name for name in _PICKLED if (folder / name).exists()), None)
        raise InputError(
            f"{folder}: no safetensors" + (f", only {pickled}, which could run code" if pickled else ""),
            hint="convert it on a machine you can spare: AutoModel.from_pretrained(...).save_pretrained(...)",
        )
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: an adapter, which could point at another model", hint="merge it into its model")
    _check_index(folder / "model.safetensors.index.json")
    try:
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        AssertionError,
        safetensors.SafetensorError,
    ) as error:
        raise InputError(f"{folder}: the model cannot be opened ({_first_line(error)})") from error
    # a new head is what somebody may want; an encoder that was filled with random numbers is not
    trunk = "" if model.base_model is model else f"{model.base_model_prefix}."
    missing = sorted(k for k in info["missing_keys"] if k.startswith(trunk) and ".pooler." not in f".{k}")
    if missing:
        raise InputError(f"{folder}: the weights lack {missing[0]}" + (", and more" if missing[1:] else ""))
    return model


def _check_index(path: Path) -> None:
    """Raises InputError when the index of a model in several files names anything but safetensors beside it."""
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not an index of safetensors") from error
    for name in named:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{path}: names {name!r}, which is no safetensors file of this folder")
