"""From attention between tokens to attention between words.

Source: Clark et al. 2019, section 4.1, and their published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["mean", "first", "max"]


def word_attention(attention_HTT: Tensor, words: Sequence[int], mode: Mode = "mean") -> Tensor:
    """Attention between words, (H, W, W): to a split word the sum over its tokens, from it the mean.

    Rows still sum to 1, with every mode.

    Args:
        attention_HTT: between tokens, without padding.
        words: the number of the word of each token, counted from 0 in the order of the text; a special token is a word of
            its own.
        mode: what stands for the tokens of a query: their ``mean``, the ``first`` one, or for each key their ``max``, after
            which a row is divided by its sum.
    """
    word_T = torch.as_tensor(words, device=attention_HTT.device)
    number = int(word_T[-1]) + 1
    member_TW = torch.nn.functional.one_hot(word_T, number).to(attention_HTT.dtype)
    to_words_HTW = attention_HTT @ member_TW
    if mode == "mean":
        return (member_TW / member_TW.sum(0)).T @ to_words_HTW
    if mode == "first":
        first_W = torch.searchsorted(word_T, torch.arange(number, device=word_T.device))
        return to_words_HTW[:, first_W]
    index_HTW = word_T[None, :, None].expand_as(to_words_HTW)
    highest_HWW = to_words_HTW.new_zeros(len(to_words_HTW), number, number)
    highest_HWW = highest_HWW.scatter_reduce(1, index_HTW, to_words_HTW, "amax", include_self=False)
    return highest_HWW / highest_HWW.sum(-1, keepdim=True)
