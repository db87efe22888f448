"""Every way in which ``guide evaluate`` can measure a model: those of the objectives, and those of the tasks."""

from __future__ import annotations

from typing import Any

from pydantic import create_model

from pipelines.engine import stage
from pipelines.training.objective import Evaluation
from pipelines.training.objectives import OBJECTIVES
from pipelines.training.rows import fields
from pipelines.training.tasks import TASKS

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
