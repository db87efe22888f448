"""What all stages share: a configuration, a recipe digest, the decision to skip, and publishing one artifact."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from guidance.errors import InputError, MachineError
from pipelines import ROOT
from pipelines.progress import Progress, log
from pipelines.storage.artifacts import Artifact, Builder
from pipelines.storage.dry import DryArtifact, DryStore
from pipelines.storage.files import machine_errors
from pipelines.storage.manifest import ArtifactInUse, digest
from pipelines.storage.store import Store

PACKAGES = ("attention-guide", "torch", "transformers", "tokenizers", "accelerate", "pyarrow", "spacy", "stanza")


class Config(BaseModel):
    """Settings of a stage.  Every field becomes a flag, part of the recipe and an entry in the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    later: ClassVar[Set[str]] = frozenset()
    """Settings that stand in a recipe only where they are not the default, because recipes were made before them."""

    def recipe(self) -> dict[str, Any]:
        """The settings that determine the result, without the fields made by `knob`."""
        fields, settings = type(self).model_fields, self.model_dump(mode="json")
        counted = {name: value for name, value in settings.items() if not is_knob(fields[name])}
        return {
            name: value for name, value in counted.items() if name not in self.later or value != fields[name].default
        }


def knob(default: Any, description: str, **rules: Any) -> Any:
    """A field that changes how the work is done but not the result, such as the number of processes."""
    return Field(default, description=description, json_schema_extra={"knob": True}, **rules)


Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Field(description="Device to compute on; auto takes a GPU if there is one.", json_schema_extra={"knob": True}),
]
"""The knob that most stages with a model have, ``device: Device = "auto"``."""


def internal(description: str) -> Any:
    """A text field that the stage itself fills in: part of the recipe, but not a flag."""
    return Field("", description=description, json_schema_extra={"internal": True})


def is_internal(info: Any) -> bool:
    """True for a field made by `internal`."""
    return bool((info.json_schema_extra or {}).get("internal"))


def is_knob(info: Any) -> bool:
    """True for a field made by `knob`."""
    return bool((info.json_schema_extra or {}).get("knob"))


class Input(Protocol):
    """What a stage reads: an `Artifact`, or user data with a digest."""

    @property
    def content(self) -> str:
        """Digest of everything that a stage can read from it."""

    @property
    def provenance(self) -> list[dict[str, Any]]:
        """Where it comes from, and under which licence."""

    def describe(self) -> dict[str, Any]:
        """Its entry in the manifest."""


@dataclass(frozen=True)
class Files:
    """Files of the user in reading order, with their digests from the start of the run.

    Attributes:
        folder: the name of the folder that they are, such as a model; empty for files that were given one by one.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    digests: tuple[str, ...]
    provenance: list[dict[str, Any]] = field(default_factory=list)
    folder: str = ""

    @classmethod
    def of(cls, paths: Iterable[Path], names: Iterable[str], provenance: list[dict[str, Any]] | None = None) -> Files:
        paths = tuple(paths)
        return cls(paths, tuple(names), tuple(file_digest(path) for path in paths), provenance or [])

    @property
    def content(self) -> str:
        return digest(list(zip(self.names, self.digests, strict=True)))

    def describe(self) -> dict[str, Any]:
        about = {"kind": "files", "content": self.content, "count": len(self.paths), "first": list(self.names[:20])}
        return {**about, "folder": self.folder} if self.folder else about

    def check_unchanged(self) -> None:
        """Raises InputError if a file has changed since the run began."""
        for path, before in zip(self.paths, self.digests, strict=True):
            if file_digest(path) != before:
                raise InputError(f"{path}: changed during the run", hint="run again when nothing writes to it")


def file_digest(path: Path) -> str:
    """sha256 of a regular file.  Raises InputError if the file cannot be read, or is a pipe, a device or a folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InputError(f"{str(path)!r}: not a plain file", hint="use `-` to read from a pipe")
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{str(path)!r}: cannot be read ({os.strerror(error.errno or 0)})") from error


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Work(Generic[C]):
    """What a stage works on: its configuration, its opened inputs, and a folder for unfinished work."""

    config: C
    inputs: Mapping[str, Any]
    partial: Path
    progress: Progress


@dataclass(frozen=True)
class Run(Work[C]):
    """One execution of a stage, as its ``build`` function sees it."""

    out: Builder

    def warn(self, *warnings: str) -> None:
        """Log warnings, and store them in the artifact, so that a run that reuses it shows them again."""
        self.out.warnings += warnings
        for warning in warnings:
            log.warning("%s", warning)


@dataclass(frozen=True)
class Buildable(Generic[C]):
    """What `run_stage` needs of a stage; see `pipelines.engine.declaration.Stage`.

    Attributes:
        name: in manifests and recipes.
        kind: of the artifact that it writes.
        version: raised whenever the same settings and inputs give another result.
        config: its settings.
        build: writes the artifact.
    """

    name: str
    kind: str
    version: int
    config: type[C]
    build: Callable[[Run[C]], None]


@dataclass(frozen=True)
class Result:
    """What a stage returns: its artifact, whether it existed already, and the name it was given."""

    artifact: Artifact
    reused: bool
    name: str | None = None

    @property
    def reference(self) -> str:
        return self.artifact.reference


def reused(artifact: Artifact, name: str | None = None) -> Result:
    """An artifact that existed already, as a result.  What the run that built it warned of is logged again."""
    for warning in artifact.manifest.get("warnings", []):
        log.warning("%s", warning)
    return Result(artifact, True, name)


