"""How weights are updated: AdamW and its state, and which gradients are clipped together."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from guidance.mechanisms.adversary import AdversaryWeights
from guidance.mechanisms.base import not_decaying
from pipelines.training.config import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over all trainable weights of a model; biases, norms and gates do not decay."""

    def __init__(self, model: nn.Module, given: TrainingConfig) -> None:
        self.given = given
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._clipped = clipped_together(model)
        weights = self._weights.items()
        decaying = {name for name, p in weights if p.ndim > 1} - not_decaying(model)  # nor do biases and norms
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for name, p in weights if name in decaying], "weight_decay": given.weight_decay},
                {"params": [p for name, p in weights if name not in decaying], "weight_decay": 0.0},
            ],
            lr=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.epsilon,
        )

    def __len__(self) -> int:
        """How many weights have moments; weights that never had a gradient have none."""
        return len(self._adamw.state)

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradients; gives their norms before clipping, by name."""
        most = self.given.clip or math.inf
        return {name: nn.utils.clip_grad_norm_(group, most) for name, group in self._clipped.items()}

    def update(self, rate: float) -> None:
        """Update the weights at this learning rate, and drop the gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """Both moments of each weight, by name."""
        return {
            f"{key}/{name}": self._adamw.state[p][key].detach().cpu()
            for name, p in self._weights.items()
            if p in self._adamw.state
            for key in MOMENTS
        }

    def restore(self, moments: Mapping[str, Tensor], step: int) -> None:
        """Continue with these moments after ``step`` updates.

        Raises:
            KeyError: a moment is missing, or belongs to an unknown weight.
        """
        for name in {key.partition("/")[2] for key in moments}:
            weight = self._weights[name]
            state = {key: moments[f"{key}/{name}"].to(weight.device) for key in MOMENTS}
            self._adamw.state[weight] = {"step": torch.tensor(float(step)), **state}


def clipped_together(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Groups of parameters whose gradients are clipped together, by the name of their norm.

    Adversaries are a group of their own: the gradient of their penalty, a sum over all pairs of tokens, would otherwise
    leave little of the model's gradient (the published code does not clip at all).  So is a generator that shares no
    parameter with the model: its gradient would otherwise change how fast the model learns."""
    attackers = {id(p) for part in model.modules() if isinstance(part, AdversaryWeights) for p in part.parameters()}
    beside: set[int] = set()
    generator = getattr(model, "generator", None)  # of a `pipelines.training.learners.generator.Pair`
    if isinstance(generator, nn.Module):
        beside = {id(p) for p in generator.parameters()}
        if not beside.isdisjoint(id(p) for p in model.get_submodule("model").parameters()):
            beside = set()
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        at = id(parameter)
        name = "/adversary" if at in attackers else "/generator" if at in beside else ""
        groups.setdefault(f"gradient_norm{name}", []).append(parameter)
    return groups
