"""Check this machine: versions, extras, language models, devices, the store, and packages that shadow ours."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from guidance.errors import GuideError
from pipelines import ROOT
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
    return [
        Finding("python", platform.python_implementation(), "ok", platform.python_version()),
        *packages(),
        *extras(),
        *language_models(),
        *devices(),
        *storage(store),
        *shadows(),
    ]


def packages() -> list[Finding]:
    """The installed versions of packages, compared with `FLOORS` and `CEILINGS`."""
    findings = []
    for name in (*FLOORS, *OTHERS):
        version = _installed(name)
        if version is None:
            findings.append(Finding("package", name, "bad" if name in FLOORS else "absent", "not installed"))
        elif name in FLOORS and version_key(version) < version_key(FLOORS[name]):
            findings.append(Finding("package", name, "bad", f"{version}; guide needs {FLOORS[name]} or newer"))
        elif name in CEILINGS and version_key(version) >= version_key(CEILINGS[name]):
            findings.append(Finding("package", name, "bad", f"{version}; guide needs a version below {CEILINGS[name]}"))
        else:
            findings.append(Finding("package", name, "ok", version))
    return findings


def version_key(version: str) -> tuple[int, ...]:
    """A version as numbers, for comparison: ``2.13.0+cpu`` is (2, 13), and 2.10 equals 2.10.0."""
    release = re.match(r"\d+(\.\d+(?!\w))*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def extras() -> list[Finding]:
    findings = []
    for extra, names in EXTRAS.items():
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        detail = (
            f"pip install 'attention-guide[{extra}]'"
            if missing
            else ", ".join(f"{n} {_installed(n) or ''}".strip() for n in names)
        )
        findings.append(Finding("extra", extra, "absent" if missing else "ok", detail))
    return findings


def language_models() -> list[Finding]:
    """The installed spaCy models, found without importing spaCy."""
    models = {
        entry.dist.name: entry.dist.version for entry in metadata.entry_points(group="spacy_models") if entry.dist
    }
    if not models:
        return [
            Finding(
                "language model", "spacy", "absent", "none; install one with `python -m spacy download en_core_web_sm`"
            )
        ]
    return [Finding("language model", name, "ok", version) for name, version in sorted(models.items())]


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


def shadows() -> list[Finding]:
    """Whether our package names import our packages, from the folder that this module is in."""
    findings = []
    for name in OURS:
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder == ROOT / name:
            others = [d for d in metadata.packages_distributions().get(name, []) if d != "attention-guide"]
            state: State = "bad" if others else "ok"
            detail = f"also installed by {', '.join(others)}" if others else str(folder)
            findings.append(Finding("import", name, state, detail))
        else:
            findings.append(
                Finding("import", name, "bad", f"{folder} shadows {ROOT / name}; install guide in its own environment")
            )
    return findings


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
