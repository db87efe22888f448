"""Tiny models of every supported family, built from configurations, and an oracle for the attention loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    DebertaConfig,
    FunnelConfig,
    MPNetConfig,
    PreTrainedModel,
    RoFormerConfig,
)

PAD = 1
_COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
_ENCODER_DECODER = {"decoder_start_token_id": 0, "forced_eos_token_id": None, "is_encoder_decoder": True}
_BART = {
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "init_std": 0.5,
    **_ENCODER_DECODER,
}
_T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_kv": 4, "d_ff": 16, **_ENCODER_DECODER}
_DECODERS: dict[str, dict[str, Any]] = {
    # the main ones: fused projections, as many keys as heads, heads wider than usual, windows, norms of queries, soft caps
    "gpt2": {},
    "gpt_neox": {},
    "llama": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "olmo2": {},
    "phi3": {},
    "gpt_bigcode": {},
    "opt": {"ffn_dim": 16},
    "biogpt": {},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo": {},
    "olmo3": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {},
    "cohere": {},
    "cohere2": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {},
    "exaone4": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "modernbert-decoder": {"local_attention": 4, "cls_token_id": 0, "sep_token_id": 2},
}
"""Causal language models: settings beyond `_COMMON` and two heads of keys for four heads, where an architecture has them."""

_MORE: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "electra": {"embedding_size": 16},
    "modernbert": {
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
        "initializer_cutoff_factor": 2.0,
    },
    "distilbert": {"hidden_dim": 16},
    "albert": {"embedding_size": 16},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "type_vocab_size": 0,
    },
    "marian": _BART,
    "bart": _BART,
    "t5": _T5,
    "mbart": _BART,
    "mt5": _T5,
}
"""Settings of each family beyond `_COMMON`.  The second layer of ModernBERT sees two tokens to each side."""

SEQ2SEQ = ("marian", "bart", "t5")
RELATED = ("mbart", "mt5")
"""Encoder-decoders that copy the attention of another family into their own layer classes."""
FAMILIES = tuple(family for family in _MORE if family not in (*SEQ2SEQ, *RELATED))
DECODERS = tuple(_DECODERS)
MAIN_DECODERS = DECODERS[:8]
REACH: dict[str, dict[int, int]] = {
    "modernbert": {1: 2},
    "mistral": {0: 3, 1: 3},
    **{family: {0: 2} for family in ("gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4")},
    "modernbert-decoder": {1: 1},
}
"""By family and layer, how far from a query its keys may be."""
UNSUPPORTED = {
    "deberta": DebertaConfig(**_COMMON),
    "mpnet": MPNetConfig(**_COMMON),
    "roformer": RoFormerConfig(**_COMMON),
    "funnel": FunnelConfig(
        vocab_size=40, block_sizes=[1, 1], d_model=16, n_head=4, d_head=4, d_inner=16, pad_token_id=PAD
    ),
}

_DROPOUT = {
    "modernbert": ("attention_dropout", "mlp_dropout"),
    "distilbert": ("attention_dropout", "dropout"),
    "marian": ("attention_dropout", "dropout"),
    "bart": ("attention_dropout", "dropout"),
    "t5": ("dropout_rate",),
    "mbart": ("attention_dropout", "dropout"),
    "mt5": ("dropout_rate",),
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_bigcode": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
    "opt": ("attention_dropout", "dropout"),
    "phi": ("attention_dropout", "resid_pdrop"),
    "phi3": ("attention_dropout", "resid_pdrop"),
    "starcoder2": ("attention_dropout", "residual_dropout"),
    "modernbert-decoder": ("attention_dropout", "mlp_dropout"),
    "biogpt": ("attention_probs_dropout_prob", "hidden_dropout_prob", "activation_dropout"),
}


def dropout(family: str, p: float = 0.1) -> dict[str, float]:
    """The settings that give a family dropout of attention probabilities and hidden states."""
    usual = ("attention_dropout",) if family in DECODERS else ("attention_probs_dropout_prob", "hidden_dropout_prob")
    return dict.fromkeys(_DROPOUT.get(family, usual), p)


def tiny_config(family: str, **changes: Any) -> Any:
    """Two layers of four heads, without dropout."""
    own = {"num_key_value_heads": 2} | _DECODERS[family] if family in DECODERS else _MORE[family]
    return AutoConfig.for_model(family, **(_COMMON | dropout(family, 0.0) | own | changes))


def tiny_model(family: str, implementation: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A language model with large random weights, so that attention is far from uniform."""
    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if family in (*SEQ2SEQ, *RELATED) else AutoModelForMaskedLM
    auto = AutoModelForCausalLM if family in DECODERS else auto
    # DeBERTa-v2 has only its own implementation, and a soft cap no kernel
    available = "eager" if family in ("deberta-v2", "gemma2") else implementation
    model = auto.from_config(tiny_config(family, **changes), attn_implementation=available)
    return model.eval()  # type: ignore[no-any-return]


