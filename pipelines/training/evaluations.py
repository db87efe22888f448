"""Every objective and task whose models ``guide evaluate`` can measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import create_model

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.storage.artifacts import Artifact
from pipelines.training.objective import Objective
from pipelines.training.objectives import OBJECTIVES
from pipelines.training.rows import fields
from pipelines.training.tasks import TASKS, task_of

MEASURED: dict[str, type[Objective]] = {
    row.measured_as: row for row in (*TASKS.values(), *OBJECTIVES.values()) if row.measured_as
}
"""By what ``metrics.json`` calls the task, in the order in which they are asked whether they measure a model."""

EvaluationConfig: Any = create_model(
    "EvaluationConfig",
    __base__=stage.Config,
    **fields(group for row in MEASURED.values() for group in row.evaluation_settings),
)
"""The settings of all evaluations, as one flat configuration."""


def measured_by(folder: Path, data: Artifact) -> type[Objective]:
    """What measures the model of a folder on some sequences; if several can, the one whose name the model's output has.

    Raises:
        InputError: nothing can measure it.
    """
    from guidance.checkpoint import config_of

    config = config_of(folder)
    learned = task_of(config)
    able = [row for row in MEASURED.values() if row.measures(config, data)]
    if able:
        return learned if learned in able else able[0]
    if learned is not None:
        raise InputError(
            f"{folder}: a model for {learned.name}, which learns from {learned.shape}, and {data.reference} has "
            f"{data.counts.get('shape', 'running text')}",
            hint="give it a dataset of its own task",
        )
    raise InputError(
        f"{folder}: a {config.model_type} model without a head for any of {', '.join(MEASURED)}",
        hint="guide finetune DATASET --init MODEL trains one with a head",
    )
