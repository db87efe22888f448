"""Stages, one file each: what a stage takes, its settings, and what it writes."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

STAGES = (
    "pipelines.stages.corpus:STAGE",
    "pipelines.stages.dataset:STAGE",
    "pipelines.stages.folds:STAGE",
    "pipelines.stages.tokenizer:STAGE",
    "pipelines.stages.sequences:STAGE",
    "pipelines.stages.idf:STAGE",
    "pipelines.stages.dependencies:STAGE",
    "pipelines.stages.cooccurrence:STAGE",
    "pipelines.stages.masks:STAGE",
    "pipelines.stages.pretrain:STAGE",
    "pipelines.stages.finetune:STAGE",
    *(f"pipelines.stages.{path.stem}:STAGE" for path in sorted(Path(__file__).parent.glob("probe_*.py"))),
    "pipelines.stages.discover_score:STAGE",
)
"""Where the stages are that have a command, in the order of the help page; every file ``probe_NAME.py`` holds one."""


def find(name: str) -> Any:
    """The stage of a command by the name that manifests give it; None if there is none."""
    return next((stage for stage in map(resolve_name, STAGES) if stage.name == name), None)


def kinds() -> set[str]:
    """The kinds of artifacts that stages make."""
    others = (f"pipelines.stages.{name}:STAGE" for name in ("search", "evaluate", "floors", "discover_accept"))
    return {stage.kind for stage in map(resolve_name, (*STAGES, *others))}
