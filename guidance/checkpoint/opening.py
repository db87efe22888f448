"""Opens model folders that may come from strangers.

Only safetensors are read.  Code that comes with a model is never run, and of a configuration only the keys are used that its class
declares or that the code of its family in transformers reads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
from guidance.errors import InputError, NumericalError, PlanError, reason_of
from guidance.models import role_transformer  # noqa: F401  registers its classes
from guidance.models.word_models import OWN_CLASSES
from guidance.plan import SIZE_LIMIT, Plan
from guidance.sites import is_added
from guidance.special_tokens import usual_tokens
from guidance.standalone import CLASS_NAME, CLASS_PREFIX, TYPE_PREFIX

_NEVER = {
    *("auto_map", "trust_remote_code", "quantization_config", "name_or_path", "torch_dtype", "dtype"),
    *("backbone", "use_pretrained_backbone", "use_timm_backbone", "experts_implementation"),
    *("return_dict", "chunk_size_feed_forward", "gradient_checkpointing"),
}
"""Keys that are dropped from a configuration wherever they stand: they name code or other models, or say how a model is called."""

MOST_LAYERS_OR_HEADS = 10_000
"""Configurations with more are refused."""

# configuration and plan


def read_config(data: bytes, source: str) -> Any:
    """A model's configuration, reduced to the keys that its class declares or its code reads; ``source`` names the file in messages."""
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not a model configuration ({reason_of(error)})") from error
    if not isinstance(settings, dict):
        raise InputError(f"{source}: not a model configuration")
    settings = _of_transformers(settings)
    if "auto_map" in settings:
        raise InputError(f"{source}: this model comes with its own code, which is never run")
    if settings.get("quantization_config"):
        raise InputError(
            f"{source}: its weights are quantised, and would be read as plain numbers",
            hint="save it once more without quantisation, for example with model.dequantize() and model.save_pretrained(folder)",
        )
    if "model_type" not in settings:
        raise InputError(f"{source}: it has no model_type", hint='add one, such as "model_type": "bert"')
    model_type = str(settings["model_type"])
    if model_type == "mistral" and "layer_types" in settings:
        raise InputError(
            f"{source}: a mistral with layer_types, which transformers opens as a ministral, a family that is not supported"
        )
    if model_type not in CONFIG_MAPPING:
        raise InputError(f"{source}: transformers has no architecture {model_type!r}")
    try:
        known = _keys_of(model_type)
        kept = {key: value for key, value in settings.items() if key in known}
        _check_sizes(kept)
        return AutoConfig.for_model(model_type, **_clean(kept))
    except Exception as error:  # every configuration class checks its values in its own way
        raise InputError(f"{source}: not a configuration of {model_type} ({_first_line(error)})") from error


@functools.cache
def _keys_of(model_type: str) -> frozenset[str]:
    """The keys of a configuration file that mean something to its class or to the model.

    Files of earlier versions have keys that the class turns into others, such as ``rope_theta``, and some models read settings that
    their class does not declare.  So every name in the source of the family counts, apart from methods and other attributes of the class.
    """
    config_class = CONFIG_MAPPING[model_type]
    families = [c for c in config_class.__mro__ if c.__module__.startswith("transformers.models.")]
    files = {file for c in families for file in Path(inspect.getfile(c)).parent.glob("*.py")}
    texts = [
        file.read_text(encoding="utf-8") for file in files if file.name.startswith(("configuration_", "modeling_"))
    ]
    if converting := getattr(config_class, "convert_rope_params_to_dict", None):
        texts.append(inspect.getsource(converting))
    read = {name for text in texts for name in re.findall(r"\w+", text)}
    declared = config_class().to_dict().keys() - {"model_type", "transformers_version"}
    return frozenset(declared | {name for name in read if _is_settable(getattr(config_class, name, None))})


def _is_settable(attribute: Any) -> bool:
    """Whether a file may set an attribute of a configuration: not a method or another value that its class shares.

    Args:
        attribute: what the class has under that name; None if it has nothing.
    """
    return attribute is None or (isinstance(attribute, property) and attribute.fset is not None)


