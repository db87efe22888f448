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


def _own_fields() -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The fields of all groups by their names, and the objectives that each belongs to."""
    fields: dict[str, Any] = {}
    owners: dict[str, tuple[str, ...]] = {}
    for group in dict.fromkeys(group for row in OBJECTIVES.values() for group in row.settings):
        for name, info in group.model_fields.items():
            if name in fields:
                raise ValueError(f"two groups of settings have {name}: list the same group in both objectives")
            fields[name] = (info.annotation, info)
            owners[name] = tuple(row.name for row in OBJECTIVES.values() if group in row.settings)
    return fields, owners


_FIELDS, OWNERS = _own_fields()
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
    **_FIELDS,
)
"""The choice of an objective and the settings of all objectives, as one flat configuration."""


def check_settings(config: Any) -> None:
    """Raises ValueError when a setting of another objective was changed."""
    for name, owners in OWNERS.items():
        if config.objective not in owners and getattr(config, name) != type(config).model_fields[name].default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} belongs to --objective {' or '.join(owners)}, not to {config.objective}")
