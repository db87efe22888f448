"""The objectives of ``guide pretrain``: one file of this folder for each, which holds its row as ``OBJECTIVE``.

A new file here is a new objective: the command line, its help, the checks, the model card and ``guide evaluate`` read the
rows.  Objectives are listed in the order of their file names.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from pipelines.engine import stage
from pipelines.training.objective import Objective

DEFAULT = "mlm"


def _find() -> dict[str, Objective]:
    """The row of every module in this folder."""
    found: dict[str, Objective] = {}
    for module in sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"):
        row: Objective = importlib.import_module(f"{__name__}.{module}").OBJECTIVE
        if row.name in found:
            raise ValueError(f"two objectives are called {row.name}")
        found[row.name] = row
    return found


OBJECTIVES: Mapping[str, Objective] = _find()
"""Every objective by its name."""


def _fields(groups: Iterable[type[stage.Config]]) -> dict[str, Any]:
    """The fields of groups of settings, by their names."""
    found: dict[str, Any] = {}
    for group in dict.fromkeys(groups):
        for name, info in group.model_fields.items():
            if name in found:
                raise ValueError(f"two groups of settings have {name}: list the same group in both objectives")
            found[name] = (info.annotation, info)
    return found


OWNERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(row.name for row in OBJECTIVES.values() if group in row.settings)
    for group in dict.fromkeys(group for row in OBJECTIVES.values() for group in row.settings)
    for name in group.model_fields
}
"""For each setting that not all objectives have: the objectives that have it."""


def _choice(default: str, names: Iterable[str], description: str) -> tuple[Any, Any]:
    """A field whose value is one of these names."""
    return Literal.__getitem__(tuple(names)), Field(default, description=description)


ObjectiveConfig: Any = create_model(
    "ObjectiveConfig",
    __base__=stage.Config,
    objective=_choice(
        DEFAULT,
        OBJECTIVES,
        "What the model learns: " + "; ".join(f"{o.name}, {o.learns}" for o in OBJECTIVES.values()) + ".",
    ),
    architecture=_choice(
        "auto",
        dict.fromkeys(("auto", *(family for row in OBJECTIVES.values() for family in row.families))),
        "Family of a new model; auto is "
        + ", ".join(f"{row.families[0]} for {row.name}" for row in OBJECTIVES.values())
        + ".",
    ),
    **_fields(group for row in OBJECTIVES.values() for group in row.settings),
)
"""The choice of an objective and the settings of all objectives, as one flat configuration."""

EvaluationConfig: Any = create_model(
    "EvaluationConfig",
    __base__=stage.Config,
    **_fields(group for row in OBJECTIVES.values() if row.evaluation for group in row.evaluation.settings),
)
"""The settings of the evaluations of all objectives, as one flat configuration."""


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


def check_settings(config: Any) -> None:
    """Raises ValueError when a setting of another objective was changed."""
    for name, owners in OWNERS.items():
        if config.objective not in owners and getattr(config, name) != type(config).model_fields[name].default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} belongs to --objective {' or '.join(owners)}, not to {config.objective}")
