"""Check this machine: versions, extras, language models, devices, the store, and packages that shadow ours."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from guidance.errors import GuideError
from pipelines import ROOT
from pipelines.engine.stage import version_of
from pipelines.storage.store import Store

FLOORS = {"torch": "2.10", "transformers": "5.17", "pyarrow": "14.0.1", "safetensors": "0.8"}
"""Older versions have known security holes in reading files, or lack features that guide needs."""

CEILINGS = {"transformers": "6"}
OTHERS = ("attention-guide", "tokenizers", "accelerate", "numpy", "spacy", "stanza", "pydantic", "typer", "rich")
EXTRAS = {"dask": ("dask", "distributed"), "ui": ("starlette", "uvicorn")}
OURS = ("guidance", "pipelines", "cli")

State = Literal["ok", "absent", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``bad`` means that guide will not work properly."""

    topic: str
    name: str
    state: State
    detail: str


def examine(store: Store) -> list[Finding]:
    """All findings, in reading order."""
    python = [Finding("python", platform.python_implementation(), "ok", platform.python_version())]
    return [*python, *packages(), *extras(), *language_models(), *devices(), *storage(store), *shadows()]


def packages() -> Iterator[Finding]:
    """The installed versions of packages, compared with `FLOORS` and `CEILINGS`."""
    for name in (*FLOORS, *OTHERS):
        version = version_of(name)
        state: State = "ok"
        detail = version or "not installed"
        if version is None:
            state = "bad" if name in FLOORS else "absent"
        elif name in FLOORS and version_key(version) < version_key(FLOORS[name]):
            state, detail = "bad", f"{version}; guide needs {FLOORS[name]} or newer"
        elif name in CEILINGS and version_key(version) >= version_key(CEILINGS[name]):
            state, detail = "bad", f"{version}; guide needs a version below {CEILINGS[name]}"
        yield Finding("package", name, state, detail)


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers, for comparison: ``2.13.0+cpu`` is (2, 13), and 2.10 equals 2.10.0."""
    release = re.match(r"\d+(\.\d+(?!\w))*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def extras() -> Iterator[Finding]:
    """Whether the packages of each extra are installed."""
    for extra, names in EXTRAS.items():
        if any(importlib.util.find_spec(name) is None for name in names):
            yield Finding("extra", extra, "absent", f"pip install 'attention-guide[{extra}]'")
        else:
            yield Finding("extra", extra, "ok", ", ".join(f"{name} {version_of(name) or ''}".strip() for name in names))


def language_models() -> Iterator[Finding]:
    """The installed spaCy models, found without importing spaCy."""
    models = {
        entry.dist.name: entry.dist.version for entry in metadata.entry_points(group="spacy_models") if entry.dist
    }
    for name, version in sorted(models.items()):
        yield Finding("language model", name, "ok", version)
    if not models:
        how = "none; install one with `python -m spacy download en_core_web_sm`"
        yield Finding("language model", "spacy", "absent", how)


def devices() -> list[Finding]:
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        return [Finding("device", "torch", "bad", f"cannot be imported: {error}")]
    findings = [Finding("device", "cpu", "ok", f"{torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        return [*findings, Finding("device", "cuda", "absent", "not available")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
        detail = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {bf16}"
        findings.append(Finding("device", f"cuda:{index}", "ok", detail))
    return findings


def storage(store: Store) -> list[Finding]:
    try:
        store.check_writable()
        lock = store.lock("doctor", "0" * 16)
        try:
            lock.acquire(wait=False)
        finally:
            lock.release()
    except GuideError as error:
        return [Finding("store", str(store.root), "bad", error.message)]
    free = shutil.disk_usage(store.root).free
    return [Finding("store", str(store.root), "ok", f"writable, locks work, {free / 1e9:.1f} GB free")]


def shadows() -> Iterator[Finding]:
    """Whether our package names import our packages, from the folder that this module is in."""
    for name in OURS:
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        others = [each for each in metadata.packages_distributions().get(name, []) if each != "attention-guide"]
        if folder != ROOT / name:
            detail = f"{folder} shadows {ROOT / name}; install guide in its own environment"
            yield Finding("import", name, "bad", detail)
        elif others:
            yield Finding("import", name, "bad", f"also installed by {', '.join(others)}")
        else:
            yield Finding("import", name, "ok", str(folder))
