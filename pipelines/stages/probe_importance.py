"""Stage ``probe-importance``: how much does the loss of a model depend on each head?

Reads a model of a task and a dataset or its sequences, or a masked language model and sequences.  Writes probe@1:
``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.  Plans choose heads by ``heads.parquet``
(``--scores``).

Source: Li et al. 2022, section 3.1, by the code of T3-Vis; Michel et al. 2019, section 3, for heads that are switched off;
`guidance.probes.importance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from pydantic import Field

from pipelines.engine.stage import Options, Result, Run, Stage
from pipelines.probe_inputs import SequencesConfig, run_on
from pipelines.storage.store import Store

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

    limit: int = Field(0, ge=0, description="maximum number of examples or sequences; 0 for all")
    by: Literal["taylor", "off"] = Field(
        "taylor",
        description="taylor: squares of gradient times weight; off: how much the loss rises when the head is switched off, "
        "which reads the data once for each head",
    )
    form: Literal["elementwise", "joint"] = Field(
        "elementwise", description="squares of gradient times weight, or the square of their sum over a head"
    )
    accumulate: Literal["gradients", "scores"] = Field(
        "gradients", description="add up gradients over all batches before squaring, or the importance of each batch"
    )
    by_layer: bool = Field(False, description="scores from 0 to 1 within each layer, not over all heads")
    batch_size: int = Field(8, ge=1, description="examples per batch, whose mean loss gives the gradient")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the masked words, for masked language models")


def run(model: str, data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Probe a model.

    Args:
        model, data: see `pipelines.probe_inputs.open_inputs`.

    Raises:
        InputError: the model has no head for a task and predicts no masked words; or the data are of another task, or have no
            labels.
    """
    return run_on(STAGE, model, data, config, store, options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    from guidance.probes.importance import normalised
    from pipelines.probing.heads import best, heads_picture, write_heads
    from pipelines.probing.importance import importance_of, rises_of
    from pipelines.probing.losses import HeldOut

    config = run.config
    held_out = HeldOut(run.inputs, config)
    about: dict[str, Any] = {}
    if config.by == "taylor":
        found = importance_of(held_out, config, run.progress)
    else:
        found, about = rises_of(held_out, run.progress)
    figures = {"score": normalised(found, by_layer=config.by_layer), "importance": found}
    table = write_heads(run, figures, UNITS[config.by])
    ranked = sorted(table, key=lambda row: -float(row["importance"]))
    counts = {"examples": held_out.number, "heads": len(table)}
    summary = {"best": best(table, "importance"), "ranking": [[row["layer"], row["head"]] for row in ranked], **about}
    described = {"schema": 1, "probe": "importance", "task": held_out.task, "by": config.by, "counts": counts}
    run.out.write_json("probe.json", {**described, **summary})
    title = f"Importance of heads (%)\n{held_out.task}, {held_out.number:,} examples"
    run.out.write("heads.png", heads_picture(table, "score", title=title, label="importance"))
    run.out.counts |= {"probe": "importance", "task": held_out.task, **counts, "best": summary["best"], **about}


STAGE = Stage("probe-importance", "probe", 2, Config, build)
