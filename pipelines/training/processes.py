"""Training in all processes of a ``torchrun`` job: the first process also reads, writes and logs for the others.

The first process alone knows whether the artifact exists already.  The others wait until it announces whether there is
anything to train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.progress import Progress, log

if TYPE_CHECKING:
    from pipelines.training.cluster import Cluster
    from pipelines.training.loop import Outcome
    from pipelines.training.preparation import Prepared


class Announcement:
    """Tells the other processes, once, whether there is anything to train."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.sent = int(os.environ.get("WORLD_SIZE", "1")) == 1

    def send(self, *, go: bool, cluster: Cluster | None = None) -> None:
        """Announce it; does nothing after the first time, or if there are no other processes."""
        from pipelines.training.cluster import Cluster

        if not self.sent:
            self.sent = True
            cluster = cluster or Cluster(self.config.device, self.config.precision)
            cluster.broadcast(float(go))


def follow(config: Any, inputs: Mapping[str, Any], partial: Path) -> None:
    """The part of every process but the first: wait for the announcement, and train if there is anything to train."""
    from pipelines.training.cluster import Cluster
    from pipelines.training.preparation import Prepared

    cluster = Cluster(config.device, config.precision)
    if cluster.broadcast(0.0):
        train(config, Prepared.of(config, inputs), cluster, partial, Progress())


def train(config: Any, prepared: Prepared, cluster: Cluster, partial: Path, progress: Progress) -> Outcome:
    """Train to the last step.

    Raises:
        GuidanceHadNoEffect: the pattern of a guide matched nothing in the whole run.
        GuideError: see `pipelines.training.loop.train`.
    """
    from guidance.errors import GuidanceHadNoEffect
    from guidance.guided_model import check_matches
    from pipelines.training import loop

    if cluster.leads:
        log.info(
            "training on %s, %s, %d process%s",
            cluster.device.type,
            cluster.precision,
            cluster.world,
            "es" if cluster.world > 1 else "",
        )
    outcome = loop.train(
        prepared.learner,
        prepared.order,
        config.with_steps(prepared.steps, prepared.steps_of_epoch),
        cluster,
        partial,
        progress=progress,
        trackers=partial.parents[2] / "trackers" / f"{partial.parent.name}-{partial.name}",
    )
    try:
        check_matches(outcome.tallies)
    except GuidanceHadNoEffect as error:
        error.hint = f"{error.hint}; `guide rm model/{partial.name}` removes the unfinished run"
        raise
    return outcome