def _of_transformers(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a standalone model, with the names that transformers has for what it is; others as they are.

    Such a model is its plan and its weights.  Its classes are named by a plain rule, and their code is not looked at.
    """
    code, model_type, names = settings.get("auto_map"), str(settings.get("model_type")), settings.get("architectures")
    is_ours = isinstance(code, dict) and all(
        isinstance(name, str) and CLASS_NAME.fullmatch(name) for name in code.values()
    )
    if not (is_ours and PLAN_KEY in settings and model_type.startswith(TYPE_PREFIX)):
        return settings
    settings = {key: value for key, value in settings.items() if key != "auto_map"}
    if isinstance(names, list):
        settings["architectures"] = [str(name).removeprefix(CLASS_PREFIX) for name in names]
    return settings | {"model_type": model_type.removeprefix(TYPE_PREFIX)}


def _check_sizes(settings: Any) -> None:
    """Raises ValueError for a number of heads or layers, here or nested, with which transformers would never end."""
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        _check_sizes(value)
        if type(value) is int and key.endswith(("layers", "heads")):
            least = 1 if key.endswith("heads") else 0
            if not least <= value <= MOST_LAYERS_OR_HEADS:
                raise ValueError(f"{key} is {value}, not {least} to {MOST_LAYERS_OR_HEADS:,}")


def _clean(value: Any) -> Any:
    """A configuration and those nested in it, without keys that could name code or kernels; labels may have any name."""
    if isinstance(value, Mapping):
        return {
            key: item if key in ("id2label", "label2id") else _clean(item)
            for key, item in value.items()
            if not str(key).startswith("_") and "attn_implementation" not in str(key) and key not in _NEVER
        }
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"unknown name {error}"
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_configuration(folder: Path, fields: Mapping[str, Any] = {}) -> tuple[Any, Mapping[str, Any]]:
    """The configuration of a model folder, of which some fields are changed, and the raw content of its file."""
    try:
        if (folder / CONFIG_FILE).is_fifo():  # reading it would wait for ever
            raise OSError("a pipe")
        data = (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable {CONFIG_FILE})") from error
    config = read_config(data, str(folder / CONFIG_FILE))
    for name, value in fields.items():
        setattr(config, name, value)
    return config, _of_transformers(json.loads(data))


def config_of(folder: Path) -> Any:
    """The configuration of a model folder, see `read_config`; InputError if there is none."""
    return _read_configuration(folder)[0]


def find_plan(folder: Path) -> Plan | None:
    """The plan of a model folder: ``plan.toml``, or what ``guide_plan`` in ``config.json`` says; None for an ordinary model."""
    written = Plan.load(folder / PLAN_FILE) if (folder / PLAN_FILE).exists() else None
    text = _read_configuration(folder)[1].get(PLAN_KEY) if (folder / CONFIG_FILE).exists() else None
    if text == PLAN_FILE:  # so writes `save`, for a plan that shapes the model
        _check_marked(folder)
        if written is None:
            raise PlanError(
                f"{folder}: this model needs the plan that guided it, and {PLAN_FILE} is missing",
                hint=f"another tool saved the model without it; copy {PLAN_FILE} from the original folder",
            )
    if text in (None, PLAN_FILE):
        return written
    carried = _parse(text, f"{folder / CONFIG_FILE}, {PLAN_KEY}")
    if written not in (None, carried):
        raise PlanError(
            f"{folder}: {PLAN_FILE} and the key {PLAN_KEY} of {CONFIG_FILE} hold different plans",
            hint="the folder was written twice; delete the file or the key that is older",
        )
    if carried.shapes_outputs:
        _check_marked(folder)
    return carried


def _check_marked(folder: Path) -> None:
    """Raises PlanError for weights without `MARKER`: transformers has opened and saved the model without its plan."""
    names = {name for path in weights_of(folder) for name in _tensor_names(path)}
    if names and MARKER not in names:
        raise PlanError(
            f"{folder}: the weights were saved without the plan of this model, and perhaps trained without it",
            hint="copy the original weights; or open the model with transformers, del model.config.guide_plan,"
            " and install(model, plan) or save it as an ordinary model",
        )


def _parse(text: Any, source: str) -> Plan:
    if not isinstance(text, str) or len(text) > SIZE_LIMIT:
        raise PlanError(f"{source}: not the text of a plan")
    return Plan.parse(text, source=source)


def read_plan(folder: Path) -> Plan:
    """The plan of a model folder."""
    if (plan := find_plan(folder)) is not None:
        return plan
    for part, settings in _read_configuration(folder)[1].items():
        if isinstance(settings, Mapping) and PLAN_KEY in settings:
            raise InputError(
                f"{folder}: the plan belongs to its part {part!r}",
                hint=f"open the model with transformers, then install(model.{part}, plan)",
            )
    raise InputError(
        f"{folder}: an ordinary model (no {PLAN_FILE})", hint="open it with transformers, then install(model, plan)"
    )


def read_progress(folder: Path) -> tuple[int, int] | None:
    """How far the training of a model is whose plan fades: the step and the last one; None if the folder does not say."""
    source = folder / CONFIG_FILE
    if source.exists():
        steps = _read_configuration(folder)[1].get(PROGRESS_KEY)
    elif (source := folder / PROGRESS_FILE).exists():
        steps = read_json(source)
    else:
        return None
    if steps is None:
        return None
    if not (isinstance(steps, list) and len(steps) == 2 and all(type(n) is int and n >= 0 for n in steps)):
        raise InputError(f"{source}: {PROGRESS_KEY} is not a step and the last one")
    return steps[0], steps[1]


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


# tensors and tokenizer


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened ({_first_line(error)})") from error


def weights_of(folder: Path) -> list[Path]:
    """The files that hold the weights of a model folder: one, or the shards that an index names; empty if there are none."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    return [folder / name for name in _shards(folder / INDEX_FILE)]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a model by name, without the marker and without what a plan added."""
    tensors: dict[str, Tensor] = {}
    for path in weights_of(folder) or [folder / WEIGHTS_FILE]:
        # cloned: alignment in the file decides which kernels run, and so the last bit of the results
        tensors |= {n: t.clone() for n, t in read_tensors(path).items() if n != MARKER and not is_added(n)}
    return tensors


def read_extra(folder: Path) -> dict[str, Tensor]:
    """The parameters that a plan added, by name: from their own file, or from among the weights of the model."""
    own = read_tensors(folder / EXTRA_FILE) if (folder / EXTRA_FILE).exists() else {}
    among: dict[str, Tensor] = {}
    for path in weights_of(folder):
        if names := [name for name in _tensor_names(path) if is_added(name)]:
            with safetensors.safe_open(path, framework="pt") as file:
                among |= {name: file.get_tensor(name) for name in names}
    for name, tensor in among.items():
        if own and not (name in own and torch.equal(own[name], tensor)):
            raise InputError(
                f"{folder}: {EXTRA_FILE} and the weights of the model hold different values of {name}",
                hint="the folder was written twice; delete the older of the two files",
            )
    return own or among


def _tensor_names(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file; empty for a damaged one, since opening it reports the damage."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, safetensors.SafetensorError, ValueError):
        return set()


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, or None.  Only the special tokens are taken from its settings; a role that these leave out
    has its usual token, if the vocabulary knows it."""
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
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **names)
        # null in the files says that there is none
        tokenizer.add_special_tokens({**usual_tokens(settings, tokenizer.get_vocab().__contains__)})
        return tokenizer
    except Exception as error:  # the Rust library raises plain exceptions
        raise InputError(f"{path}: not a tokenizer ({_first_line(error)})", hint="give load a tokenizer") from error


# models


def open_model(
    folder: Path, auto_class: Any, dtype: Any, fields: Mapping[str, Any] | None = None
) -> tuple[PreTrainedModel, bool]:
    """A model from a local folder, without its plan, and whether the folder says that it needs one.

    Args:
        auto_class: for example ``AutoModel``; None for the class that was saved.
        dtype: of the weights; ``"auto"`` for the saved one.
        fields: of the configuration to change; a head that they give another size starts anew.
    """
    config, settings = _read_configuration(folder, fields or {})
    if not any(folder.glob("*.safetensors")):
        pickled = next((name for name in PICKLED_FILES if (folder / name).exists()), None)
        convert = shlex.join(["guide", "convert", str(folder), f"{folder.resolve().name}-safetensors"])
        raise InputError(
            f"{folder}: no safetensors" + (f", only {pickled}, which could run code" if pickled else ""),
            hint=convert if pickled and pickled.startswith("pytorch") else "save it from transformers as safetensors",
        )
    if (folder / ADAPTER_FILE).exists():
        raise InputError(f"{folder}: an adapter, which could point at another model", hint="merge it into its model")
    _shards(folder / INDEX_FILE)
    if not (files := weights_of(folder)):
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        raise InputError(
            f"{folder}: no {WEIGHTS_FILE}, only {', '.join(others[:3])}",
            hint=f"if one of them holds all weights, rename it to {WEIGHTS_FILE}",
        )
    model_class = auto_class or _class_of(config, settings, str(folder / CONFIG_FILE))
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    names = {name for path in files for name in _tensor_names(path)}
    guided = MARKER in names or any(map(is_added, names))
    with _opening(folder):
        if guided:  # pass the model's own tensors only; transformers would report the others
            if auto_class is not None:
                with torch.device("meta"):
                    model_class = type(auto_class.from_config(copy.deepcopy(config)))
            source = {"pretrained_model_name_or_path": None, "state_dict": read_weights(folder)}
        else:
            source["use_safetensors"] = True
        opened: Any = model_class.from_pretrained(
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **source,
        )
        model, info = opened
        if guided and (folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    mismatched = sorted(info.get("mismatched_keys", ()))
    if mismatched and not fields:
        name, given, wanted = mismatched[0]
        raise InputError(
            f"{folder}: {name} has the shape {tuple(given)}, and by {CONFIG_FILE} it is {tuple(wanted)}"
            + (f"; so it is with {len(mismatched) - 1:,} more" if mismatched[1:] else ""),
            hint="configuration and weights are of different models",
        )
    # a head that is asked for may start at random; a partly random encoder, or a head that the folder says it has, is an error
    trunk = "" if model.base_model is model or auto_class is None else f"{model.base_model_prefix}."
    lacking = {*info["missing_keys"], *(key for key, *_ in mismatched)}
    missing = sorted(k for k in lacking if k.startswith(trunk) and ".pooler." not in f".{k}")
    if missing:
        raise InputError(
            f"{folder}: the weights lack {missing[0]}" + (", and more" if missing[1:] else ""),
            hint=None
            if auto_class
            else f"architectures in {CONFIG_FILE} says that they are there; name the class that was saved, such as BertModel",
        )
    check_finite(model.state_dict(), str(folder))
    model.config.name_or_path = model.name_or_path = str(folder)  # adapters name their model by it
    return model, MARKER in names or _shapes(settings.get(PLAN_KEY))


def new_model(folder: Path, auto_class: Any, **fields: Any) -> PreTrainedModel:
    """A model of an auto class with new random weights, of the shape of a folder's configuration with some fields changed."""
    config, _ = _read_configuration(folder, fields)
    with _opening(folder):
        made: PreTrainedModel = auto_class.from_config(config)
    return made


FAILURES = (OSError, ValueError, RuntimeError, KeyError, TypeError, safetensors.SafetensorError)
"""What transformers and PEFT raise on a folder that they cannot open."""


@contextlib.contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Turns what transformers raises on a folder that it cannot open into an InputError."""
    try:
        yield
    except (*FAILURES, ArithmeticError, AssertionError) as error:
        raise InputError(f"{folder}: the model cannot be opened ({_first_line(error)})") from error


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises NumericalError when a tensor is not finite, with the name of its folder and of the first such tensor."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not (finite := torch.isfinite(tensor)).all():
            raise NumericalError(
                f"{source}: {name} has {int((~finite).sum()):,} values of {tensor.numel():,} that are not finite",
                hint="nothing can be computed with these weights; take an earlier checkpoint of this model",
            )


def _shapes(text: Any) -> bool:
    """Whether the value of ``guide_plan`` says that a model needs its plan."""
    try:
        return text is not None and (text == PLAN_FILE or _parse(text, PLAN_KEY).shapes_outputs)
    except InputError:
        return True


def _class_of(config: Any, settings: Mapping[str, Any], source: str) -> Any:
    """The class of transformers that ``architectures`` names; no other code is looked up."""
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    own: Any = OWN_CLASSES.get(name) or (getattr(transformers, name, None) if name.isidentifier() else None)
    is_model = isinstance(own, type) and issubclass(own, PreTrainedModel) and own.config_class is not None
    if not (is_model and isinstance(config, own.config_class)):
        raise InputError(
            f"{source}: architectures is {names!r}, which names no model of transformers",
            hint="give load an auto class, for example AutoModelForMaskedLM",
        )
    return own


def _shards(path: Path) -> list[str]:
    """The files that the index of a sharded model names; empty if there is no index."""
    if not path.exists():
        return []
    try:
        named = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: not an index of safetensors") from error
    for name in named:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{path}: names {name!r}, which is no safetensors file of this folder")
    return sorted(named)