def batch(lengths: tuple[int, ...] = (7, 4, 5), width: int | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Right-padded token ids with their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.randint(3, 40, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}


def pair_batch(
    lengths: tuple[int, ...] = (7, 4, 5), targets: tuple[int, ...] = (3, 6, 2), seed: int = 1
) -> dict[str, Tensor]:
    """A training batch of an encoder-decoder: sources, and targets of other lengths with their labels."""
    decoder = batch(targets, seed=seed + 1)
    valid = decoder["attention_mask"].bool()
    return {
        **batch(lengths, seed=seed),
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
        "labels": decoder["input_ids"].roll(-1, 1).where(valid, -100),
    }


def inputs_of(family: str) -> dict[str, Tensor]:
    """A padded batch for a model of the family."""
    return pair_batch() if family in (*SEQ2SEQ, *RELATED) else batch()


def pattern_keys(name: str, valid: list[bool], marked: list[bool], query: int) -> list[int]:
    """The keys that a pattern names for a valid query, written out: a neighbour counts only if it is a valid token."""
    size = len(valid)
    if name in ("next", "previous", "self"):
        key = query + {"next": 1, "previous": -1, "self": 0}[name]
        return [key] if 0 <= key < size and valid[key] else []
    if name == "first":
        return [valid.index(True)]
    return [key for key in range(size) if valid[key] and marked[key]]


def oracle_loss(
    scores: Tensor,
    valid: list[bool],
    marked: list[bool],
    name: str,
    *,
    reduction: str = "group_mean",
    boundary: str = "uniform",
    token_rows: str = "normalised",
    empty_rows: str = "uniform",
    distance: str = "squared",
    reach: int | None = None,
    causal: bool = False,
) -> Tensor:
    """The loss of one example in one layer, computed entry by entry from ``scores`` (heads, T, T) in float64.

    ``reach`` is the number of tokens that a query sees to each side; a ``causal`` one sees no later tokens.
    """
    size = len(valid)
    length = sum(valid)
    total = scores.new_zeros(())
    for head in range(scores.shape[0]):
        for query in range(size):
            if not valid[query]:
                continue
            seen = [k for k in range(size) if valid[k] and (reach is None or abs(k - query) <= reach)]
            seen = [k for k in seen if k <= query or not causal]
            exponentials = {k: torch.exp(scores[head, query, k] - scores[head, query].max().detach()) for k in seen}
            denominator = sum(exponentials.values())
            wanted = [k for k in pattern_keys(name, valid, marked, query) if k in seen]
            target = dict.fromkeys(seen, 0.0)
            if wanted:
                each = 1.0 if token_rows == "indicator" else 1.0 / len(wanted)
                target |= dict.fromkeys(wanted, each)
            else:
                fallback = boundary if name in ("next", "previous", "self") else empty_rows
                if fallback == "skip":
                    continue
                if fallback == "uniform":
                    target = dict.fromkeys(seen, 1.0 / len(seen))
            for k in seen:
                if distance == "squared":
                    total = total + (exponentials[k] / denominator - target[k]) ** 2
                elif target[k]:
                    total = total + target[k] * (math.log(target[k]) - torch.log(exponentials[k] / denominator))
    if reduction != "frobenius":
        total = total / max(length, 1) ** 2
    return total / scores.shape[0] if reduction == "group_mean" else total
