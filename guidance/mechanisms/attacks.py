"""What attacks share: a second forward pass in which keys are switched off, and how far it moves the outputs.

Source: Wu et al. 2023, *Adversarial Self-Attention for Language Understanding*, equations 6 to 10.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from guidance.errors import InputError, UnknownName
from guidance.mechanisms.base import Attack, Mechanism

Sentence = Literal["hidden", "head"]


class AttackMechanism(Mechanism):
    """A mechanism that attacks the model in a second forward pass.

    Attributes:
        sentence: what pre-training compares of whole examples (equation 10): ``hidden``, the last hidden state of the first
            token, read as a distribution over hidden units, or ``head``, the output of the model's head at that token.
    """

    takes_pattern: ClassVar[bool] = False
    sentence: Sentence

    def penalty_B(self, attack: Attack) -> Tensor | None:
        """What each example pays for the units that are left on in one layer, with its weight; None without a penalty."""
        return None


def uniform_numbers(seeds_B: Tensor, heads: int, queries: int, keys: int) -> Tensor:
    """Random numbers in [0, 1), float32 (B, heads, queries, keys), each a function of its example's seed and its position.

    They do not depend on the device, on how wide the batch is padded on the right, or on the other examples in it.

    Source: the output function of SplitMix64 (Steele et al. 2014, *Fast Splittable Pseudorandom Number Generators*).

    Args:
        seeds_B: int64, one for each example, different in every layer; see `seeds_of`.
    """
    axes = (torch.arange(size, device=seeds_B.device) for size in (heads, queries, keys))
    head_h, query_Q, key_K = (axis.view(shape) for axis, shape in zip(axes, ((-1, 1, 1), (-1, 1), (-1,)), strict=True))
    positions_hQK = (head_h << 48) + (query_Q << 24) + key_K
    numbers_BhQK = _mixed(seeds_B.view(-1, 1, 1, 1) + positions_hQK * _GOLDEN)
    return (numbers_BhQK.bitwise_right_shift_(40).bitwise_and_(0xFFFFFF)).float().mul_(2.0**-24)


def seeds_of(seeds_B: Tensor, stack: str, layer: int, guide: int) -> Tensor:
    """Different seeds for each guide and layer, from those of the examples."""
    return _mixed(seeds_B + (guide << 20) + (layer << 1) + (stack == "decoder"))


_GOLDEN, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mixed(numbers: Tensor) -> Tensor:
    """Hashed int64 numbers: every bit depends on all bits of the input.  Products wrap round, shifts bring in zeros."""
    numbers = numbers.clone()
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        numbers ^= (numbers >> shift).bitwise_and_((1 << 64 - shift) - 1)
        numbers *= factor
    return numbers


Form = Literal["classification", "token", "regression"]


def divergence(
    clean: Tensor, attacked: Tensor, form: Form = "classification", selected: Tensor | None = None
) -> Tensor:
    """How far the attacked outputs are from the clean ones: a scalar, with gradients to both.

    Args:
        clean, attacked: logits, (B, classes), or (B, T, classes) for tokens; for regression (B,) or (B, 1).
        form: ``classification`` and ``token`` take the mean of half the sum of both Kullback-Leibler divergences,
            ``regression`` the mean squared difference.
        selected: bool, the examples or tokens that count: valid tokens, or masked positions; all by default.

    Raises:
        InputError: the shapes do not fit.
        UnknownName: there is no such form.
    """
    if form not in get_args(Form):
        raise UnknownName("form", form, get_args(Form))
    if clean.shape != attacked.shape:
        raise InputError(f"the clean outputs are {tuple(clean.shape)}, the attacked ones {tuple(attacked.shape)}")
    if clean.dim() != {"token": 3, "classification": 2}.get(form, clean.dim()):
        raise InputError(f"outputs of shape {tuple(clean.shape)} are not those of the form {form}")
    units = clean.shape if form == "regression" else clean.shape[:-1]
    if selected is not None and selected.shape != units:
        raise InputError(f"selected is {tuple(selected.shape)}, the outputs are {tuple(clean.shape)}")
    clean, attacked = (logits.to(torch.promote_types(logits.dtype, torch.float32)) for logits in (clean, attacked))
    if form == "regression":
        distances = (attacked - clean).square()
    else:
        left, right = (torch.log_softmax(logits, -1) for logits in (clean, attacked))
        distances = 0.5 * ((right.exp() - left.exp()) * (right - left)).sum(-1)
    if selected is None:
        return distances.mean()
    return (distances * selected).sum() / selected.sum().clamp(min=1)
