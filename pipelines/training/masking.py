"""The table ``masking_proportion``: how much an adversary switched off, from the metrics of the run that it was in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from guidance.errors import InputError, PlanError
from guidance.mechanisms.random_mask import PROPORTIONS
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactDamaged

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.plan import Plan


def check_masking(plan: Plan, source: str, reference: str) -> None:
    """See that a run is named if and only if a guide follows it.

    Args:
        source: where the plan comes from.
        reference: the run; empty where none is given.

    Raises:
        PlanError: a guide follows a run, and none is given.
        InputError: a run is given, and no guide follows it.
    """
    follower = plan.tables().get(PROPORTIONS)
    if follower is not None and not reference:
        raise PlanError(
            f"{source}: guide {follower!r} needs the table {PROPORTIONS}",
            hint="--masking RUN, a model that was trained with an adversary",
        )
    if reference and follower is None:
        raise InputError(
            f"--masking {reference}: no guide of the plan follows it",
            hint='mechanism = "random_mask" with kind = "scheduled" does; or leave it out',
        )


def read_proportions(run: Artifact) -> Tensor:
    """The share of units that was off at each step in each layer of a finished run: (steps, layers), float64.

    Raises:
        InputError: the run had no adversary or random mask, or not in all layers.
        ArtifactDamaged: its metrics cannot be read, or have no share where there should be one.
    """
    import numpy as np
    import pyarrow as pa
    import torch

    with run.open("metrics.parquet") as file:
        try:
            table = open_parquet(file)
            found = {int(m[1]): m[0] for name in table.schema_arrow.names if (m := re.fullmatch(r"masked/(\d+)", name))}
            shares = table.read(columns=[found[layer] for layer in sorted(found)])
            proportions = np.array([column.to_numpy() for column in shares.columns], np.float64).T
        except (pa.ArrowException, ValueError) as error:
            raise ArtifactDamaged(f"{run.path / 'metrics.parquet'}: unreadable ({str(error)[:160]!r})") from error
    if sorted(found) != list(range(len(found))) or not found:
        layers = f"for layers {', '.join(map(str, sorted(found)))} only" if found else "for no layer"
        raise InputError(
            f"{run.reference}: its metrics have masking proportions {layers}",
            hint="--masking wants a run with an adversary in all layers, as of preset:asa-pretraining",
        )
    if not ((proportions >= 0) & (proportions <= 1)).all():
        raise ArtifactDamaged(f"{run.path / 'metrics.parquet'}: a masking proportion is no share")
    return torch.from_numpy(proportions)
