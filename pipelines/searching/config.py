"""The settings of ``search``: those of the runs, and which of them vary."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, create_model, model_validator

from pipelines.engine.executor import ShareOfWork, Workers
from pipelines.engine.stage import knob
from pipelines.stages import finetune, pretrain
from pipelines.training.config import TrainingConfig
from pipelines.training.rows import one_of

MOST_RUNS = 10_000
MOST_SUBSETS = 256


class SearchConfig(Workers):
    """Settings of every search."""

    piece: ClassVar[str] = "run"
    lighter: ClassVar[str] = "a smaller --batch-size, or more --micro-batches"
    ahead: ClassVar[int] = 1  # after an interruption no queued run may start

    grid: list[str] = Field(
        [],
        description="A setting and the values to try, such as learning-rate=1e-5,2e-5, or a key of a row of the plan, such as "
        "plan.next.weight=1,10,100 (repeatable); all combinations are trained. A row is named by its name or its number from 1. "
        "Values are written as in the file of a plan, but words need no quotes.",
    )
    leave_one_out: bool = Field(
        False, description="Compare the plan with the plan without each of its rows in turn; each is tested."
    )
    subsets: bool = Field(False, description="Compare every subset of the rows of the plan; each is tested.")
    seeds: int = Field(1, ge=1, description="Runs of each combination, with seeds from --seed on.")
    test_seeds: int = Field(
        0,
        ge=0,
        description="Further runs of each tested setting, with seeds that follow those of --seeds. The choice has not seen them, "
        "and only they are tested.",
    )
    test_every: bool = Field(False, description="Test every setting, not only the best one of the grid.")
    folds: int = Field(0, ge=0, description="Folds of a cross-validation; 0 takes the splits of the dataset.")
    fold_seed: int = Field(0, ge=0, lt=2**63, description="Seed of the assignment to folds.")
    along: str = Field(
        "",
        description="A pre-trained model: each of its snapshots and its last weights are fine-tuned and tested, which shows how "
        "the score grows along pre-training (`guide pretrain --snapshots`).",
    )
    weights: Literal["best", "last"] = Field(
        "best", description="Weights that count: those of each run's best validation, or of its last step."
    )
    limit: int | None = knob(
        None,
        f"Largest number of runs; by default {MOST_SUBSETS:,} with --subsets, else {MOST_RUNS:,}.",
        ge=1,
        le=MOST_RUNS,
    )
    executor: Literal["local", "dask"] = knob(
        "local", "Executor of the runs: processes on this machine, or a Dask cluster."
    )
    jobs: int = knob(1, "Runs that are trained at the same time, each in a process of its own.", ge=1, le=4096)
    shard: ShareOfWork = knob(
        "", "i/n: train every n-th run, starting at the i-th, and stop. The same command without --shard does the rest."
    )

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.folds == 1:
            raise ValueError("--folds: one fold leaves nothing to train on")
        if self.leave_one_out and self.subsets:
            raise ValueError("--leave-one-out and --subsets exclude each other: all subsets have those without one row")
        if self.along and getattr(self, "init", ""):
            raise ValueError("--along and --init exclude each other: each run starts from a moment of --along")
        return self

    @property
    def threads(self) -> int:
        """Threads of each local process: its share of the cores."""
        return max(1, (os.cpu_count() or 1) // self.jobs)


_SINCE_ROWS = TrainingConfig.later | {"leave_one_out", "subsets", "test_seeds", "test_every"}


class Config(SearchConfig, finetune.Config):
    """Settings of a search with fine-tuning; all others are those of the runs."""

    later: ClassVar[Set[str]] = _SINCE_ROWS


class PretrainConfig(SearchConfig, pretrain.Config):
    """Settings of a search with pre-training; all others are those of the runs."""

    later: ClassVar[Set[str]] = _SINCE_ROWS
    select: ClassVar[str] = "loss"
    parser: ClassVar[str] = ""

    @model_validator(mode="after")
    def _check_pretraining(self) -> Self:
        for name in ("folds", "along"):
            if getattr(self, name):
                raise ValueError(f"--{name} is for fine-tuning, and sequences of running text are for pre-training")
        return self


AnyConfig = Config | PretrainConfig


def _of_both() -> dict[str, Any]:
    """The fields that only pre-training has; and ``architecture``, which both kinds have, with the values of both."""
    fine, pre = finetune.Config.model_fields, pretrain.Config.model_fields
    families = dict.fromkeys(family for fields in (fine, pre) for family in get_args(fields["architecture"].annotation))
    only = {name: (info.annotation, info) for name, info in pre.items() if name not in fine}
    return only | {"architecture": one_of("auto", families, str(fine["architecture"].description))}


AllSettings: Any = create_model("AllSettings", __base__=Config, **_of_both())
"""The settings of searches of both kinds, as one flat configuration with the defaults of ``finetune``."""
