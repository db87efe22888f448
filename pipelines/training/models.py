"""Models to train: a new one of a configured size, or one to start from, checked against the sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import digest
from pipelines.training.learner import Given, folder_of

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.training.batches import Examples
    from pipelines.training.objective import Objective

OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")
"""Model types whose position numbers start after their padding id."""

WORD_MODELS = ("role-transformer", "cnn", "bilstm")
"""Families of paper B, which read whole words; see `guidance.models.role_transformer` and `word_models`."""

HEADLESS = ("cnn", "bilstm")
"""Those of them that have no attention heads."""

SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
}
"""Layers, width, heads and feed-forward width of each size (Turc et al. 2019, table 1)."""


class ModelConfig(stage.Config):
    """The size of a new model."""

    size: Literal["tiny", "mini", "small", "base"] = Field(
        "mini",
        description="Preset of layers × width, heads: "
        + "; ".join(f"{name} {layers} × {hidden}, {heads}" for name, (layers, hidden, heads, _) in SIZES.items())
        + ".",
    )
    layers: int | None = Field(None, ge=1, le=1000, description="Number of layers, instead of the preset's.")
    hidden: int | None = Field(None, ge=1, le=65_536, description="Width, instead of the preset's.")
    heads: int | None = Field(None, ge=1, le=4096, description="Attention heads per layer, instead of the preset's.")
    ffn: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Width of the feed-forward layers, instead of the preset's; of a cnn the filters of each width (100), of a "
        "bilstm the units of each direction (300).",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of hidden states.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of attention probabilities.")


def dimensions(config: ModelConfig) -> tuple[int, int, int, int]:
    """Layers, width, heads and feed-forward width: those of the preset, unless set one by one."""
    given = (config.layers, config.hidden, config.heads, config.ffn)
    layers, hidden, heads, ffn = (g or preset for g, preset in zip(given, SIZES[config.size], strict=True))
    return layers, hidden, heads, ffn if config.ffn or not config.hidden else 4 * hidden


def read_tokenizer(sequences: Artifact, folder: str = "tokenizer", *, masked: bool = True) -> Any:
    """The tokenizer of a sequences artifact; the folder ``target-tokenizer`` holds that of its targets.

    Its ``cls_token`` and ``sep_token`` begin and end the sequences; `plain_tokenizer` wrote them into its files.

    Args:
        masked: whether it must have a mask token.

    Raises:
        InputError: it has no padding token, or no mask token.
    """
    from transformers import PreTrainedTokenizerFast

    from pipelines.text.tokenizer_files import TOKENIZER_FILES, load_tokenizer, named_tokens

    # transformers 5 writes no special_tokens_map.json
    files = {
        name: sequences.read(f"{folder}/{name}") for name in TOKENIZER_FILES if f"{folder}/{name}" in sequences.files
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(files), **named_tokens(files))
    if wrapped.pad_token_id is None:
        raise InputError(f"the tokenizer of {sequences.reference} has no padding token")
    if masked and wrapped.mask_token_id is None:
        raise InputError(f"the tokenizer of {sequences.reference} has no mask token")
    return wrapped


def masker_of(tokenizer: Any, probability: float) -> Any:
    """What masks the tokens of a tokenizer; see `guidance.objectives.masked_lm.Masker`."""
    from guidance.objectives.masked_lm import Masker

    return Masker(tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), len(tokenizer), probability)


def mask_probability_of(model: Any) -> float:
    """The share of tokens that were masked when a model was trained: of an artifact as it says, of a folder 0.15."""
    trained = model.manifest["config"].get("mask_probability") if isinstance(model, Artifact) else None
    return float(trained or 0.15)


def check_finite(folder: Path) -> None:
    """Raises InputError when a tensor in the safetensors of a model folder is not finite; names the first one."""
    import safetensors
    import torch

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not (finite := torch.isfinite(tensor)).all():
                        raise InputError(
                            f"{path}: {name} has {int((~finite).sum()):,} values of {tensor.numel():,} that are not finite",
                            hint="training cannot start from these weights; take an earlier checkpoint of this model",
                        )
        except (OSError, safetensors.SafetensorError, ValueError):
            continue  # opening the model reports it


def build_model(given: Given, objective: Objective, plan: Plan, **fields: Any) -> Any:
    """A new model of the configured size, or the one to start from.

    Args:
        fields: of its configuration, such as the labels of a task.  A model to start from gets a new head if its own has
            another size.
        plan: the guides of the model; an old model takes over what they had learned.

    Raises:
        InputError: the model to start from cannot be opened, or has another vocabulary; or the objective cannot train the
            family that was asked for.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    from guidance.checkpoint import load_model

    config, tokenizer, init = given.config, given.tokenizer, given.init
    auto_class: Any = getattr(transformers, objective.card.auto_class)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.seed)  # for a new model, and for heads and adversaries that are added to an old one
    if init is not None:
        folder = folder_of(init)
        if getattr(config, "random_init", False):
            model = auto_class.from_config(transformers.AutoConfig.from_pretrained(folder, **fields))
        else:
            model = load_model(folder, auto_class, plan, **fields)
            check_finite(folder)
        if getattr(config, "extend_positions", False):
            from pipelines.training.embeddings import extend_positions

            extend_positions(model, given.max_length)
        check_model(model, folder, tokenizer)
        if isinstance(init, Artifact) and not init.in_place():
            raise InputError(f"{folder} was rebuilt while it was being read", hint="run again")
        return model
    family = objective.family(config.architecture)
    sizes = dimensions(config)
    made = auto_class.from_config(configuration(config, family, tokenizer, given.max_length, sizes, **fields))
    if given.vectors is not None:
        from pipelines.training.embeddings import fill_vectors

        fill_vectors(made, given.vectors, tokenizer.get_vocab())
    if given.embeddings is not None:
        from pipelines.training.embeddings import copy_embeddings

        copy_embeddings(made, folder_of(given.embeddings), tokenizer)
    return made


