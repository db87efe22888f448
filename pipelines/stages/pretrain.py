"""Stage ``pretrain``: from sequences and a plan to a model folder that Hugging Face tools open.

Reads sequences@1.  Writes model@1; see `pipelines.training.run`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from pipelines.engine.declaration import Command, Opening
from pipelines.inputs import Sequences
from pipelines.storage.artifacts import Artifact
from pipelines.storage.manifest import ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.config import TrainingConfig
from pipelines.training.objective import Objective
from pipelines.training.objectives import DEFAULT, OBJECTIVES, OWNERS, ObjectiveConfig, is_in_recipe
from pipelines.training.plans import load_plan
from pipelines.training.rows import check_settings
from pipelines.training.run import RUN_OPTIONS, Training, add_inputs, build
from pipelines.training.run_inputs import is_guided
from pipelines.training.topics import TOPICS


class Config(TrainingConfig, ObjectiveConfig):
    """Settings of a pre-training run; those of a single objective are in its class in `OBJECTIVES`."""

    if TYPE_CHECKING:
        objective: str = DEFAULT

    @model_validator(mode="after")
    def _check_objective(self) -> Self:
        check_settings(self, "--objective", self.objective, OWNERS)
        return self

    @property
    def row(self) -> type[Objective]:
        """What is known about the objective."""
        return OBJECTIVES[self.objective]

    def recipe(self) -> dict[str, Any]:
        """The settings that decide the result, without those of other objectives; see `is_in_recipe`."""
        return {name: value for name, value in super().recipe().items() if is_in_recipe(name, self.objective)}


def _prepare(opening: Opening[Config]) -> None:
    config = opening.config
    for reference in (*config.masks, config.cooccur, config.masking):
        if reference:
            opening.store.find(reference)  # report a missing artifact before torch is imported, which takes seconds
    add_inputs(opening, load_plan(config, config.row, opening.store))


def _next(made: Artifact, store: Store) -> tuple[str, ...]:
    """See how good the model is, or how much better than a plain one."""
    masks = made.manifest["inputs"].get("masks")
    needed = f" --masks {store.name_of('masks', masks['recipe'])}" if masks else ""
    is_translator = made.manifest["config"]["objective"] == "translation"
    split = ""
    with suppress(ArtifactMissing), store.load_input(made, "sequences", verify=False) as data:
        split = "" if data.files.get("test.parquet", {}).get("rows") else " --split valid"
    evaluate = (f"guide evaluate {{}} {{sequences}}{needed}{split}",) if is_translator else ()
    compare = ("guide compare {model} {}",) if is_guided(made.manifest) else ()
    return (*evaluate, *compare, "guide show {}")


STAGE = Training(
    "pretrain",
    "model",
    4,
    Config,
    build,
    takes={"sequences": Sequences("one or more", many=True)},
    prepare=_prepare,
    options=RUN_OPTIONS,
    command=Command(
        "pretrain",
        f"""Pre-train a model, with or without guided heads.

        {"  ".join(objective.needs for objective in OBJECTIVES.values())}

        A plan may need more inputs: preset:roles needs what `guide build-masks` makes of the same sequences; preset:mcmisp (for
        electra) and preset:mcmisp-bert (for mlm) need what `guide build-cooccur` counts.  With --init, make the sequences with
        that model's tokenizer: `guide build-sequences` takes the model folder.  Missing inputs are reported before training
        starts.  `guide plan show` lists all presets; `guide plan new` writes a plan to edit.

        Ctrl-C or SIGTERM finishes the current step and saves; the same command continues the run, bit for bit.
        """,
        examples=(
            *(example for objective in OBJECTIVES.values() for example in objective.examples),
            "for s in 0 1 2; do guide pretrain wiki-128 --architecture bert --seed $s --name plain-$s; done",
            "guide pretrain wiki-128 news-128 --sampling 0.8 --sampling 0.2 --plan my-plan.toml",
            "guide pretrain wiki-128 --layers 8 --hidden 128 --heads 4 --learning-rate 1e-3 --schedule constant",
            "torchrun --nproc-per-node 2 --no-python guide pretrain wiki-128 --plan preset:neighbours",
            "guide pretrain wiki-128 --steps 9000 --resume model/1f0c --allow-change steps",
        ),
        next=_next,
        group="Train",
        topics=TOPICS,
    ),
)

run = STAGE.run
