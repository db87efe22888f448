"""The manifest of an artifact: its format, its digests, and checking it."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guidance.errors import InputError, MachineError, reason_of
from pipelines.progress import log

FORMAT = 1
"""Version of the manifest format; newer ones are refused."""

MANIFEST = "artifact.json"
MANIFEST_LIMIT = 16 << 20
ID_LENGTH = 16
KIND = re.compile(r"(?!names$)[a-z]+(-[a-z]+)*")
ID = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}")
DRY = "dry:"
"""The prefix of references to artifacts that do not exist yet; their kind follows."""

DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = {
    *("format", "guide", "seal", "kind", "recipe", "content", "stage", "stage_version", "config", "inputs", "seed"),
    *("packages", "git", "created", "seconds", "files", "counts", "warnings", "provenance"),
}
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


class ArtifactMissing(InputError):
    """A reference does not match any artifact."""


class ArtifactAmbiguous(ArtifactMissing):
    """A reference matches more than one artifact."""


class ArtifactDamaged(InputError):
    """An artifact does not match its manifest."""


class ArtifactMisplaced(ArtifactDamaged):
    """A folder is called by the id of one artifact and holds another: it was renamed, or two were swapped."""


class ArtifactMismatch(InputError):
    """An artifact has another kind, format or lineage than needed."""


class ArtifactInUse(MachineError):
    """Another process is building or reading the artifact."""


def canonical_json(value: Any) -> bytes:
    """A value as canonical JSON: keys sorted, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest added, which detects any change to it."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return body | {"seal": digest(body)}


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """Read and check the bytes of a manifest.  Raises ArtifactDamaged if it is not a JSON object, was altered, or names
    files outside its directory, and ArtifactMismatch if it was written in a newer format."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        manifest = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
        if not isinstance(manifest, dict) or type(manifest.get("format")) is not int or manifest["format"] < 1:
            raise ValueError("it is not a manifest")
        if manifest["format"] > FORMAT:
            raise ArtifactMismatch(
                f"{path}: made by guide {manifest.get('guide', '?')}, format {manifest['format']}; "
                f"this guide reads formats up to {FORMAT}",
                hint="upgrade attention-guide, or rerun the stage with this version",
            )
        if manifest.get("seal") != seal(manifest)["seal"]:
            raise ValueError("it was altered after it was written")
        _check_manifest(manifest)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        raise ArtifactDamaged(
            f"{path / MANIFEST}: {detail}", hint="rerun the stage that made it with --force"
        ) from error


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Check every value: a matching seal does not make a manifest trustworthy, since anyone can compute it."""
    for name, entry in manifest["files"].items():
        if not FILE_NAME.fullmatch(name) or ".." in name.split("/") or name == MANIFEST:
            raise ValueError(f"it names a file outside its directory: {name!r}")
        if type(entry["bytes"]) is not int or entry["bytes"] < 0 or not DIGEST.fullmatch(entry["sha256"]):
            raise ValueError(f"the size or digest of {name!r} is malformed")
    if not KIND.fullmatch(manifest["kind"]) or not DIGEST.fullmatch(manifest["recipe"]):
        raise ValueError("its kind or its recipe is malformed")
    if manifest["content"] != content_of(manifest["files"]):
        raise ValueError("its content digest does not match its files")
    shapes = {"inputs": dict, "counts": dict, "config": dict, "packages": dict, "warnings": list, "provenance": list}
    for key, shape in shapes.items():
        if not isinstance(manifest.get(key, shape()), shape):
            raise ValueError(f"{key!r} is malformed")
    if not isinstance(manifest["stage"], str) or not all(
        isinstance(i, dict) for i in manifest.get("inputs", {}).values()
    ):
        raise ValueError("'stage' or 'inputs' is malformed")
    _warn_of_unknown(frozenset(manifest) - _KEYS)


@functools.cache
def _warn_of_unknown(keys: frozenset[str]) -> None:
    """Warn once of keys that a newer version may have added."""
    if keys:
        log.warning("ignored unknown keys in a manifest, perhaps written by a newer guide: %s", ", ".join(sorted(keys)))


def content_of(files: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest of the content of all files."""
    return digest({name: entry["sha256"] for name, entry in files.items()})
