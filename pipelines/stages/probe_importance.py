"""Stage ``probe-importance``: how much does the loss of a model depend on each head?

Reads a model of a task and a dataset or its sequences, or a masked language model and sequences.  Writes probe@1:
``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.  Plans choose heads by ``heads.parquet``
(``--scores``).

Source: Li et al. 2022, section 3.1, by the code of T3-Vis; Michel et al. 2019, section 3, for heads that are switched off;
`guidance.probes.importance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.inputs import Model
from pipelines.probing.heads import best, ends_of, head_columns, head_name, heads_of, number, write_heads
from pipelines.probing.probe import Findings, SequencesConfig, probe, refuse_unread
from pipelines.stages.reading import Reading
from pipelines.storage.artifacts import Artifact

UNITS: Mapping[str, Mapping[str, str]] = {
    "taylor": {
        "score": "importance from 0 to 1, over all heads or those of a layer",
        "importance": "sum over the weights of the head of (gradient times weight) squared",
    },
    "off": {
        "score": "importance from 0 to 1, over all heads or those of a layer",
        "importance": "mean loss without the head minus that of the whole model",
    },
}


class Config(SequencesConfig):
    """Whose loss counts, and how importance is measured."""

    limit: int = Field(0, ge=0, description="Maximum number of examples or sequences; 0 for all.")
    by: Literal["taylor", "off"] = Field(
        "taylor",
        description="Importance: taylor, squares of gradient times weight; off, how much the loss rises when the head is switched off, "
        "which reads the data once for each head.",
    )
    form: Literal["elementwise", "joint"] = Field(
        "elementwise", description="Squares of gradient times weight, or the square of their sum over a head."
    )
    accumulate: Literal["gradients", "scores"] = Field(
        "gradients",
        description="Sum over all batches: of gradients before squaring, or of the importance of each batch.",
    )
    by_layer: bool = Field(False, description="Scale scores from 0 to 1 within each layer, not over all heads.")
    batch_size: int = Field(8, ge=1, description="Examples per batch, whose mean loss gives the gradient.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the masked words, for masked language models.")


def _check_settings(config: Config, references: Mapping[str, Any]) -> None:
    """Raises InputError for settings of gradients beside heads that are switched off."""
    if config.by == "off":
        refuse_unread(config, ("form", "accumulate"), "it is for --by taylor")


def measure(run: Run[Config]) -> Findings:
    """The importance of every head.

    Raises:
        InputError: the model has no head for a task and predicts no words; or the data are of another task, or have no
            labels.
    """
    from guidance.probes.importance import normalised
    from pipelines.probing.losses import HeldOut, importance_of, rises_of

    config = run.config
    held_out = HeldOut(run.inputs, config, config.seed)
    whole: dict[str, Any] = {}
    if config.by == "taylor":
        importance = importance_of(held_out, run.progress, config.form, config.accumulate)
    else:
        importance, whole["loss"] = rises_of(held_out, run.progress)
    table = write_heads(
        run,
        {"score": normalised(importance, by_layer=config.by_layer), "importance": importance},
        UNITS[config.by],
        "score",
        title=f"Importance of heads\n{held_out.task}, {held_out.number:,} examples",
        label="importance, %",
    )
    ranked = sorted(table, key=lambda row: -float(row["importance"]))
    return Findings(
        {"examples": held_out.number, "heads": len(table)},
        {"best": best(table, "importance"), **whole},
        about={"task": held_out.task},
        details={"by": config.by, "ranking": [[row["layer"], row["head"]] for row in ranked]},
    )


def _table(artifact: Artifact, config: Config) -> Table:
    ranked = sorted(heads_of(artifact), key=lambda row: -row["importance"])
    chosen, notes = ends_of(ranked, 3)
    rows = [(head_name(row), number(row["score"]), f"{row['importance']:.3g}") for row in chosen]
    return Table(("head", "score", "importance"), rows, notes)


STAGE = probe(
    "importance",
    2,
    Config,
    measure,
    takes={
        "model": Model(),
        "data": Reading("A dataset of its task, or its sequences; for a language model also any text file."),
    },
    table=_table,
    check=_check_settings,
    writes={
        "heads.parquet of importance": head_columns(UNITS["taylor"]),
        "heads.parquet of importance by switching off": head_columns(UNITS["off"]),
    },
    help="""Measure how much the loss of a model depends on each head (first-order Taylor importance).

    The loss is that of its task, of masked words, or in a causal model of next words.  Gradients of the mean loss are added up over the batches of a split.  The
    importance of a head is the sum of the squares of gradient times weight, over its rows of the query, key and value matrices and
    its columns of the output matrix.  With --by off it is how much the mean loss rises when the head is switched off.
    """,
    examples=(
        "guide probe importance reviews-model reviews",
        "guide probe importance summariser papers --split test --by-layer",
        "guide probe importance guided wiki-128 --by off --limit 200   # the loss without each head",
        "guide finetune reviews --init my-model --plan my-plan.toml --scores $(guide show probe/58a1 --json | jq -r .path)/heads.parquet",
    ),
)

run = STAGE.run
