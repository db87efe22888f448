"""Resuming a run: the same settings continue it; others are refused or, with ``--allow-change``, start a new run from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from guidance.errors import InputError, UnknownName
from pipelines.engine.declaration import Stage
from pipelines.engine.stage import read_json, recipe_of
from pipelines.storage.artifacts import Artifact
from pipelines.storage.files import write_file
from pipelines.storage.manifest import ID_LENGTH, MANIFEST, ArtifactDamaged, ArtifactInUse, ArtifactMissing
from pipelines.storage.store import Store
from pipelines.training.metrics_log import METRICS_COPY, METRICS_LOG

RUN_FILE = "run.json"
"""The file in which an unfinished run describes itself: see `note`."""


def note(folder: Path, config: Any, inputs: Mapping[str, Any]) -> None:
    """Describe the run of this folder in a file: settings without knobs, and the contents of the inputs by role."""
    about = {"config": config.recipe(), "inputs": {role: given.content for role, given in inputs.items()}}
    write_file(folder / RUN_FILE, json.dumps(about).encode())


def resumed(
    stage: Stage[Any, Any], reference: str, allowed: Sequence[str], config: Any, inputs: Mapping[str, Any], store: Store
) -> tuple[Any, tuple[Artifact, Path] | None]:
    """The configuration with which to continue a run; if settings differ, also the checkpoint to start from and its folder.

    Raises:
        ArtifactMissing: there is no such run.
        ArtifactInUse: it is to continue with other settings, and has not ended.
        InputError: a setting or an input differs and is not in ``allowed``; each is listed with both values.
    """
    folder, about = _begun(stage, reference, store)
    known = {*config.recipe(), *inputs, *about["config"], *about["inputs"]}
    if unknown := [name for name in allowed if name not in known]:
        raise UnknownName("setting", min(unknown), sorted(known))
    omitted = {name: type(config).model_fields[name].default for name in config.later}  # a recipe lacks these
    was, now = omitted | about["config"], omitted | config.recipe()
    own = {"continued_from"}
    changed = {key: (was.get(key), now.get(key)) for key in {*was, *now} - own if was.get(key) != now.get(key)}
    for role in {*about["inputs"], *inputs}:
        before, here = about["inputs"].get(role), inputs[role].content if role in inputs else None
        if before != here:
            changed[role] = (before and before[:12], here and here[:12])
    refused = {key: values for key, values in changed.items() if key not in allowed}
    if refused:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in sorted(refused.items()))
        raise InputError(
            f"{reference} was started with other settings: {listed}",
            hint="use the old settings, start a new run without --resume, or --allow-change "
            + " --allow-change ".join(sorted(refused)),
        )
    if not changed:
        same = config.model_copy(update={"continued_from": was.get("continued_from", "")})
        if recipe_of(stage, same, inputs)[:ID_LENGTH] != folder.name:
            raise InputError(f"{reference} was started by another version of guide", hint="start a new run")
        return same, None
    if "optimizer" in changed:
        raise InputError(
            f"{reference} was trained by another optimizer, whose state this one cannot continue",
            hint="--init starts from the weights of a finished run",
        )
    from pipelines.training.checkpoints import Checkpoints

    if store.is_being_built(stage.kind, folder.name):
        raise ArtifactInUse(
            f"{reference} is still being trained, and its checkpoints come and go", hint="end it first, with Ctrl-C"
        )
    newest = Checkpoints(folder).newest("checkpoint")
    if newest is None:
        raise ArtifactMissing(f"{reference} has no checkpoint", hint="--init starts from the weights of a finished run")
    if newest.counts["step"] >= config.steps and config.epochs is None:
        raise InputError(f"{reference} is already at step {newest.counts['step']}", hint="give more --steps")
    continued = config.model_copy(update={"continued_from": f"{folder.name}@{newest.counts['step']}"})
    return continued, (newest, folder)


def _begun(stage: Stage[Any, Any], reference: str, store: Store) -> tuple[Path, dict[str, Any]]:
    """The folder of an unfinished run or of a finished artifact, and its description as `note` writes it."""
    prefix = reference.removeprefix(f"{stage.kind}/")
    if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        raise InputError(f"--resume {reference!r}: a run is named {stage.kind}/ID, with at least 4 digits of its id")
    unfinished = store.find_unfinished(stage.kind, reference)
    if unfinished and (unfinished / RUN_FILE).exists():
        try:
            about = read_json(unfinished / RUN_FILE)
            return unfinished, {"config": dict(about["config"]), "inputs": dict(about["inputs"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactDamaged(
                f"{unfinished / RUN_FILE}: damaged ({error})",
                hint="the command that started this run, without --resume, writes it again and continues",
            ) from error
    manifests = sorted((store.root / stage.kind).glob(f"{prefix[:ID_LENGTH]}*/{MANIFEST}"))
    if len(manifests) > 1:
        raise ArtifactMissing(f"{reference!r} is ambiguous: {', '.join(p.parent.name for p in manifests)}")
    for path in manifests:
        with store.open(path.parent) as artifact:
            return path.parent, begun_with(artifact, stage)
    raise ArtifactMissing(
        f"no unfinished run {reference!r} in {store.root}", hint="`guide ls` lists unfinished work too"
    )


def begun_with(artifact: Artifact, stage: Stage[Any, Any]) -> dict[str, Any]:
    """The description of a finished run, as `note` writes it for an unfinished one."""
    manifest = artifact.manifest
    config = manifest.get("config", {})
    left_out = stage.config.model_fields.keys() - stage.config.model_construct(**config).recipe().keys()
    return {
        "config": {name: value for name, value in config.items() if name not in left_out},
        "inputs": {role: given.get("content") for role, given in manifest.get("inputs", {}).items()},
    }


def seed_partial(checkpoint: Artifact, old: Path, new: Path) -> None:
    """Copy metrics and checkpoints of an old run to the folder of a new run; the checkpoint to start from is copied last."""
    from pipelines.training.checkpoints import WEIGHTS, Checkpoints

    before, checkpoints, last = Checkpoints(old), Checkpoints(new), int(checkpoint.counts["step"])
    if checkpoints.newest("checkpoint") is not None:
        return
    checkpoints.prepare()
    for log in (METRICS_LOG, METRICS_COPY):  # training compares them with the checkpoint
        if (old / log).exists():
            write_file(new / log, (old / log).read_bytes())
    for name in ("best", "snapshot"):
        for step in before.steps(name):
            if step <= last and (artifact := before.with_weights(step)) is not None:
                _copy(artifact, checkpoints, name, [WEIGHTS])
    _copy(checkpoint, checkpoints, "checkpoint", checkpoint.files)


def _copy(artifact: Artifact, target: Any, name: str, files: Iterable[str]) -> None:
    def write(builder: Any) -> None:
        for file in files:
            builder.write(file, artifact.read(file))

    target.save(name, int(artifact.counts["step"]), write, keep=None)
