"""What all probes share: the stage around a measurement, and what it writes.

A probe is one file of `pipelines.stages` with its settings, ``measure``, which says what it has found, and the table that people
see.  Its mathematics is in `guidance.probes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.engine.command import Command, Table
from pipelines.engine.declaration import Opening, Stage, Take
from pipelines.engine.stage import C, Run
from pipelines.storage.artifacts import Artifact


@dataclass(frozen=True)
class Findings:
    """What a probe has found, in JSON's types.

    Attributes:
        counts: how much was read.
        summary: the findings themselves.
        about: what was measured, such as the task; shown first.
        details: findings for ``probe.json`` alone.
    """

    counts: Mapping[str, Any]
    summary: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def probe(
    name: str,
    version: int,
    config: type[C],
    measure: Callable[[Run[C]], Findings],
    *,
    takes: Mapping[str, Take],
    table: Callable[[Artifact, C], Table],
    help: str,
    examples: Sequence[str],
    check: Callable[[C, Mapping[str, Any]], None] = lambda config, references: None,
    prepare: Callable[[Opening[C]], None] = lambda opening: None,
) -> Stage[C]:
    """The stage of a probe.

    Args:
        measure: writes the tables and pictures of the probe, and returns what goes into ``probe.json``.
        table: what people see.
        check, prepare: see `pipelines.engine.stage.Stage`.
    """
    command = Command(f"probe {name}", help, examples, next="guide show {}", show=table, group="Understand")
    build = functools.partial(_build, name, measure)
    return Stage(f"probe-{name}", "probe", version, config, build, takes, check=check, prepare=prepare, command=command)


def _build(name: str, measure: Callable[[Run[Any]], Findings], run: Run[Any]) -> None:
    findings = measure(run)
    about = {"probe": name, **findings.about}
    whole = {"schema": 1, **about, "counts": findings.counts, **findings.summary, **findings.details}
    run.out.write_json("probe.json", whole)
    run.out.counts |= {**about, **findings.counts, **findings.summary}
