"""The codes of relations and parts of speech in role masks: what the numbers of a column stand for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pipelines.storage.files import open_parquet
from pipelines.storage.manifest import ArtifactMismatch

if TYPE_CHECKING:
    from pipelines.storage.artifacts import Artifact

CODES_KEY = b"codes"
"""The key of a column's metadata that lists its codes."""


def check_codes(masks: Artifact) -> None:
    """Raise ArtifactMismatch if the file's codes of relations or parts of speech differ from this version's."""
    from guidance.patterns.features import CODES

    for name in (name for name in masks.files if name.endswith(".parquet")):
        with masks.open(name) as file:
            schema = open_parquet(file).schema_arrow
        for field in (schema.field(column) for column in CODES if column in schema.names):
            if (codes := (field.metadata or {}).get(CODES_KEY)) and json.loads(codes) != list(CODES[field.name]):
                raise ArtifactMismatch(
                    f"{masks.reference}: column {field.name} was written by a version of guide with other codes",
                    hint="build it again: guide build-masks --force",
                )
