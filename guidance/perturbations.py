"""Adversarial training on word embeddings: FreeLB and SMART add small perturbations that raise the loss.

Both are functions on tensors.  A perturbation is (B, T, d); padding is never perturbed, and the perturbation of an example does
not depend on the rest of its batch.

Sources: Zhu et al. 2020, *FreeLB*; Jiang et al. 2020, *SMART*, and the published code of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from guidance.mechanisms.attacks import uniform_numbers


@contextmanager
def perturbed(embeddings: nn.Module, delta_BTD: Tensor) -> Iterator[None]:
    """While it is open, a perturbation is added to the output of an embedding module."""
    hook = embeddings.register_forward_hook(lambda module, inputs, output: output + delta_BTD.to(output.dtype))
    try:
        yield
    finally:
        hook.remove()


def freelb_start(seeds_B: Tensor, valid_BT: Tensor, width: int, size: float) -> Tensor:
    """δ₀ ~ U(-1, 1) · size / √(n·d), where n is the number of valid tokens of an example; drawn from its int64 seed."""
    tokens_B11 = valid_BT.sum(-1).clamp(min=1)[:, None, None]
    noise_BTD = 2 * uniform_numbers(seeds_B, 1, valid_BT.shape[1], width)[:, 0] - 1
    return noise_BTD * valid_BT[..., None] * size / (tokens_B11 * width).sqrt()


def freelb_ascend(delta_BTD: Tensor, gradient_BTD: Tensor, valid_BT: Tensor, rate: float, bound: float = 0.0) -> Tensor:
    """δ + rate · g / max(‖g‖, 1e-8), with L2 norms over whole examples, rescaled to ``bound`` (0: none) where it is longer."""
    gradient_BTD = gradient_BTD * valid_BT[..., None]
    norm_B11 = gradient_BTD.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-8)
    delta_BTD = delta_BTD + rate * gradient_BTD / norm_B11
    if bound:
        length_B11 = delta_BTD.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)
        delta_BTD = delta_BTD * (bound / length_B11).clamp(max=1)
    return delta_BTD


def smart_start(seeds_B: Tensor, valid_BT: Tensor, width: int, size: float) -> Tensor:
    """δ₀ ~ N(0, size²), by the method of Box and Muller; drawn from the int64 seed of each example."""
    first, second = uniform_numbers(seeds_B, 2, valid_BT.shape[1], width).unbind(1)
    normal_BTD = (-2 * (1 - first).log()).sqrt() * (2 * torch.pi * second).cos()
    return normal_BTD * valid_BT[..., None] * size


def smart_step(gradient_BTD: Tensor, valid_BT: Tensor, rate: float) -> Tensor:
    """rate · g / (max |g| + 1e-6), with the maximum over each token; the noise at the start is discarded, as in the code."""
    largest_BT1 = gradient_BTD.abs().amax(-1, keepdim=True)
    return rate * gradient_BTD / (largest_BT1 + 1e-6) * valid_BT[..., None]


def smart_distance(clean: Tensor, moved: Tensor, *, regression: bool = False) -> Tensor:
    """What the first step climbs: the sum of KL(clean ‖ moved) over examples, or of squared differences.

    Args:
        clean: logits (N, classes), or values of a regression; taken as constant.
    """
    clean = clean.detach()
    if regression:
        return (moved - clean).square().sum()
    left, right = clean.log_softmax(-1), moved.log_softmax(-1)
    return (left.exp() * (left - right)).sum()