def configuration(
    config: ModelConfig,
    family: str,
    tokenizer: Any,
    max_length: int,
    sizes: tuple[int, int, int, int],
    **more: Any,
) -> Any:
    """The configuration of a new encoder for sequences of ``max_length`` tokens.

    Args:
        sizes: layers, width, heads and feed-forward width.
        more: other fields of the configuration.
    """
    from transformers import AutoConfig

    import guidance.models.role_transformer  # noqa: F401  registers its families

    layers, hidden, heads, ffn = sizes
    given = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": max_length + (tokenizer.pad_token_id + 1 if family in OFFSET_POSITIONS else 0),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        "eos_token_id": tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
    }
    if family == "modernbert":
        given |= {
            "attention_dropout": config.attention_dropout,
            "embedding_dropout": config.dropout,
            "mlp_dropout": config.dropout,
            "cls_token_id": tokenizer.cls_token_id,
            "sep_token_id": tokenizer.sep_token_id,
        }
    elif family in HEADLESS:
        units = {"num_filters" if family == "cnn" else "lstm_size": config.ffn} if config.ffn else {}
        given = {name: given[name] for name in ("vocab_size", "hidden_size", "pad_token_id")} | units
        given["hidden_dropout_prob"] = config.dropout
    else:
        given |= {"attention_probs_dropout_prob": config.attention_dropout, "hidden_dropout_prob": config.dropout}
    if family == "electra":
        given["embedding_size"] = hidden
    return AutoConfig.for_model(family, **given | more)


def longest_input(found: Any) -> int | None:
    """The greatest number of tokens that a model with this configuration reads; None if there is no limit."""
    most = getattr(found, "max_position_embeddings", None)
    if most is not None and found.model_type in OFFSET_POSITIONS:
        most -= found.pad_token_id + 1
    return most


def check_lengths(found: Any, splits: Mapping[str, Examples], reference: str) -> None:
    """Raises InputError when a sequence is longer than the model allows."""
    most = longest_input(found)
    if most is None:
        return
    import numpy as np

    lengths = np.concatenate([split.lengths for split in splits.values()])
    if (longer := int((lengths > most).sum())) > 0:
        raise InputError(
            f"the model allows {most} tokens; {longer} sequences of {reference} are longer, the longest has {lengths.max()}",
            hint=f"guide build-sequences ... --max-length {most}",
        )


def check_model(model: Any, folder: Path, tokenizer: Any) -> None:
    """Raises InputError when a model does not read the token ids of these sequences."""
    found = model.config
    if found.model_type in OFFSET_POSITIONS and found.pad_token_id != tokenizer.pad_token_id:
        raise InputError(
            f"{folder}: its padding id is {found.pad_token_id}, that of the sequences is {tokenizer.pad_token_id}"
        )
    if found.vocab_size < len(tokenizer):
        raise InputError(f"{folder}: has {found.vocab_size} tokens, the sequences use {len(tokenizer)}")
    check_same_tokenizer(folder, tokenizer)


def check_same_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raises InputError when a model folder has a tokenizer other than that of the sequences."""
    own = folder / "tokenizer.json"
    theirs, ours = own.exists() and _vocabulary(own), json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if theirs and theirs != ours:
        raise InputError(
            f"{folder}: its tokenizer ({digest(theirs)[:12]}) is not that of the sequences ({digest(ours)[:12]})",
            hint=f"guide build-sequences CORPUS {folder}",
        )


def _vocabulary(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: not a regular file")
    try:
        return json.loads(path.read_bytes())["model"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"{path}: damaged, or no tokenizer") from error