class Options(TypedDict, total=False):
    """Keyword arguments, besides the store, that every stage's ``run`` passes on to `run_stage`.

    Attributes:
        name: also give the artifact a new version of this name.
        force: build the artifact even if it exists.
        wait: wait for a run that is building the same artifact, instead of raising ArtifactInUse.
        progress: draws progress.
    """

    name: str | None
    force: bool
    wait: bool
    progress: Progress | None


def recipe_of(stage: Buildable[Any], config: Config, inputs: Mapping[str, Input]) -> str:
    """The digest of everything that determines the result."""
    return digest(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": config.recipe(),
            "inputs": {role: given.content for role, given in inputs.items()},
        }
    )


def run_stage(
    stage: Buildable[Any],
    config: Config,
    inputs: Mapping[str, Input],
    *,
    store: Store,
    name: str | None = None,
    force: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Run a stage, unless the artifact that it would write exists and verifies.

    Nothing is written if it does, so it may then be in a store that is read-only.  What the stage raises is raised, and then
    nothing is published; ArtifactInUse if another process is building the same artifact, and ``wait`` is off.

    In a `DryStore` nothing is run: the result is the artifact that exists, or else a `DryArtifact`.  Raises NotYet if an input
    does not exist yet.
    """
    newest = store.check_name_free(name, stage.kind) if name else None
    recipe = recipe_of(stage, config, inputs)
    try:
        store.check_writable()
    except MachineError:  # the store can still say that there is nothing to do
        artifact = None if force else store.existing(stage.kind, recipe)
        if artifact is None or (name and not (newest and newest.refers_to(artifact))):
            raise
        return reused(artifact, str(newest) if newest else None)
    if isinstance(store, DryStore):
        artifact = store.existing(stage.kind, recipe, verify=not force)
        return reused(artifact) if artifact else Result(DryArtifact(stage.kind, recipe), False)
    store.sweep()
    with store.lock(stage.kind, recipe) as lock:
        if not lock.acquire(wait=False):
            holder = lock.path.read_text(errors="replace").strip() or "another process"
            if not wait:
                raise ArtifactInUse(f"{stage.kind}/{recipe[:16]} is being built by {holder}")
            log.info("waiting for %s, which is building the same artifact", holder)
            lock.acquire(wait=True)
        lock.note(f"process {os.getpid()} on {os.uname().nodename}", alone=True)
        artifact = store.existing(stage.kind, recipe, verify=not force)
        if force and artifact is not None:
            artifact.close()
            artifact = None
        is_new = artifact is None
        if artifact is None:
            store.begin(stage.kind, recipe, name)
            artifact = _build(stage, config, inputs, store, recipe, progress or Progress())
            store.begin(stage.kind, recipe, None)
        version = str(store.add_name(name, artifact)) if name else None
        return Result(artifact, False, version) if is_new else reused(artifact, version)


def _build(
    stage: Buildable[Any], config: Config, inputs: Mapping[str, Input], store: Store, recipe: str, progress: Progress
) -> Artifact:
    started = time.monotonic()
    manifest: dict[str, Any] = {
        "stage": stage.name,
        "stage_version": stage.version,
        "guide": version_of("attention-guide"),
        "config": config.model_dump(mode="json"),
        "inputs": {role: given.describe() for role, given in inputs.items()},
        "seed": getattr(config, "seed", None),
        "packages": {package: version for package in PACKAGES if (version := version_of(package))},
        "git": _git_revision(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    with store.build(stage.kind, recipe, manifest) as out:
        for given in inputs.values():
            out.provenance += [entry for entry in given.provenance if entry not in out.provenance]
        stage.build(Run(config, inputs, store.partial(stage.kind, recipe), progress, out))
        for given in inputs.values():
            if isinstance(given, Files):
                given.check_unchanged()
        manifest["seconds"] = round(out.seconds_before + time.monotonic() - started, 3)
    return Artifact(store.folder(stage.kind, recipe))


@functools.cache
def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    from importlib import metadata  # imported late, to keep `guide --help` fast

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _git_revision() -> str | None:
    """The commit of this code; None unless it runs from a checkout."""
    if not (ROOT / ".git").exists():
        return None
    # `git describe --dirty` locks the index; a run killed at that moment would leave the lock behind
    command = ["git", "--no-optional-locks", "-C", str(ROOT), "status", "--porcelain=v2", "--branch"]
    try:
        answer = subprocess.run([*command, "--untracked-files=no"], capture_output=True, timeout=5)
        lines = answer.stdout.decode(errors="replace").splitlines()
        commit = next((line.split()[2][:12] for line in lines if line.startswith("# branch.oid ")), None)
        is_changed = any(not line.startswith("#") for line in lines)
        return f"{commit}-dirty" if commit and is_changed else commit
    except (OSError, subprocess.SubprocessError):
        return None


def check_working_folder() -> None:
    """Raises MachineError if the working folder was removed: native libraries would abort the process."""
    with machine_errors("the working folder is gone"):
        os.getcwd()


def require(package: str, install: str) -> Any:
    """Import an optional package.  Raises MachineError if it is not installed; the hint is the command that does it."""
    import importlib

    check_working_folder()
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MachineError(f"{package} is not installed", hint=f"pip install {install}") from error


def read_json(path: Path) -> Any:
    """The content of a small JSON file that guide wrote."""
    return json.loads(path.read_bytes())
