"""FreeLB and SMART around the learner of tasks; see `guidance.perturbations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from guidance.mechanisms.attacks import divergence, seeds_of
from guidance.perturbations import freelb_ascend, freelb_start, perturbed, smart_distance, smart_start, smart_step
from pipelines.training.adversarial import DEFAULTS
from pipelines.training.learner import Setup
from pipelines.training.learners.examples import ExampleLearner
from pipelines.training.task import Batch, Task


def prepare(setup: Setup, task: type[Task]) -> ExampleLearner:
    """The learner of a task, with the adversarial training that the settings ask for.  Raises InputError when data, plan, model
    and settings do not fit each other."""
    kinds = {"none": ExampleLearner, "freelb": FreeLBLearner, "smart": SmartLearner}
    return kinds[setup.config.adversarial](setup, task.of_training(setup))


class FreeLBLearner(ExampleLearner):
    """Trains on the mean loss of several passes, between which a perturbation of the embeddings climbs."""

    def __init__(self, setup: Setup, task: Task) -> None:
        super().__init__(setup, task)
        climbs: dict[int, _Climb] = {}
        self.passes = tuple(FreeLBPass(self, number, climbs) for number in range(self.config.adversarial_steps))


class SmartLearner(ExampleLearner):
    """Adds the symmetric divergence between outputs with and without a perturbation of one step."""

    def counts(self, batch: Batch) -> dict[str, float]:
        return {**super().counts(batch), "smart": self.task.judged(batch)}

    def weights(self, step: int) -> dict[str, float]:
        return {**super().weights(step), "smart": self.config.adversarial_weight}

    def more_losses(
        self, model: nn.Module, batch: Batch, inputs: Mapping[str, Tensor], outputs: Tensor
    ) -> dict[str, Tensor]:
        embeddings, valid_BT, seeds_B = _embeddings_of(self, batch)
        form, config = self.task.form, self.config
        extra = self.guided.handle.at_inference(**self.inputs.seen(inputs, batch))
        delta_BTD = smart_start(seeds_B, valid_BT, embeddings.weight.shape[1], _setting(config, "start"))
        with perturbed(embeddings, delta_BTD.requires_grad_(True)):
            moved = self.outputs(model, inputs, batch, extra)
        distance = smart_distance(outputs, moved, regression=form == "regression")
        (gradient,) = torch.autograd.grad(distance, delta_BTD)
        with perturbed(embeddings, smart_step(gradient, valid_BT, _setting(config, "rate"))):
            moved = self.outputs(model, inputs, batch, extra)
        if not len(outputs):
            return {"smart": moved.sum() * 0}
        both_ways = 1 if form == "regression" else 2  # `divergence` takes half the sum of both directions
        return {"smart": divergence(outputs, moved, form) * len(outputs) * both_ways}


@dataclass
class _Climb:
    """The perturbation of a micro-batch between two passes, and the random state in which all its passes begin."""

    delta_BTD: Tensor
    random: tuple[Tensor, Tensor | None]


class FreeLBPass:
    """One of the passes of FreeLB over a micro-batch: its loss counts 1/K, and its gradient moves the perturbation.

    All passes have the same dropout, as in the authors' code.
    """

    at_once: ClassVar[bool] = True
    """The loop must compute the gradients of this pass before the next one."""

    def __init__(self, learner: ExampleLearner, number: int, climbs: dict[int, _Climb]) -> None:
        """
        Args:
            number: of the pass, from 0; ``climbs``: shared by all passes, by the id of the micro-batch.
        """
        self._learner, self._number, self._climbs = learner, number, climbs

    def counts(self, batch: Batch) -> dict[str, float]:
        return self._learner.counts(batch)

    def losses(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        learner, config = self._learner, self._learner.config
        embeddings, valid_BT, seeds_B = _embeddings_of(learner, batch)
        if self._number == 0:
            start = _setting(config, "start")
            delta_BTD = freelb_start(seeds_B, valid_BT, embeddings.weight.shape[1], start)
            climb = self._climbs[id(batch)] = _Climb(delta_BTD, _random_state())
        else:
            climb = self._climbs[id(batch)]
            gradient = climb.delta_BTD.grad
            assert gradient is not None, "the pass before was not followed by its backward pass"
            climb.delta_BTD = freelb_ascend(
                climb.delta_BTD.detach(), gradient, valid_BT, _setting(config, "rate"), config.adversarial_bound
            )
            _set_random_state(climb.random)
        climb.delta_BTD.requires_grad_(True)
        with perturbed(embeddings, climb.delta_BTD):
            losses = learner.losses(model, batch, step)
        if self._number == config.adversarial_steps - 1:
            del self._climbs[id(batch)]
        return {name: loss / config.adversarial_steps for name, loss in losses.items()}


def _embeddings_of(learner: ExampleLearner, batch: Batch) -> tuple[Any, Tensor, Tensor]:
    """The embedding module, which tokens are valid (rows, T), and a random seed for each row."""
    embeddings: Any = learner.model.get_input_embeddings()
    valid_BT = learner.inputs.of(batch)["attention_mask"].bool()
    seeds = learner.seeds(learner.seed, learner.origins(batch))
    return embeddings, valid_BT, seeds_of(seeds, "encoder", 0, _GUIDE).to(valid_BT.device)


_GUIDE = 1 << 10
"""Stands for the number of a guide, so that no attack of a plan draws the same numbers."""


def _setting(config: Any, name: str) -> float:
    given = getattr(config, f"adversarial_{name}")
    return float(DEFAULTS[config.adversarial][name] if given is None else given)


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
