"""The dry run of a training: it checks that data, plan and model fit together, counts the steps left, and estimates their time."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guidance.errors import MachineError
from pipelines.progress import log
from pipelines.training.checkpoints import Checkpoints
from pipelines.training.cluster import Cluster
from pipelines.training.loop import step_timer
from pipelines.training.optimization import share_of_muon
from pipelines.training.plan_inputs import inputs_of
from pipelines.training.preparation import Prepared

CHEAP = 1e11
"""A step is timed if it needs at most this many floating-point operations, about."""

STEPS = 3
"""How many steps are timed, after one that warms up."""


def rehearse(config: Any, inputs: Mapping[str, Any], unfinished: Path | None) -> tuple[int, float | None]:
    """The number of steps that a training still has to do, and about how many seconds they take, without validations; None for
    the seconds if they cannot be estimated cheaply.  Raises InputError if data, plan, model and settings do not fit each other.

    Args:
        unfinished: the folder of unfinished work that the training would continue, if it exists; None for a new start.
    """
    prepared = Prepared.of(config, inputs)
    for warning in prepared.warnings(config, inputs):
        log.warning("%s", warning)
    if config.optimizer == "muon":
        log.info("%s", share_of_muon(prepared.learner.model))
    newest = Checkpoints(unfinished).newest("checkpoint") if unfinished else None
    steps = prepared.settings.steps - (int(newest.counts["step"]) if newest else 0)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not is_alone or config.compile or _operations(prepared, inputs) > CHEAP:
        return steps, None
    with contextlib.suppress(MachineError), tempfile.TemporaryDirectory() as folder:  # this machine may lack the device
        step = step_timer(prepared, Cluster(config.device, config.precision), Path(folder))
        return steps, steps * statistics.median([step() for _ in range(1 + STEPS)][1:])
    return steps, None


def _operations(prepared: Prepared, inputs: Mapping[str, Any]) -> float:
    """About how many floating-point operations a step takes: six for each parameter and token.

    Source: Kaplan et al. 2020, section 2.1.
    """
    settings = prepared.settings
    longest = max(int(data.manifest["config"]["max_length"]) for data in inputs_of("sequences", inputs))
    parameters = sum(weights.numel() for weights in prepared.learner.model.parameters())
    return 6.0 * parameters * (settings.batch_tokens or settings.batch_size * longest)
