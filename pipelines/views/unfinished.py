"""Unfinished work for display: the name that its artifact will get, and how far it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.storage.store import Store
from pipelines.training.metrics_log import METRICS_LOG
from pipelines.training.resuming import RUN_FILE

TAIL = 1 << 16
"""Bytes at the end of a log in which to look for its last line."""


@dataclass(frozen=True)
class Unfinished:
    """Unfinished work.  The command that began it continues it.

    Attributes:
        reference: ``kind/id``, as of the artifact that it will become.
        name: the name that the artifact will get, if any.
        step: the last logged step of a training run.
        steps: how many steps it will have; None if its length is given in epochs.
        parts: how many parts are done of work that is divided into shards.
        settings: the configuration of a training run, without settings that do not affect the result.
        inputs: the content digest of each of its inputs, by role.
    """

    folder: Path
    reference: str
    name: str | None = None
    step: int | None = None
    steps: int | None = None
    parts: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, store: Store) -> Unfinished:
        """What is known about a folder of unfinished work; whatever cannot be read is left out."""
        reference, name = f"{folder.parent.name}/{folder.name}", store.unfinished_name(folder)
        about = _run(folder)
        if about is None:
            parts = sum(path.name[:1].isdigit() for path in folder.rglob("*.partial"))
            return cls(folder, reference, name, parts=parts)
        settings, inputs = about
        steps = settings.get("steps") if settings.get("epochs") is None else None
        return cls(folder, reference, name, _last_step(folder), steps, settings=settings, inputs=inputs)

    @property
    def state(self) -> str:
        """``unfinished, step 40 of 1,000``, ``unfinished, 3 parts done``, or no more than that."""
        if self.step is not None:
            return f"unfinished, step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        return "unfinished" + (f", {self.parts:,} part{'' if self.parts == 1 else 's'} done" if self.parts else "")

    @property
    def bytes(self) -> int:
        """The size of all files so far."""
        return folder_size(self.folder)

    def as_dict(self) -> dict[str, Any]:
        """What programs see of it in a list."""
        kind, _, id_ = self.reference.partition("/")
        about = {"kind": kind, "id": id_, "bytes": self.bytes, "path": os.fspath(self.folder)}
        return about | {"name": self.name, "step": self.step, "steps": self.steps, "parts": self.parts}


def _run(folder: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Settings and inputs of a training run; None for other work."""
    try:
        about = json.loads((folder / RUN_FILE).read_bytes())
        return dict(about["config"]), dict(about["inputs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _last_step(folder: Path) -> int:
    """The step of the last complete line in the log of a run; 0 before the first step."""
    try:
        with open(folder / METRICS_LOG, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            whole = file.read().rpartition(b"\n")[0]
        return int(json.loads(whole.rpartition(b"\n")[2])["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0


def folder_size(folder: Path) -> int:
    """Total bytes of all files below a folder; files that vanish meanwhile count as 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue
    return total
