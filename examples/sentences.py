"""Code shared by the examples: sentences, a tokenizer of their words, a small model, and masking."""

from __future__ import annotations

import tokenizers
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

SENTENCES = [
    "the ferry leaves the harbour before the sun is up .",
    "nobody on the island knows who painted the old boat .",
    "her brother mends the nets , and she sells the fish .",
    "when the wind turns , the gulls come back to the harbour .",
    "the teacher asked who had seen the ferry leave .",
    "they painted the boat , but the wind took the sail .",
    "the old nets hang where the gulls sit .",
    "before the wind turns , nobody sells fish .",
]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "[UNK]"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words_only.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    names = {name: f"[{name.removesuffix('_token').upper()}]" for name in ("pad_token", "unk_token", "mask_token")}
    return PreTrainedTokenizerFast(tokenizer_object=words_only, cls_token="[CLS]", sep_token="[SEP]", **names)


def new_model(tokenizer: PreTrainedTokenizerFast) -> BertForMaskedLM:
    """A random model with two layers of four heads."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertForMaskedLM(config)


def blanked(tokenizer: PreTrainedTokenizerFast, seed: int, sentences: list[str] = SENTENCES) -> dict[str, Tensor]:
    """The sentences as a batch, with one word in six masked; only masked words have labels."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt", return_token_type_ids=False)
    ids, words = batch["input_ids"], batch["input_ids"] >= 5
    hidden = words & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 1 / 6)
    return {
        "input_ids": ids.masked_fill(hidden, tokenizer.mask_token_id),
        "attention_mask": batch["attention_mask"],
        "labels": ids.masked_fill(~hidden, -100),
    }
