"""Training in all processes of a ``torchrun`` job: the first process also reads, writes and logs for the others.

The first process alone knows whether the artifact exists already.  The others wait until it announces whether there is
anything to train.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.progress import Progress

if TYPE_CHECKING:
    from pipelines.training.cluster import Cluster


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
    from pipelines.training.loop import train
    from pipelines.training.preparation import Prepared

    cluster = Cluster(config.device, config.precision)
    if cluster.broadcast(0.0):
        train(Prepared.of(config, inputs), cluster, partial, Progress())
