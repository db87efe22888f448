"""Which tokens of a tokenizer are special where its files do not say."""

from __future__ import annotations

from collections.abc import Callable, Container

SPECIAL_TOKENS = {
    "cls": ("cls_token", "bos_token", "[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("sep_token", "eos_token", "[SEP]", "</s>", "<|endoftext|>"),
    "pad": ("pad_token", "", "[PAD]", "<pad>"),
    "mask": ("mask_token", "", "[MASK]", "<mask>"),
    "unk": ("unk_token", "", "[UNK]", "<unk>"),
}
"""The roles of special tokens.  For each two keys of a tokenizer's configuration files, then the tokens that are meant where neither
is there.  GPT-2's files name no token: its texts begin and end with ``<|endoftext|>``, and so do those of Qwen, whose files name no
token that begins a text."""


def usual_tokens(named: Container[str], is_token: Callable[[str], bool]) -> dict[str, str]:
    """The tokens of those roles for which no key is named, by the first key of the role.

    Args:
        named: keys of the configuration files.
        is_token: whether the vocabulary has a token.
    """
    found = {
        first: next(filter(is_token, usual), None)
        for first, second, *usual in SPECIAL_TOKENS.values()
        if first not in named and second not in named
    }
    return {key: token for key, token in found.items() if token is not None}
