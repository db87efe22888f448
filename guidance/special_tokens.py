"""Which tokens of a tokenizer are special where its files do not say."""

from __future__ import annotations

SPECIAL_TOKENS = {
    "cls": ("cls_token", "bos_token", "[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("sep_token", "eos_token", "[SEP]", "</s>", "<|endoftext|>"),
    "pad": ("pad_token", "", "[PAD]", "<pad>"),
    "mask": ("mask_token", "", "[MASK]", "<mask>"),
    "unk": ("unk_token", "", "[UNK]", "<unk>"),
}
"""Of each role of a special token two keys of a tokenizer's configuration files, then the tokens that are meant where neither is
there.  GPT-2's files name no token: its texts begin and end with ``<|endoftext|>``, and so do those of Qwen, whose files name no
token that begins a text."""
