"""Models as files: an ordinary Hugging Face folder, plus the plan that guided it and the modules that it added.

    config.json, model.safetensors    the model, which every Hugging Face tool opens
    plan.toml                         the plan
    guidance.safetensors              the parameters that the plan added, where it adds any
    target-tokenizer/                 the decoder's tokenizer, where it is another one

Where the plan matters at inference the folder says so to whoever opens it without us: `MARKER` is a tensor that no model
has, which transformers therefore reports, and the configuration names the plan.

Only safetensors are read, no code that comes with a model is run, and of a configuration only the keys that its class
knows.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from guidance.attention.function import NAME
from guidance.errors import InputError, MachineError
from guidance.installation import Handle, install
from guidance.plan import Plan
from guidance.sites import EXTRA

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
PLAN_FILE = "plan.toml"
EXTRA_FILE = "guidance.safetensors"
TARGET_FOLDER = "target-tokenizer"
"""Where a model with two vocabularies keeps the tokenizer of its decoder."""

PLAN_KEY = "guide_plan"
"""The key of ``config.json`` that names the plan of a model that needs it."""

MARKER = "open_with.guidance_load.because_this_model_needs_its_plan"
"""A tensor of one zero among the weights of such a model."""

_PICKLED = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "flax_model.msgpack",
)
_NEVER = {"auto_map", "trust_remote_code", "quantization_config", "name_or_path", "torch_dtype", "dtype"}
_UNDECLARED: Mapping[str, set[str]] = {
    "deberta-v2": {
        *("attention_head_size", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size"),
        *("norm_rel_ebd", "position_buckets", "share_att_key"),
    }
}
"""Settings that a model reads, and the class of its configuration does not name."""
_log = logging.getLogger("guide.checkpoint")  # below the logger that the command line shows


# writing


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model by name, on the CPU, those that are tied once, those that a plan added among them."""
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def is_extra(name: str) -> bool:
    """True for a tensor that a plan added to a model."""
    return EXTRA in name.split(".")


def weight_files(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, bytes]:
    """The files that hold the weights of a model, see `weights`: those that every tool reads, and those of the plan."""
    own = {name: tensor for name, tensor in tensors.items() if not is_extra(name)}
    if plan.shapes_outputs:
        own[MARKER] = torch.zeros(1, dtype=torch.uint8)
    files = {WEIGHTS_FILE: safetensors.torch.save(own, metadata={"format": "pt"})}
    if extra := {name: tensor for name, tensor in tensors.items() if is_extra(name)}:
        files[EXTRA_FILE] = safetensors.torch.save(extra, metadata={"format": "pt"})
    return files


def model_files(model: PreTrainedModel, plan: Plan) -> dict[str, bytes]:
    """The files of a model folder by name: configuration, weights and plan."""
    given = model.config.to_dict().items()
    config = {key: value for key, value in given if not key.startswith(("_attn", "_name_or_path"))}
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    config.pop(PLAN_KEY, None)
    if plan.shapes_outputs:
        config[PLAN_KEY] = PLAN_FILE
    files = {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True, default=str) + "\n").encode(),
        **weight_files(weights(model), plan),
        PLAN_FILE: plan.dumps().encode(),
    }
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = model.generation_config.to_json_string().encode()
    return files


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a Hugging Face tokenizer by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def save(
    guided: Handle | PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, plan: Plan | None = None
) -> None:
    """Write a model folder; `load` gives the model back as it is.

    Args:
        guided: what `install` gave, or a model and its ``plan``.
        folder: a new one, or a model folder, whose weights and plan are replaced.
        tokenizer: saved beside the model, where patterns that look for certain tokens find it again.

    Raises:
        InputError: the folder holds something else.
        MachineError: it cannot be written.
    """
    if isinstance(guided, Handle):
        model, plan = guided.model, plan or guided.plan
    else:
        model = guided
        if plan is None and (model.config._attn_implementation == NAME or any(map(is_extra, model.state_dict()))):
            raise InputError("a guided model is saved with its plan", hint="save(handle, folder), or give plan=")
    plan = plan or Plan()
    files = model_files(model, plan) | (tokenizer_files(tokenizer) if tokenizer is not None else {})
    write_folder(Path(folder), files)


