"""What a dry run says of a training: whether all that it reads fits together, how many steps are left, and how long they take."""

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
from pipelines.training.plan_inputs import inputs_of
from pipelines.training.preparation import Prepared

CHEAP = 1e11
"""Floating-point operations up to which a step is timed: a few seconds on two cores."""

STEPS = 3
"""Steps that are timed, after one that is not counted."""


def rehearse(config: Any, inputs: Mapping[str, Any], unfinished: Path | None) -> tuple[int, float | None]:
    """The steps that a training still has to do, and about how many seconds they take, without validations; None if a step is
    not cheap to time.  Raises InputError if data, plan, model and settings do not fit each other.

    Args:
        unfinished: where the work would be that the training continues; None if it starts anew.
    """
    prepared = Prepared.of(config, inputs)
    for warning in prepared.warnings(config, inputs):
        log.warning("%s", warning)
    newest = Checkpoints(unfinished).newest("checkpoint") if unfinished else None
    steps = prepared.settings.steps - (int(newest.counts["step"]) if newest else 0)
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not is_alone or config.compile or _operations(prepared, inputs) > CHEAP:
        return steps, None
    with contextlib.suppress(MachineError), tempfile.TemporaryDirectory() as folder:  # without the device of the run
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
