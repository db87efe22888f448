"""Every way in which ``guide evaluate`` can measure a model: those of the objectives, and those of the tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import create_model

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.storage.artifacts import Artifact
from pipelines.training.objective import Evaluation
from pipelines.training.objectives import OBJECTIVES
from pipelines.training.rows import fields
from pipelines.training.tasks import TASKS, task_of

EVALUATIONS: tuple[Evaluation, ...] = tuple(
    row.evaluation for row in (*TASKS.values(), *OBJECTIVES.values()) if row.evaluation
)
"""In the order in which they are asked whether they are for a model."""

EvaluationConfig: Any = create_model(
    "EvaluationConfig",
    __base__=stage.Config,
    **fields(group for evaluation in EVALUATIONS for group in evaluation.settings),
)
"""The settings of all evaluations, as one flat configuration."""


def evaluation_of(folder: Path, data: Artifact) -> Evaluation:
    """How the model of a folder is measured on some sequences.

    Raises:
        InputError: no objective can measure it.
    """
    from guidance.checkpoint import CONFIG_FILE, read_config

    try:
        config = read_config((folder / CONFIG_FILE).read_bytes(), str(folder / CONFIG_FILE))
    except OSError as error:
        raise InputError(f"{folder}: not a model folder (no readable {CONFIG_FILE})") from error
    found = next((evaluation for evaluation in EVALUATIONS if evaluation.is_for(config, data)), None)
    if found is None and (learned := task_of(config)) is not None:
        raise InputError(
            f"{folder}: a model for {learned.name}, which learns from {learned.shape}, and {data.reference} has "
            f"{data.counts.get('shape', 'running text')}",
            hint="give it a dataset of its own task",
        )
    if found is None:
        raise InputError(
            f"{folder}: a {config.model_type} model without a head for any of "
            f"{', '.join(evaluation.task for evaluation in EVALUATIONS)}",
            hint="guide finetune DATASET --init MODEL trains one with a head",
        )
    return found
