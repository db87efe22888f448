"""Stage ``probe-distance``: how differently do heads look, within a model or between two?

Reads one or two models and sequences for each.  Writes probe@1: ``distances.parquet`` (one row for each pair of heads),
``heads.parquet`` (one row for each head of the first model: how far it is from the others, or from its counterpart), ``probe.json``
and ``heads.png``.

Source: Clark et al. 2019, section 6; Li et al. 2022, section 5 (the distance between seeds); `guidance.probes.distance`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.engine.declaration import Opening, Table
from pipelines.engine.stage import Run
from pipelines.inputs import Model
from pipelines.probing.heads import SHOWN_HEADS, ends_of, head_columns, head_name, heads_of, number, write_heads
from pipelines.probing.probe import Findings, SequencesConfig, probe, random_weights
from pipelines.stages.reading import ON_SEQUENCES, read_data
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns
from pipelines.training.learner import name_of_model
from pipelines.training.plan_inputs import load_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from guidance.sites import Site
    from pipelines.probing.sequences import SequenceBatch, WatchedSequences

TABLE = "distances.parquet"

UNITS: Mapping[str, str] = {
    "nearest": "Jensen-Shannon divergence from the nearest other head, in nats",
    "mean": "mean divergence from all other heads, in nats",
    "counterpart": "divergence from the same head of the other model, in nats; null without one",
}


class Config(SequencesConfig):
    """Which sequences are read, and with which weights."""

    random: int | None = random_weights()


DISTANCES: Columns = {
    "layer": ("int32", "of a head of the model"),
    "head": ("int32", "of a head of the model"),
    "other_layer": ("int32", "of a head of the other model, or of the same"),
    "other_head": ("int32", "of a head of the other model, or of the same"),
    "distance": ("float64", "Jensen-Shannon divergence of rows, in nats, their mean"),
}
"""Columns of ``distances.parquet``."""


def prepare(opening: Opening[Config]) -> None:
    """Adds the masks that the plan of the other model needs, if they are others.  Raises InputError unless both models, with the
    weights that they have, read the data as the same tokens."""
    if "other" not in opening.inputs:
        return
    if opening.config.random is not None:
        raise InputError("--random is for the heads of one model", hint="leave out --from, or --random")
    theirs, config = read_data(opening.references["data"], "other", opening, opening.given)
    if theirs.content != opening.inputs["sequences"].content:
        model, other = opening.references["model"], opening.references["other"]
        raise InputError(
            f"{model} and {other} split the text into other tokens, or other lengths, so that their heads cannot be compared",
            hint="models with one tokenizer; if they were trained on other lengths, give --sequence-length",
        )
    if config.masks and config.masks != opening.config.masks:
        opening.inputs["other_masks"] = load_inputs(config, [theirs], opening.store)["masks"]


def measure(run: Run[Config]) -> Findings:
    """How far every head is from the others, or from its counterpart."""
    import torch

    from guidance.probes.distance import head_distances
    from pipelines.probing.sequences import WatchedSequences, batches_of

    watched = WatchedSequences(run.inputs, run.config, run.config.random)
    is_one = "other" not in run.inputs
    own = {"other": "model", "other_masks": "masks", "other_cooccur": "cooccur"}
    theirs = {**run.inputs, **{own[role]: given for role, given in run.inputs.items() if role in own}}
    other = watched if is_one else WatchedSequences(theirs, run.config)
    total: Any = 0.0
    batches_of_other = itertools.repeat(None) if is_one else other.batches(1)
    # the maps of one sequence fit into memory, those of a batch may not
    for batch, batch_of_other in zip(batches_of(run, watched, 1), batches_of_other, strict=False):
        maps = _maps(watched, batch)
        others = maps if batch_of_other is None else _maps(other, batch_of_other)
        total = total + head_distances(torch.cat(list(maps.values())), torch.cat(list(others.values()))).cpu()
    distances: Tensor = total / watched.number
    heads, other_heads = (
        [(site.layer, head) for site in each for head in range(site.num_heads)] for each in (maps, others)
    )
    rows = [
        {"layer": a[0], "head": a[1], "other_layer": b[0], "other_head": b[1], "distance": float(distances[i, j])}
        for i, a in enumerate(heads)
        for j, b in enumerate(other_heads)
    ]
    run.out.write_rows(TABLE, DISTANCES, rows)
    far = distances.clone()
    if is_one:
        far.fill_diagonal_(torch.nan)
    nearest = torch.where(far.isnan(), torch.inf, far).amin(-1)
    numbers = {} if is_one else {head: n for n, head in enumerate(other_heads)}
    same = [float(distances[n, numbers[head]]) if head in numbers else torch.nan for n, head in enumerate(heads)]
    values = {
        "nearest": nearest.masked_fill(nearest.isinf(), torch.nan),
        "mean": far.nanmean(-1),
        "counterpart": torch.tensor(same),
    }
    sizes = [site.num_heads for site in maps]
    shown = "nearest" if is_one or all(map(math.isnan, same)) else "counterpart"
    what = "the nearest other head" if shown == "nearest" else f"the same head of {name_of_model(run.inputs['other'])}"
    write_heads(
        run,
        {name: dict(zip(maps, each.split(sizes), strict=True)) for name, each in values.items()},
        UNITS,
        shown,
        title=f"Distance from {what}\n{watched.number:,} sequences",
        label="Jensen-Shannon divergence, hundredths of a nat",
    )
    counts = {"sequences": watched.number, "heads": len(heads)}
    return Findings(counts, {"mean": float(distances.mean()), "shown": shown})


def _maps(watched: WatchedSequences, batch: SequenceBatch) -> dict[Site, Tensor]:
    """The maps of one sequence, of each site of the model's own (H, T, T), in the order of layers."""
    maps = watched.watch(batch, lambda attention: attention[0].float())
    own = sorted((site for site in maps if site.attention == "self"), key=lambda site: site.layer)
    return {site: maps[site] for site in own}


def _table(artifact: Artifact, config: Config) -> Table:
    shown = artifact.counts["shown"]
    ranked = sorted((row for row in heads_of(artifact) if row[shown] is not None), key=lambda row: row[shown])
    chosen, notes = ends_of(ranked, SHOWN_HEADS)
    known = [name for name in UNITS if any(row[name] is not None for row in ranked)]
    rows = [(head_name(row), *(number(row[name]) for name in known)) for row in chosen]
    return Table(("head", *known), rows, notes)


STAGE = probe(
    "distance",
    1,
    Config,
    measure,
    takes={
        **ON_SEQUENCES,
        "other": Model(
            "A second model: how far is each head from the same head there?", optional=True, option=True, flag="from"
        ),
    },
    prepare=prepare,
    table=_table,
    writes={"heads.parquet of distance": head_columns(UNITS), TABLE: DISTANCES},
    help="Measure how differently heads look (Jensen-Shannon divergence of their rows): within a model, or between two.",
    examples=(
        "guide probe distance guided wiki-128 --limit 100",
        "guide probe distance guided wiki-128 --from plain --limit 100",
    ),
)

run = STAGE.run
