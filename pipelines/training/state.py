"""What a checkpoint of a run holds: weights, moments of the optimizer, the step, and what was counted so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.checkpoints import WEIGHTS
from pipelines.training.metrics_log import Beginning
from pipelines.training.optimization import Optimizer
from pipelines.training.sharding import part_of


@dataclass(frozen=True)
class State:
    """A run after a step, apart from its tensors.

    Attributes:
        step: how many updates were made.
        best: the steps of the best validations, and their losses or metrics, the best one first.
        tallies: see `pipelines.training.learners.guided.Learner.tallies`, of all processes.
        circumstances: what the exact bits depend on besides the configuration.
        log: the log of metrics up to this step; None if the checkpoint does not record it.
    """

    step: int
    best: tuple[tuple[int, float], ...]
    tallies: Mapping[str, float]
    circumstances: Mapping[str, Any]
    log: Beginning | None


def write_weights(builder: Builder, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of a model, by name, as `WEIGHTS`."""
    builder.write(WEIGHTS, safetensors.torch.save(dict(weights), metadata={"format": "pt"}))


def write_state(builder: Builder, state: State, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    """Write everything that a resumed run needs.

    Args:
        moments: see `pipelines.training.optimization.Optimizer.moments`.
    """
    write_weights(builder, weights)
    builder.write("optimizer.safetensors", safetensors.torch.save(dict(moments)))
    about = {
        "step": state.step,
        "best": state.best[0] if state.best else None,
        "next_best": state.best[1:],
        "optimized": len({key.partition("/")[2] for key in moments}),
        "tallies": dict(state.tallies),
        "circumstances": state.circumstances,
        "log": state.log and asdict(state.log),
    }
    builder.write_json("state.json", about)


def read_state(artifact: Artifact, model: nn.Module, optimizer: Optimizer) -> State:
    """Read a checkpoint into a model and its optimizer; gives the rest.

    Raises:
        ArtifactDamaged: it is of another model, or part of the optimizer's state is missing.
    """
    try:
        about = json.loads(artifact.read("state.json"))
        _load_weights(model, artifact)
        moments = safetensors.torch.load(artifact.read("optimizer.safetensors"))
        optimizer.restore(moments, about["step"])
        if len(optimizer) != about["optimized"]:
            raise KeyError("moments")
        best = tuple(
            (int(step), float(value)) for step, value in filter(None, (about["best"], *about.get("next_best", ())))
        )
        written = Beginning(**about["log"]) if about.get("log") else None
        return State(int(about["step"]), best, dict(about["tallies"]), dict(about["circumstances"]), written)
    except (KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise ArtifactDamaged(
            f"{artifact.path}: not a checkpoint of this run ({error})",
            hint="--force starts from the beginning",
        ) from error


def _load_weights(model: nn.Module, artifact: Artifact) -> None:
    tensors = safetensors.torch.load(artifact.read(WEIGHTS))
    own = model.state_dict()
    placed = {name: part_of(tensor, own[name]) if name in own else tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(placed, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    if unexpected or set(missing) - tied:
        raise ArtifactDamaged(f"{artifact.path}: the weights are not those of this model")
