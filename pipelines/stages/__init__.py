"""Stages, one file each: what a stage takes, its settings, and what it writes."""

from __future__ import annotations

from importlib import import_module
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
    "pipelines.stages.probe_coreference:STAGE",
    "pipelines.stages.probe_dependencies:STAGE",
    "pipelines.stages.probe_reflexives:STAGE",
    "pipelines.stages.probe_relevance:STAGE",
    "pipelines.stages.probe_pairs:STAGE",
    "pipelines.stages.probe_loss:STAGE",
    "pipelines.stages.probe_attack:STAGE",
    "pipelines.stages.probe_sinks:STAGE",
    "pipelines.stages.probe_distance:STAGE",
    "pipelines.stages.probe_importance:STAGE",
)
"""Where the stages are that have a command, in the order of the help page."""


def find(name: str) -> Any:
    """The stage of a command by the name that manifests give it; None if there is none."""
    found = (getattr(import_module(module), attribute) for module, attribute in (place.split(":") for place in STAGES))
    return next((stage for stage in found if stage.name == name), None)