def write_folder(folder: Path, files: Mapping[str, bytes], *, among: bool = False) -> None:
    """Write the files of a model folder, ``config.json`` last, so that what is half there is no model folder.

    Args:
        among: the folder may hold other things, as a checkpoint of a trainer does.

    Raises:
        InputError: the folder holds something else.
        MachineError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir()}
        for name in filter(_is_partial, there):
            (folder / name).unlink()
        there = {name for name in there if not _is_partial(name)}
        strangers = there - set(files)
        if strangers and CONFIG_FILE not in there and not among:
            raise InputError(
                f"{folder}: holds {min(strangers)!r} and is no model folder", hint="name a folder that is empty or new"
            )
        for name, data in files.items():
            with (folder / _partial(name)).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        for name in there - set(files):
            if name in (INDEX_FILE, *_PICKLED) or name.endswith(".safetensors"):
                (folder / name).unlink()  # weights of the model that was here
        for name in sorted(files, key=lambda name: name == CONFIG_FILE):
            os.replace(folder / _partial(name), folder / name)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written ({error.strerror or error})") from error


def _partial(name: str) -> str:
    return f".{name}.partial"


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


# reading


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
        known |= _UNDECLARED.get(model_type, set())
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


def load(
    folder: str | Path, auto_class: Any = None, tokenizer: Any = None, **options: Any
) -> tuple[PreTrainedModel, Handle]:
    """A guided model as `save` or ``guide pretrain`` wrote it, in evaluation mode, with its plan installed.

    Args:
        auto_class: for example ``AutoModel``; by default the class that was saved.
        tokenizer: by default the one in the folder, where there is one.
        options: further arguments of `guidance.installation.install`; with ``training=True`` also what only losses read
            has to be given.

    Returns:
        The model, and the handle that `guidance.installation.install` gives.

    Raises:
        InputError: the folder has no plan, or weights, plan and configuration do not fit each other.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    model, _ = _open(folder, auto_class, "auto")
    extra = _read_tensors(folder / EXTRA_FILE) if (folder / EXTRA_FILE).exists() else {}
    options = {"decoder_tokenizer": _read_tokenizer(folder / TARGET_FOLDER), "training": False, **options}
    handle = install(model, plan, tokenizer if tokenizer is not None else _read_tokenizer(folder), **options)
    _fill(model, extra, str(folder / EXTRA_FILE))
    model.eval()
    return model, handle


def load_model(folder: str | Path, auto_class: Any, plan: Plan | None = None) -> PreTrainedModel:
    """A model from a local folder, in float32 and without its plan.

    Args:
        auto_class: for example ``AutoModelForMaskedLM``.
        plan: what will be installed; a warning tells if that is not what shaped the outputs of this model.

    Raises:
        InputError: the folder has no configuration or no safetensors, or they do not fit each other.
    """
    folder = Path(folder)
    model, needs_plan = _open(folder, auto_class, torch.float32)
    if needs_plan and not (plan is not None and (folder / PLAN_FILE).exists() and read_plan(folder) == plan):
        _log.warning(
            "%s: this model was trained with heads that %s guides, and computes something else without; "
            "its plan is not applied (guidance.load does)",
            folder,
            PLAN_FILE,
        )
    return model


