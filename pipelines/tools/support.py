"""Which architectures can be guided with the installed transformers, tested on a tiny model of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from guidance.errors import GuideError
from guidance.installation import install
from guidance.models.families import FAMILIES, Family, model_type_of
from guidance.plan import Plan

_TINY: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "embedding_size": 8,
    "num_hidden_layers": 2,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts"), 2),
    "num_experts_per_tok": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    **dict.fromkeys(("hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 8),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "decoder_attention_heads"), 2),
    "d_kv": 4,
    **dict.fromkeys(("bos_token_id", "cls_token_id", "decoder_start_token_id"), 0),
    "pad_token_id": 1,
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
"""Two layers of two heads, under every name that architectures use for these settings."""


@dataclass(frozen=True)
class Support:
    """One row of the table.

    Attributes:
        family: its usual name.
        model: the class of the tested model; if none could be made, the name of the architecture in transformers.
        attention: the class of its attention modules.
        heads: the kinds of attention that can be guided: ``encoder self``, ``decoder self``, ``decoder cross``.
        reason: why it cannot be guided, or None.
    """

    family: str
    model: str
    attention: str
    heads: tuple[str, ...]
    reason: str | None = None

    @property
    def supported(self) -> bool:
        """Whether guidance reached every head of the tiny model."""
        return self.reason is None


def examine() -> list[Support]:
    """One row per architecture, in the order of `FAMILIES`."""
    with torch.random.fork_rng(devices=[]):
        return [_examine(name, family) for name, family in FAMILIES.items()]


def _examine(name: str, family: Family) -> Support:
    tested = name
    try:
        model = tiny_model(name)
        tested = type(model).__name__
        handle = install(model, Plan())
        kinds = {f"{site.stack} {site.attention}": None for sites in handle.sites.values() for site in sites}
        handle.remove()
    except Exception as error:  # other versions of transformers may fail in any way; still test the rest
        reason = error.message if isinstance(error, GuideError) else f"{type(error).__name__}: {error}"
        return Support(family.label, tested, family.attention, (), reason.splitlines()[0])
    return Support(family.label, tested, family.attention, tuple(kinds))


def tiny_model(name: str) -> PreTrainedModel:
    """A random two-layer model of an architecture, named as its folder in transformers."""
    config = AutoConfig.for_model(model_type_of(name), **_TINY)
    is_translator = getattr(config, "is_encoder_decoder", False)
    kinds: Any = (AutoModelForSeq2SeqLM,) if is_translator else (AutoModelForMaskedLM, AutoModelForCausalLM)
    auto = next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForSequenceClassification)
    model: PreTrainedModel = auto.from_config(config)
    return model.eval()
