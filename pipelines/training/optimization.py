"""How weights are updated: AdamW or Muon, what they remember, and which gradients are clipped together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guidance.mechanisms.adversary import AdversaryWeights
from guidance.mechanisms.base import not_decaying
from guidance.sites import is_added
from pipelines.training.config import TrainingConfig
from pipelines.training.sharding import part_of, whole_of

MOMENTS: Mapping[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What each optimizer remembers of the gradients of a weight."""


class Optimizer:
    """AdamW over all trainable weights of a model, or Muon over its hidden matrices and AdamW over the others.

    Biases, norms and gates do not decay.  One learning rate serves both: Muon's steps, which are orthogonal, are scaled to the
    root mean square of AdamW's, 0.2 (Liu et al. 2025, *Muon is Scalable for LLM Training*, section 2.2).  Its momentum is
    Nesterov's with 0.95, in five iterations of Newton and Schulz (Jordan et al. 2024).
    """

    def __init__(self, model: nn.Module, given: TrainingConfig) -> None:
        self.given = given
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._clipped = clipped_together(model)
        steady, hidden = not_decaying(model), hidden_matrices(model) if given.optimizer == "muon" else set()
        weights = self._weights.items()
        by_muon = {name: p for name, p in weights if name in hidden}
        by_adamw = {name: p for name, p in weights if name not in hidden}
        decaying = {name for name, p in by_adamw.items() if p.ndim > 1} - steady  # nor do biases and norms
        decay = given.weight_decay
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW(
                [
                    *self._groups({name: p for name, p in by_adamw.items() if name in decaying}, decay),
                    *self._groups({name: p for name, p in by_adamw.items() if name not in decaying}, 0.0),
                ],
                lr=given.learning_rate,
                betas=(given.beta1, given.beta2),
                eps=given.epsilon,
                fused=all(p.is_cuda for p in by_adamw.values()) or None,  # on a CPU its last bits differ
            )
        }
        if by_muon:
            self._optimizers["muon"] = torch.optim.Muon(
                self._groups(by_muon, decay), lr=given.learning_rate, adjust_lr_fn="match_rms_adamw"
            )
        self._kinds = {name: "muon" if name in hidden else "adamw" for name in self._weights}

    def _groups(self, weights: Mapping[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
        """Weights in groups of one learning rate, whose ``share`` is that rate over the model's."""
        own = (self.given.added_learning_rate or self.given.learning_rate) / self.given.learning_rate
        groups: dict[float, list[nn.Parameter]] = {1.0: []}
        for name, weight in weights.items():
            groups.setdefault(own if is_added(name) else 1.0, []).append(weight)
        return [{"params": group, "weight_decay": decay, "share": share} for share, group in groups.items()]

    def __len__(self) -> int:
        """How many weights have moments; weights that never had a gradient have none."""
        return sum(len(optimizer.state) for optimizer in self._optimizers.values())

    def clip(self) -> dict[str, Tensor]:
        """Clip the gradients; gives their norms before clipping, by name."""
        most = self.given.clip or math.inf
        norms = {name: whole_of(nn.utils.clip_grad_norm_(group, most)) for name, group in self._clipped.items()}
        # without any gradient the norm is a zero on the CPU
        return {name: norm.to(self._clipped[name][0].device) for name, norm in norms.items()}

    def update(self, rate: float) -> None:
        """Update the weights at this learning rate, those that a plan has added in proportion, and drop the gradients."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The moments of each weight that has had a gradient, by name."""
        states = {name: self._optimizers[kind].state.get(self._weights[name]) for name, kind in self._kinds.items()}
        return {
            f"{key}/{name}": state[key] for name, state in states.items() if state for key in MOMENTS[self._kinds[name]]
        }

    def restore(self, moments: Mapping[str, Tensor], step: int) -> None:
        """Continue with these moments after ``step`` updates.

        Raises:
            KeyError: a moment is missing, or belongs to an unknown weight.
        """
        for name in {key.partition("/")[2] for key in moments}:
            weight, kind = self._weights[name], self._kinds[name]
            state = {key: part_of(moments[f"{key}/{name}"], weight) for key in MOMENTS[kind]}
            if kind == "adamw":
                fused = self._optimizers[kind].defaults["fused"]
                state["step"] = torch.tensor(float(step), device=weight.device if fused else None)
            self._optimizers[kind].state[weight] = state


def hidden_matrices(model: nn.Module) -> set[str]:
    """The names of the matrices between the embeddings of a model and its head; those that guides have added are among them,
    apart from those that weight decay leaves alone."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    ends = [part.get_output_embeddings() for part in parts]
    ends += [module for module in model.modules() if isinstance(module, nn.Embedding)]
    inside = {id(p) for part in parts if part.base_model is part for p in part.parameters()}
    inside -= {id(p) for end in ends if end is not None for p in end.parameters()}
    steady = not_decaying(model)
    return {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) in inside and name not in steady}


def share_of_muon(model: nn.Module) -> str:
    """Which weights of a model Muon updates, in words for people."""
    hidden, weights = (
        hidden_matrices(model),
        {name: p.numel() for name, p in model.named_parameters() if p.requires_grad},
    )
    by_muon = [count for name, count in weights.items() if name in hidden]
    return f"Muon updates {sum(by_muon):,} of {sum(weights.values()):,} weights, in {len(by_muon)} matrices; AdamW the others"


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
