"""What a probe or a search found, as the tables that its command shows."""

from __future__ import annotations

import contextlib

from guidance.errors import GuideError
from pipelines.engine.declaration import Table
from pipelines.stages import find
from pipelines.storage.artifacts import Artifact
from pipelines.views.search_tables import search_tables


def findings_of(artifact: Artifact) -> list[Table]:
    """What a probe or a search found; empty for other artifacts, and for those that are damaged or of another version."""
    with contextlib.suppress(GuideError, OSError, LookupError, ValueError):
        if artifact.kind == "search":
            return search_tables(artifact)
        if artifact.kind == "probe" and (stage := find(artifact.manifest["stage"])):
            return [stage.command.show(artifact, stage.config())]
    return []
