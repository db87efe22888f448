"""The tasks of ``guide finetune``: one file of this folder for each, with its `Task`.

A new file here is a new task: the command line, its help, the checks, the model card, ``guide evaluate``, ``guide predict`` and
``guide compare`` find it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import create_model

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.training.objective import classifies, has_head, predicts_a_value
from pipelines.training.rows import families, fields, find_rows, one_of, owners
from pipelines.training.task import Task

TASKS: Mapping[str, type[Task]] = find_rows(__name__, Path(__file__).parent, Task)  # type: ignore[type-abstract]
"""Every task by its name."""

OWNERS: Mapping[str, tuple[str, ...]] = owners(TASKS.values())
"""For each setting that not all tasks have: the tasks that have it."""

TaskConfig: Any = create_model(
    "TaskConfig",
    __base__=stage.Config,
    task=one_of(
        "auto",
        ("auto", *TASKS),
        "Task of the model: " + "; ".join(f"{t.name}, {t.learns}" for t in TASKS.values()) + ".  auto follows from the "
        "dataset.",
    ),
    architecture=families(TASKS.values()),
    **fields(group for row in TASKS.values() for group in row.settings),
)
"""The choice of a task and the settings of all tasks, as one flat configuration."""


def task_of(config: Any) -> type[Task] | None:
    """The task that a model with this configuration was trained for; None if it has no head for a task."""
    names = [str(name) for name in (config.id2label or {}).values()]
    tags = has_head(config, "ForTokenClassification")
    if not tags and not classifies(config):
        return None
    named = next((task for task in TASKS.values() if task.output and names == [task.output]), None)
    if named is not None:
        return named
    if has_head(config, "ForMultipleChoice"):
        return TASKS["choice"]
    return TASKS["tagging" if tags else "regression" if predicts_a_value(config) else "classification"]


def task_for(name: str, counts: Mapping[str, Any], reference: str) -> type[Task]:
    """A task by name, or with ``auto`` the first one that fits a dataset.

    Args:
        counts: of the dataset, or of sequences made of it.

    Raises:
        InputError: the task cannot learn from this dataset, or no task can.
    """
    shape = counts.get("shape", "examples")
    known = [task for task in TASKS.values() if task.shape == shape]
    if name != "auto":
        if TASKS[name] not in known:
            possible = " or ".join(task.name for task in known)
            raise InputError(
                f"--task {name} learns from {TASKS[name].shape}, and {reference} has {shape}",
                hint=f"--task {possible}" if known else "guide build-dataset makes datasets",
            )
        return TASKS[name]
    if fitting := [task for task in known if task.fits(counts)]:
        return fitting[0]
    raise InputError(f"{reference}: no task learns from such examples", hint="choose one with --task")
