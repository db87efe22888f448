"""Model families: where the attention modules of an architecture are, and in which layers they are called.

A new architecture is a new row in `FAMILIES`; packages add theirs with `register_family`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from guidance.errors import UnsupportedModel
from guidance.registry import Registry, load_entry_points
from guidance.sites import Site


def _one_call(index: int, config: Any) -> Iterable[int]:
    return (index,)


def _shared_calls(index: int, config: Any) -> Iterable[int]:
    # as ALBERT runs: each hidden layer runs all inner layers of one group, and neighbours share a group
    group, inner = divmod(index, config.inner_group_num)
    for layer in range(config.num_hidden_layers):
        if int(layer / (config.num_hidden_layers / config.num_hidden_groups)) == group:
            yield layer * config.inner_group_num + inner


@dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`.

    Attributes:
        label: what people call it.
        attention: the class of its attention modules.
        layers: from a module's index among the modules of its kind to the layers in which it is called.
        model_type: of its configuration, where that is not the name of the folder.
    """

    label: str
    attention: str
    layers: Callable[[int, Any], Iterable[int]] = _one_call
    model_type: str = ""


FAMILIES: Registry[Family] = Registry("family")
"""Every architecture that can be guided, by the name of its folder in transformers.

The file of a class counts as well as its name: DeBERTa's first version has a class of the same name as its second."""

for _name, _family in {
    "bert": Family("BERT", "BertSelfAttention"),
    "roberta": Family("RoBERTa", "RobertaSelfAttention"),
    "xlm_roberta": Family("XLM-RoBERTa", "XLMRobertaSelfAttention"),
    "camembert": Family("CamemBERT", "CamembertSelfAttention"),
    "electra": Family("ELECTRA", "ElectraSelfAttention"),
    "distilbert": Family("DistilBERT", "DistilBertSelfAttention"),
    "albert": Family("ALBERT", "AlbertAttention", _shared_calls),
    "modernbert": Family("ModernBERT", "ModernBertAttention"),
    "deberta_v2": Family("DeBERTa-v2 and v3", "DisentangledSelfAttention"),
    "marian": Family("Marian", "MarianAttention"),
    "bart": Family("BART", "BartAttention"),
    "mbart": Family("mBART", "MBartAttention"),
    "t5": Family("T5", "T5Attention"),
    "mt5": Family("mT5", "MT5Attention"),
    "gpt2": Family("GPT-2", "GPT2Attention"),
    "gpt_neox": Family("GPT-NeoX", "GPTNeoXAttention"),
    "gpt_bigcode": Family("GPTBigCode", "GPTBigCodeAttention"),
    "opt": Family("OPT", "OPTAttention"),
    "biogpt": Family("BioGPT", "BioGptAttention"),
    "llama": Family("Llama", "LlamaAttention"),
    "mistral": Family("Mistral", "MistralAttention"),
    "mixtral": Family("Mixtral", "MixtralAttention"),
    "qwen2": Family("Qwen2", "Qwen2Attention"),
    "qwen3": Family("Qwen3", "Qwen3Attention"),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeAttention"),
    "gemma": Family("Gemma", "GemmaAttention"),
    "gemma2": Family("Gemma 2", "Gemma2Attention"),
    "gemma3": Family("Gemma 3", "Gemma3Attention", model_type="gemma3_text"),
    "olmo": Family("OLMo", "OlmoAttention"),
    "olmo2": Family("OLMo 2", "Olmo2Attention"),
    "olmo3": Family("OLMo 3", "Olmo3Attention"),
    "phi": Family("Phi", "PhiAttention"),
    "phi3": Family("Phi-3", "Phi3Attention"),
    "smollm3": Family("SmolLM3", "SmolLM3Attention"),
    "granite": Family("Granite", "GraniteAttention"),
    "cohere": Family("Cohere", "CohereAttention"),
    "cohere2": Family("Cohere 2", "Cohere2Attention"),
    "starcoder2": Family("StarCoder 2", "Starcoder2Attention"),
    "exaone4": Family("EXAONE 4", "Exaone4Attention"),
    "modernbert_decoder": Family("ModernBERT decoder", "ModernBertDecoderAttention"),
}.items():
    FAMILIES.add(_name, _family)


def register_family(
    name: str, attention: str, *, label: str = "", layers: Callable[[int, Any], Iterable[int]] = _one_call, package: str
) -> Family:
    """Add an architecture.  Its attention modules must ask the interface of transformers for an attention function.

    Args:
        name: the last part of the module that defines the attention class, without ``modeling_``.
        attention: the name of the class of its attention modules; subclasses count too.
        label: what people call it; by default the name.
        layers: see `Family`.
        package: the package that registers it, usually ``__name__``.

    Raises:
        PlanError: the name is taken, or is no name.
    """
    return FAMILIES.add(name, Family(label or name, attention, layers), package)


def supported() -> str:
    """The families that can be guided, for messages."""
    return ", ".join(family.label for family in FAMILIES.values())


_CROSS = {"encoder_attn", "EncDecAttention"}
_REFUSED = {
    "GptOssAttention": "its heads have learned sinks, which take part in every softmax and which guides would lose"
}
"""By class of attention, why an architecture that calls the interface cannot be guided."""
_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads")


def find_sites(model: nn.Module, *, required: bool = True) -> dict[nn.Module, tuple[Site, ...]]:
    """Every attention module of a model, with its sites in the order of its calls; none is an error if they are ``required``.

    Modules that installed packages name as entry points are imported first if the model is of no known family.
    """
    if not any(family_of(module) for module in model.modules()):
        load_entry_points()
    sites: dict[nn.Module, tuple[Site, ...]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, module in model.named_modules():
        family = family_of(module)
        if family is None:
            continue
        is_cross = bool(_CROSS.intersection(name.split(".")))
        is_decoder = is_cross or bool(getattr(module, "is_causal", False))
        kind = ("decoder" if is_decoder else "encoder", "cross" if is_cross else "self")
        config = getattr(module, "config", None) or getattr(model, "config", None)
        num_heads = next(
            (int(getattr(owner, key)) for owner in (module, config) for key in _NUM_HEADS if hasattr(owner, key)), 0
        )
        if own := tuple(Site(*kind, layer, num_heads, name) for layer in family.layers(counts[kind], config)):
            sites[module] = own
        counts[kind] += 1
    for module in model.modules() if not sites else ():
        if reason := _REFUSED.get(type(module).__name__):
            raise UnsupportedModel(f"{type(model).__name__}: {reason}", hint=f"supported: {supported()}")
    if not sites and required:
        raise UnsupportedModel(
            f"{type(model).__name__}: no attention module that can be guided", hint=f"supported: {supported()}"
        )
    return sites


def model_type_of(name: str) -> str:
    """What the configurations of the family of that name call their architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES.get(name)
    return (family and family.model_type) or (name if name in CONFIG_MAPPING else name.replace("_", "-"))


def family_of(module: nn.Module) -> Family | None:
    """The family whose attention this module is; a subclass counts as its parent."""
    for kind in type(module).__mro__:
        family = FAMILIES.get(module_name(kind.__module__))
        if family and family.attention == kind.__name__:
            return family
    return None


def module_name(module: str) -> str:
    """The name under which `FAMILIES` has the family that a module defines."""
    return module.rpartition(".")[2].removeprefix("modeling_")
