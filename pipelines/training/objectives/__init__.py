"""What ``pretrain`` can teach: one module for each objective.

A module has ``check_plan(plan, config, source)``, which refuses guides that make no sense there, and ``prepare(given)``,
which makes the `pipelines.training.loop.Objective` of a run.  It is imported only when its objective is trained.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.training.models import folder_of

if TYPE_CHECKING:
    from guidance.plan import Plan
    from pipelines.storage.artifacts import Artifact
    from pipelines.training.batches import Examples

OBJECTIVES = {
    "mlm": "masked_lm",
    "mlm+nsp": "next_sentence",
    "electra": "replaced_token",
    "translation": "translation",
}
"""The module of each objective."""


def module_of(objective: str) -> Any:
    """The module that implements an objective."""
    return importlib.import_module(f"pipelines.training.objectives.{OBJECTIVES[objective]}")


@dataclass(frozen=True)
class Given:
    """What a run gives its objective.

    Attributes:
        config: the `pipelines.stages.pretrain.Config`.
        sequences: the artifact with the training sequences, the first one where there are several.
        train, valid: the sequences of all ``corpora``, with the token features that the plan reads.
        tables: what patterns and rules look up beside tokens, by name.
        init: the model to start from: an artifact, or files of a folder.
        corpora: all artifacts with training sequences; none means ``sequences`` alone.
    """

    config: Any
    plan: Plan
    sequences: Artifact
    tokenizer: Any
    train: Examples
    valid: Examples
    tables: Mapping[str, Any] = field(default_factory=dict)
    init: Any = None
    corpora: tuple[Artifact, ...] = ()

    @property
    def folder(self) -> Path | None:
        """Where the model to start from lies."""
        return None if self.init is None else folder_of(self.init)

    @property
    def max_length(self) -> int:
        """The longest sequence that there can be, in tokens."""
        return max(int(data.manifest["config"]["max_length"]) for data in self.corpora or (self.sequences,))


@dataclass(frozen=True)
class ModelFolder:
    """One of the model folders that a finished run writes.

    Attributes:
        path: where in the artifact: the model that one goes on with is at the top, ``""``; another one in ``generator/``.
        prefix: what the names of its tensors begin with in the weights of the whole objective.
        plan: the guides that act in it.
    """

    path: str
    prefix: str
    model: Any
    plan: Plan
