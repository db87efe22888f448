"""Unfinished work for display: the name that its artifact will get, and how far it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guidance.errors import counted
from pipelines.storage.store import Store
from pipelines.training.metrics_log import METRICS_LOG
from pipelines.training.resuming import RUN_FILE

TAIL = 1 << 16
"""Bytes at the end of a log in which to look for its last line."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def unfinished(folder: Path, store: Store) -> dict[str, Any]:
    """What is known about a folder of unfinished work; whatever cannot be read is left out.

    ``name`` is what the artifact will be called, if anything.  Training runs have ``step``, the last one that was logged;
    ``steps``, None if their length is given in epochs; ``config``, without settings that do not affect the result; and the
    digests of their ``inputs``, by role.  Of other work ``parts`` says how many are done.
    """
    about = {"kind": folder.parent.name, "id": folder.name, "bytes": folder_size(folder), "path": os.fspath(folder)}
    about |= {"name": store.unfinished_name(folder), "step": None, "steps": None, "parts": None}
    try:
        run = json.loads((folder / RUN_FILE).read_bytes())
        config, inputs = dict(run["config"]), dict(run["inputs"])
    except UNREADABLE:
        parts = sum(path.name[:1].isdigit() for path in folder.rglob("*.partial"))
        return about | {"parts": parts, "config": {}, "inputs": {}}
    steps = config.get("steps") if config.get("epochs") is None else None
    return about | {"step": _last_step(folder), "steps": steps, "config": config, "inputs": inputs}


def state_of(work: Mapping[str, Any]) -> str:
    """``unfinished, step 40 of 1,000``, ``unfinished, 3 parts done``, or no more than that."""
    if work["step"] is not None:
        return f"unfinished, step {work['step']:,}" + (f" of {work['steps']:,}" if work["steps"] else "")
    return "unfinished" + (f", {counted(work['parts'], 'part')} done" if work["parts"] else "")


def _last_step(folder: Path) -> int:
    """The step of the last complete line in the log of a run; 0 before the first step."""
    try:
        with open(folder / METRICS_LOG, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            whole = file.read().rpartition(b"\n")[0]
        return int(json.loads(whole.rpartition(b"\n")[2])["step"])
    except UNREADABLE:
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
