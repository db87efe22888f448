"""The table ``masking_proportion``: the share of units that an adversary masked, from the metrics of its run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from guidance.errors import InputError, PlanError
from guidance.mechanisms.random_mask import PROPORTIONS
from pipelines.lazy import np, pa
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactDamaged

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.plan import Plan


def check_masking(plan: Plan, source: str, reference: str) -> None:
    """Check that there is a masking run if and only if a guide follows it.

    Args:
        source: where the plan comes from.
        reference: the run; empty if there is none.

    Raises:
        PlanError: a guide follows a run, but there is none.
        InputError: there is a run, but no guide follows it.
    """
    follower = plan.tables().get(PROPORTIONS)
    if follower is not None and not reference:
        raise PlanError(
            f"{source}: guide {follower!r} needs the table {PROPORTIONS}",
            hint="--masking-run RUN, a model that was trained with an adversary",
        )
    if reference and follower is None:
        raise InputError(
            f"--masking-run {reference}: no guide of the plan follows it",
            hint='leave it out; only mechanism = "random_mask" with kind = "scheduled" follows a run',
        )


def read_proportions(run: Artifact) -> Tensor:
    """The share of units that was masked at each step in each layer of a finished run: (steps, layers), float64.

    Raises:
        InputError: the run had no adversary or random mask, or not in all layers.
        ArtifactDamaged: its metrics cannot be read, or a share is missing or not between 0 and 1.
    """
    import torch

    with run.open("metrics.parquet") as file:
        try:
            table = open_parquet(file)
            layers = {
                int(m[1]): m[0] for name in table.schema_arrow.names if (m := re.fullmatch(r"masked/(\d+)", name))
            }
            shares = table.read(columns=[layers[layer] for layer in sorted(layers)])
            proportions = np.array([column.to_numpy() for column in shares.columns], np.float64).T
        except (pa.ArrowException, ValueError) as error:
            raise ArtifactDamaged(f"{run.path / 'metrics.parquet'}: unreadable ({str(error)[:160]!r})") from error
    if sorted(layers) != list(range(len(layers))) or not layers:
        known = f"for layers {', '.join(map(str, sorted(layers)))} only" if layers else "for no layer"
        raise InputError(
            f"{run.reference}: its metrics have masking proportions {known}",
            hint="--masking-run needs a run with an adversary in all layers, such as one with preset:asa-pretraining",
        )
    if not ((proportions >= 0) & (proportions <= 1)).all():
        raise ArtifactDamaged(f"{run.path / 'metrics.parquet'}: a masking proportion is not between 0 and 1")
    return torch.from_numpy(proportions)
