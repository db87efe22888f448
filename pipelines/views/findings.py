"""What a probe found, as the table that its command shows."""

from __future__ import annotations

import contextlib

from guidance.errors import GuideError
from pipelines.engine.declaration import Table
from pipelines.stages import find
from pipelines.storage.artifacts import Artifact


def findings_of(artifact: Artifact) -> Table | None:
    """What a probe found; None of other artifacts, and of probes that are damaged or of another version."""
    if artifact.kind == "probe":
        with contextlib.suppress(GuideError, OSError, LookupError, ValueError):
            stage = find(artifact.manifest["stage"])
            return stage.command.show(artifact, stage.config()) if stage else None
    return None
