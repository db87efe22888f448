"""What all probes share: the stage around a measurement, and what it writes.

A probe is one file of `pipelines.stages` with its settings, ``measure``, which says what it has found, and the table that people
see.  Its mathematics is in `guidance.probes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine import stage
from pipelines.engine.declaration import Command, Opening, Stage, Table, Take
from pipelines.engine.stage import C, Device, Run, knob
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns


class SequencesConfig(stage.Config):
    """Which sequences are read."""

    split: Literal["train", "valid", "test"] = Field(
        "valid", description="Split of the sequences; a text file is read as a whole."
    )
    limit: int = Field(1000, ge=0, description="Maximum number of sequences; 0 for all.")
    masks: str = knob(
        "", "Artifact that `guide build-masks` made of the sequences, for patterns that read words, idf or trees."
    )
    scores: str = knob(
        "", "JSON, CSV or Parquet file with columns layer, head and score, for plans that choose heads by score."
    )
    parser: str = knob("", "For a dataset or a text: the parser, for plans that read syntax.")
    sequence_length: int = knob(
        0, "For a dataset or a text: longest sequence, in tokens; by default as in training, or 128.", ge=0
    )
    batch_size: int = knob(8, "Sequences per batch.", ge=1)
    device: Device = "auto"


def random_weights() -> Any:
    """The setting of probes that can also read a model of the same shape with random weights, to compare with."""
    return Field(
        None, ge=0, description="Seed of random weights, which are probed instead of the model's weights and plan."
    )


class ReadingConfig(stage.Config):
    """How a probe reads texts."""

    max_length: int = Field(128, ge=8, description="Tokens of a text; what comes after them is cut off.")
    words: Literal["mean", "first", "max"] = Field(
        "mean",
        description="Combination of the attention from the tokens of one word: mean, first token, or maximum.",
    )
    limit: int = Field(0, ge=0, description="Maximum number of texts; 0 for all.")
    random: int | None = random_weights()
    device: Device = "auto"


def refuse_unread(config: stage.Config, names: Sequence[str], reason: str) -> None:
    """Raises InputError if one of some settings, which are not read beside the others, is not its default; for flags that are
    called as their settings are."""
    for name in names:
        if getattr(config, name) != type(config).model_fields[name].default:
            raise InputError(f"--{name} has no effect: {reason}")


@dataclass(frozen=True)
class Findings:
    """What a probe has found, in JSON's types.

    ``probe.json`` has ``counts`` as one entry, and the entries of the others beside it.  In ``artifact.counts``, which tables are
    made of, all entries but those of ``details`` stand side by side, so that ``counts["sequences"]`` and ``counts["best"]`` are
    found there; no two may have the same name.

    Attributes:
        counts: how much was read, such as ``{"sequences": 200, "heads": 144}``.
        summary: the findings themselves, such as ``{"best": best(rows, "last")}``.
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
    writes: Mapping[str, Columns],
    help: str,
    examples: Sequence[str],
    check: Callable[[C, Mapping[str, Any]], None] = lambda config, references: None,
    prepare: Callable[[Opening[C]], None] = lambda opening: None,
) -> Stage[C]:
    """The stage of a probe.

    Args:
        name: of its command, ``guide probe NAME``; the name of its file may differ.
        version: raised whenever the same settings and inputs give another result.
        measure: writes the tables and pictures of the probe, and returns what goes into ``probe.json``.
        takes: the inputs by role, such as `pipelines.stages.reading.ON_SEQUENCES`.
        table: what people see, made of the artifact and the settings of the run: `Table`, with cells by `head_name`, `share` and
            `number` of `pipelines.probing.heads`.
        writes: see `pipelines.engine.declaration.Stage`; for ``heads.parquet`` the columns are ``head_columns(units)``.
        help: one sentence, and further paragraphs for the help page.
        examples: command lines for the help page.
        check, prepare: see `pipelines.engine.declaration.Stage`.
    """
    command = Command(f"probe {name}", help, examples, next="guide show {}", show=table, group="Understand")
    build = functools.partial(_build, name, measure)
    return Stage(
        f"probe-{name}", "probe", version, config, build, takes, check, prepare, command=command, writes=writes
    )


def _build(name: str, measure: Callable[[Run[Any]], Findings], run: Run[Any]) -> None:
    findings = measure(run)
    about = {"probe": name, **findings.about}
    whole = {"schema": 1, **about, "counts": findings.counts, **findings.summary, **findings.details}
    run.out.write_json("probe.json", whole)
    run.out.counts |= {**about, **findings.counts, **findings.summary}
