"""Tiny models of every supported family, from configurations, and an oracle for the attention loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PreTrainedModel,
    RobertaConfig,
    XLMRobertaConfig,
)

PAD = 1
_COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
    "initializer_range": 0.5,
}
_CONFIGS: dict[str, Any] = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "xlm-roberta": XLMRobertaConfig,
    "camembert": CamembertConfig,
    "electra": ElectraConfig,
    "modernbert": ModernBertConfig,
}
FAMILIES = tuple(_CONFIGS)
UNSUPPORTED = {
    "distilbert": DistilBertConfig(
        vocab_size=40, dim=16, n_layers=2, n_heads=4, hidden_dim=16, max_position_embeddings=40, pad_token_id=PAD
    ),
    "deberta-v2": DebertaV2Config(**_COMMON),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Two layers of four heads, without dropout; the second layer of ModernBERT sees two tokens to each side."""
    settings = dict(_COMMON)
    if family == "modernbert":
        settings |= {"local_attention": 4, "global_attn_every_n_layers": 2, "bos_token_id": 0, "eos_token_id": 2}
        settings |= {"cls_token_id": 0, "sep_token_id": 2, "initializer_cutoff_factor": 2.0}
    else:
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "electra":
        settings |= {"embedding_size": 16}
    return _CONFIGS[family](**(settings | changes))


def tiny_model(family: str, implementation: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A masked language model with large random weights, so that attention is far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForMaskedLM.from_config(tiny_config(family, **changes), attn_implementation=implementation)
    return model.eval()  # type: ignore[no-any-return]


def batch(lengths: tuple[int, ...] = (7, 4, 5), width: int | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Right-padded token ids with their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.randint(3, 40, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}


def pattern_keys(name: str, valid: list[bool], marked: list[bool], query: int) -> list[int]:
    """The keys at which a pattern points one valid query, METHODS-style: neighbours must be valid tokens themselves."""
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
    reach: int | None = None,
) -> Tensor:
    """The loss of one example in one layer, written out entry by entry: ``scores`` (heads, T, T) in float64.

    ``reach``: how far a query may look to each side.
    """
    size = len(valid)
    length = sum(valid)
    total = scores.new_zeros(())
    for head in range(scores.shape[0]):
        for query in range(size):
            if not valid[query]:
                continue
            seen = [k for k in range(size) if valid[k] and (reach is None or abs(k - query) <= reach)]
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
                total = total + (exponentials[k] / denominator - target[k]) ** 2
    if reduction != "frobenius":
        total = total / max(length, 1) ** 2
    return total / scores.shape[0] if reduction == "group_mean" else total
