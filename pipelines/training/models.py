"""Models to train: a new one of a configured size, or one to start from, checked against the sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.progress import log
from pipelines.storage.artifacts import Artifact
from pipelines.training.learner import Setup, folder_of
from pipelines.training.model_checks import OFFSET_POSITIONS, check_model

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.plan import Plan
    from pipelines.training.objective import Objective

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
        description="Width of the feed-forward layers; by default the preset's, or 4 × --hidden. Of a cnn the filters of each width "
        "(100), of a bilstm the units of each direction (300).",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of hidden states; llama has none.")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout of attention probabilities.")


def dimensions(config: ModelConfig) -> tuple[int, int, int, int]:
    """Layers, width, heads and feed-forward width: those of the preset, unless set one by one."""
    given = (config.layers, config.hidden, config.heads, config.ffn)
    layers, hidden, heads, ffn = (g or preset for g, preset in zip(given, SIZES[config.size], strict=True))
    return layers, hidden, heads, ffn if config.ffn or not config.hidden else 4 * hidden


def read_tokenizer(sequences: Artifact, folder: str = "tokenizer", *, masked: bool = True, padded: bool = True) -> Any:
    """The tokenizer of a sequences artifact; the folder ``target-tokenizer`` holds that of its targets.

    Its ``cls_token`` and ``sep_token`` begin and end the sequences; `plain_tokenizer` wrote them into its files.

    Args:
        masked: whether it must have a mask token.
        padded: whether it must have a padding token; else one without it, such as GPT-2's, pads with its end token.

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
    if wrapped.pad_token_id is None and not padded:
        wrapped.pad_token = wrapped.sep_token
    if wrapped.pad_token_id is None:
        raise InputError(f"the tokenizer of {sequences.reference} has no padding token")
    if masked and wrapped.mask_token_id is None:
        raise InputError(f"the tokenizer of {sequences.reference} has no mask token")
    return wrapped


def has_segments(config: Any) -> bool:
    """Whether a model with this configuration reads ``token_type_ids``, which tell the first text of a pair from the second."""
    return getattr(config, "type_vocab_size", 0) > 1


def masker_of(tokenizer: Any, probability: float) -> Any:
    """What masks the tokens of a tokenizer; see `guidance.objectives.masked_lm.Masker`."""
    from guidance.objectives.masked_lm import Masker

    return Masker(tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), len(tokenizer), probability)


def mask_probability_of(model: Any) -> float:
    """The share of tokens that were masked when a model was trained: of an artifact as it says, of a folder 0.15."""
    trained = model.manifest["config"].get("mask_probability") if isinstance(model, Artifact) else None
    return float(trained or 0.15)


def build_model(setup: Setup, objective: type[Objective], plan: Plan, **fields: Any) -> Any:
    """A new model of the configured size, or the one to start from.

    Args:
        fields: of its configuration, such as the labels of a task.  A model to start from gets a new head if its own has
            another size.
        plan: the guides of the model; an old model takes over what they had learned.

    Raises:
        InputError: the model to start from cannot be opened, or has another vocabulary; or the objective cannot train the
            family that was asked for.
        NumericalError: a weight of the model to start from is not finite.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    from guidance.checkpoint import load_model, new_model

    config, tokenizer, init = setup.config, setup.tokenizer, setup.init
    auto_class: Any = getattr(transformers, objective.card.auto_class)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.seed)  # for a new model, and for heads and adversaries that are added to an old one
    if init is not None:
        folder = folder_of(init)
        _check_kind(folder, auto_class, objective)
        if getattr(config, "random_init", False):
            model = new_model(folder, auto_class, **fields)
        else:
            model = load_model(folder, auto_class, plan, **fields)
            saved = model.config.architectures or ()
            if objective.command == "pretrain" and saved and type(model).__name__ not in saved:
                log.warning("%s is a %s, so the head of the %s is new", folder, saved[0], objective.card.words)
        if getattr(config, "extend_positions", False):
            from pipelines.training.embeddings import extend_positions

            extend_positions(model, setup.max_length)
        check_model(model, folder, tokenizer)
        if isinstance(init, Artifact) and not init.in_place():
            raise InputError(f"{folder} was rebuilt while it was being read", hint="run again")
        return model
    family = objective.family(config.architecture)
    sizes = dimensions(config)
    made = auto_class.from_config(configuration(config, family, tokenizer, setup.max_length, sizes, **fields))
    if setup.vectors is not None:
        from pipelines.training.embeddings import fill_vectors

        fill_vectors(made, setup.vectors, tokenizer.get_vocab())
    if setup.embeddings is not None:
        from pipelines.training.embeddings import copy_embeddings

        copy_embeddings(made, folder_of(setup.embeddings), tokenizer)
    return made


def _check_kind(folder: Path, auto_class: Any, objective: type[Objective]) -> None:
    """Raises InputError if a pre-training objective does not train the kind of model that a folder has."""
    from transformers import AutoModelForCausalLM

    from guidance.checkpoint import config_of

    found = config_of(folder)
    if objective.command != "pretrain" or type(found) in auto_class._model_mapping:
        return
    is_causal = type(found) in AutoModelForCausalLM._model_mapping
    raise InputError(
        f"{folder}: a {found.model_type}, which --objective {objective.name} does not train",
        hint="--objective clm" if is_causal else "",
    )


def configuration(
    config: ModelConfig,
    family: str,
    tokenizer: Any,
    max_length: int,
    sizes: tuple[int, int, int, int],
    **more: Any,
) -> Any:
    """The configuration of a new model for sequences of ``max_length`` tokens.

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
    elif family == "gpt2":
        given |= {"attn_pdrop": config.attention_dropout, "n_inner": given.pop("intermediate_size")}
        given |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout}
    elif family == "llama":  # it has no other dropout; small models share both matrices of tokens, as GPT-2 does
        given |= {"attention_dropout": config.attention_dropout, "tie_word_embeddings": True}
    elif family in HEADLESS:
        units = {"num_filters" if family == "cnn" else "lstm_size": config.ffn} if config.ffn else {}
        given = {name: given[name] for name in ("vocab_size", "hidden_size", "pad_token_id")} | units
        given["hidden_dropout_prob"] = config.dropout
    else:
        given |= {"attention_probs_dropout_prob": config.attention_dropout, "hidden_dropout_prob": config.dropout}
    if family == "electra":
        given["embedding_size"] = hidden
    return AutoConfig.for_model(family, **given | more)