def read_plan(folder: Path) -> Plan:
    """The plan of a model folder.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    if (folder / PLAN_FILE).exists():
        return Plan.load(folder / PLAN_FILE)
    _, given = _read_configuration(folder)
    if PLAN_KEY in given:
        raise InputError(
            f"{folder}: this model needs the plan that guided it, and {PLAN_FILE} is not there",
            hint="the model was saved again without it; copy the file from the folder that it comes from",
        )
    raise InputError(
        f"{folder}: an ordinary model (no {PLAN_FILE})", hint="open it with transformers, then install(model, plan)"
    )


def restore(model: PreTrainedModel, folder: Path, plan: Plan) -> None:
    """Give a model that a plan is installed in the weights of a folder that `save` wrote.

    Raises:
        InputError: the folder holds another plan, or the weights of another model.
    """
    if read_plan(folder) != plan:
        raise InputError(f"{folder}: was written with another plan", hint=f"compare it with {folder / PLAN_FILE}")
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    own = {name: tensor for name, tensor in model.state_dict().items() if not is_extra(name) and name not in tied}
    stored = _read_tensors(folder / WEIGHTS_FILE)
    stored.pop(MARKER, None)
    _check_names({name: tensor.shape for name, tensor in own.items()}, stored, str(folder / WEIGHTS_FILE))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    extra = _read_tensors(folder / EXTRA_FILE) if (folder / EXTRA_FILE).exists() else {}
    _fill(model, extra, str(folder / EXTRA_FILE))


def take_over(handle: Handle, folder: Path) -> bool:
    """Give what a plan adds to a model (gates, adversaries, added heads) what it had learned in another folder.

    Returns:
        False where that plan had learned something in other modules than this one adds: nothing is taken over then.

    Raises:
        InputError: the file is damaged.
    """
    if not (folder / EXTRA_FILE).exists():
        return True
    stored = _read_tensors(folder / EXTRA_FILE)
    own = {name: tensor for name, tensor in handle.model.state_dict().items() if is_extra(name)}
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
        return False
    stored = {name: tensor.to(own[name].dtype) for name, tensor in stored.items()}  # as the weights are
    _fill(handle.model, stored, str(folder / EXTRA_FILE))
    return True


def _fill(model: nn.Module, extra: Mapping[str, Tensor], source: str) -> None:
    """Put the stored parameters of a plan into the modules that it added."""
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
            raise InputError(f"{source}: {name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted[name])}")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened ({_first_line(error)})") from error


def _read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, or None; of its settings only the special tokens."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    given: dict[str, Any] = {}
    try:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (folder / name).is_file():
                given |= json.loads((folder / name).read_bytes())
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in given.items() if k.endswith("_token")}
        names = {key: value for key, value in texts.items() if isinstance(value, str)}
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **names)
    except Exception as error:  # the library behind it raises plain exceptions
        raise InputError(f"{path}: not a tokenizer ({_first_line(error)})", hint="give load a tokenizer") from error


def _read_configuration(folder: Path) -> tuple[Any, Mapping[str, Any]]:
    """The configuration of a model folder, and all that its file says."""
    try:
        data = (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable {CONFIG_FILE})") from error
    return read_config(data, str(folder / CONFIG_FILE)), json.loads(data)


def _open(folder: Path, auto_class: Any, dtype: Any) -> tuple[PreTrainedModel, bool]:
    """A model from a local folder, without its plan, and whether it needs it."""
    config, given = _read_configuration(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = next((name for name in _PICKLED if (folder / name).exists()), None)
        convert = shlex.join(["guide", "convert", str(folder), f"{folder.resolve().name}-safetensors"])
        raise InputError(
            f"{folder}: no safetensors" + (f", only {pickled}, which could run code" if pickled else ""),
            hint=convert if pickled and pickled.startswith("pytorch") else "save it from transformers as safetensors",
        )
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder}: an adapter, which could point at another model", hint="merge it into its model")
    _check_index(folder / INDEX_FILE)
    model_class = auto_class or _class_of(config, given, str(folder / CONFIG_FILE))
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    marked = (folder / WEIGHTS_FILE).is_file() and MARKER in _names(folder / WEIGHTS_FILE)
    try:
        if marked:  # the tensors without the marker: transformers would report it
            if auto_class is not None:
                with torch.device("meta"):
                    model_class = type(auto_class.from_config(copy.deepcopy(config)))
            # copies, since where a tensor lies in a file decides which kernels see it, and so the last bit
            tensors = {n: t.clone() for n, t in _read_tensors(folder / WEIGHTS_FILE).items() if n != MARKER}
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
        AssertionError,
        safetensors.SafetensorError,
    ) as error:
        raise InputError(f"{folder}: the model cannot be opened ({_first_line(error)})") from error
    # a new head is what somebody may want; an encoder that was filled with random numbers is not
    trunk = "" if model.base_model is model else f"{model.base_model_prefix}."
    missing = sorted(k for k in info["missing_keys"] if k.startswith(trunk) and ".pooler." not in f".{k}")
    if missing:
        raise InputError(f"{folder}: the weights lack {missing[0]}" + (", and more" if missing[1:] else ""))
    return model, marked or PLAN_KEY in given


def _names(path: Path) -> set[str]:
    """The names of the tensors in a file of safetensors; none where it is damaged, which opening it will tell."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, safetensors.SafetensorError, ValueError):
        return set()


def _class_of(config: Any, given: Mapping[str, Any], source: str) -> Any:
    """The class of transformers that ``architectures`` names; no other code is ever looked for."""
    names = given.get("architectures")
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
