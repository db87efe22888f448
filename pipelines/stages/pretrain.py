"""Stage ``pretrain``: from sequences and a plan to a model folder that Hugging Face tools open.

Reads sequences@1.  Writes model@1; see `pipelines.training.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, Unpack

from pydantic import model_validator

from pipelines.engine.stage import Options, Result, Stage, check_working_folder
from pipelines.storage.store import Store
from pipelines.training.config import TrainingConfig
from pipelines.training.objective import Objective
from pipelines.training.objectives import DEFAULT, OBJECTIVES, OWNERS, ObjectiveConfig, is_in_recipe
from pipelines.training.plans import load_plan
from pipelines.training.rows import check_settings
from pipelines.training.run import build, check_resume, run_training


class Config(TrainingConfig, ObjectiveConfig):
    """Settings of a pre-training run; those of a single objective are in its row of `OBJECTIVES`."""

    if TYPE_CHECKING:
        objective: str = DEFAULT

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        check_settings(self, "--objective", self.objective, OWNERS)
        return self

    @property
    def row(self) -> Objective:
        """What is known about the objective."""
        return OBJECTIVES[self.objective]

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result, without those of other objectives; see `is_in_recipe`."""
        return {name: value for name, value in super().recipe().items() if is_in_recipe(name, self.objective)}


def run(
    sequences: str | Sequence[str],
    config: Config,
    *,
    store: Store,
    resume: str | None = None,
    allow_change: Sequence[str] = (),
    **options: Unpack[Options],
) -> Result | None:
    """Pre-train a model on one sequences artifact, or on several; see `pipelines.training.run.run_training`."""
    check_working_folder()
    check_resume(resume, options)
    references = [sequences] if isinstance(sequences, str) else sequences
    for reference in (*references, *config.masks, config.cooccur, config.masking):
        if reference:
            store.find(reference)  # report a missing artifact before torch is imported, which takes seconds
    plan = load_plan(config, config.row, store)
    with ExitStack() as opened:
        corpora = [opened.enter_context(store.load(reference, kind="sequences")) for reference in references]
        return run_training(
            STAGE, config, corpora, plan, store=store, resume=resume, allow_change=allow_change, **options
        )


STAGE = Stage("pretrain", "model", 4, Config, build)
