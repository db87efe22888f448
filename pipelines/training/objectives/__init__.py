"""The objectives of ``guide pretrain``: one file of this folder for each, with its `Objective`.

A new file here is a new objective: the command line, its help, the checks, the model card, ``guide evaluate`` and ``guide
compare`` find it.  Objectives are listed in the order of their file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import create_model

from pipelines.engine import stage
from pipelines.training.objective import Objective
from pipelines.training.rows import families, fields, find_rows, one_of, owners

DEFAULT = "mlm"

OBJECTIVES: Mapping[str, type[Objective]] = find_rows(__name__, Path(__file__).parent, Objective)
"""Every objective by its name."""

OWNERS: Mapping[str, tuple[str, ...]] = owners(OBJECTIVES.values())
"""For each setting that not all objectives have: the objectives that have it."""

ObjectiveConfig: Any = create_model(
    "ObjectiveConfig",
    __base__=stage.Config,
    objective=one_of(
        DEFAULT,
        OBJECTIVES,
        "Objective of the model: " + "; ".join(f"{o.name}, {o.learns}" for o in OBJECTIVES.values()) + ".",
    ),
    architecture=families(OBJECTIVES.values()),
    **fields(group for row in OBJECTIVES.values() for group in row.settings),
)
"""The choice of an objective and the settings of all objectives, as one flat configuration."""


_IN_EVERY_RECIPE = {
    "mask_probability",
    "generator",
    "generator_size",
    "discriminator_weight",
    "label_smoothing",
    "decoder_layers",
}
"""Settings that stand in the recipes of all objectives, because recipes have always had them."""


def is_in_recipe(name: str, objective: str) -> bool:
    """Whether a setting is part of the recipe of an objective.

    Settings of other objectives are not, so that a new objective does not change the recipes of those before it.
    """
    return name in _IN_EVERY_RECIPE or objective in OWNERS.get(name, (objective,))
