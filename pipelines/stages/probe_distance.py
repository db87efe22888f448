"""Stage ``probe-distance``: how differently do heads look, within a model or between two?

Reads one or two models and sequences for each.  Writes probe@1: ``distances.parquet`` (one row for each pair of heads),
``heads.parquet`` (one row for each head of the first model: how far it is from the others, or from its counterpart), ``probe.json``
and ``heads.png``.

Source: Clark et al. 2019, section 6; Li et al. 2022, section 5 (the distance between seeds); `guidance.probes.distance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from guidance.errors import InputError
from pipelines.engine.command import Table
from pipelines.engine.declaration import Opening
from pipelines.engine.stage import Run
from pipelines.inputs import Model
from pipelines.probing.probe import Findings, batches_of, probe
from pipelines.probing.sequences import SequencesConfig
from pipelines.stages.reading import ON_SEQUENCES, read_data
from pipelines.storage.artifacts import Artifact
from pipelines.storage.columns import column

if TYPE_CHECKING:
    import torch

    from guidance.sites import Site

TABLE = "distances.parquet"

UNITS: Mapping[str, str] = {
    "nearest": "Jensen-Shannon divergence from the nearest other head, in nats",
    "mean": "mean divergence from all other heads, in nats",
    "counterpart": "divergence from the same head of the other model, in nats; null without one",
}


class Config(SequencesConfig):
    """Which sequences are read."""


def distance_schema() -> Any:
    """Columns of ``distances.parquet``."""
    import pyarrow as pa

    return pa.schema(
        [
            column("layer", pa.int32(), "of a head of the model"),
            column("head", pa.int32(), "of a head of the model"),
            column("other_layer", pa.int32(), "of a head of the other model, or of the same"),
            column("other_head", pa.int32(), "of a head of the other model, or of the same"),
            column("distance", pa.float64(), "Jensen-Shannon divergence of rows, in nats, their mean"),
        ]
    )


def prepare(opening: Opening[Config]) -> None:
    """Check that two models read the data as the same tokens.

    Raises:
        InputError: they do not.
    """
    if "other" not in opening.inputs:
        return
    theirs, _ = read_data(opening.references["data"], "other", opening)
    if theirs.content != opening.inputs["sequences"].content:
        model, other = opening.references["model"], opening.references["other"]
        raise InputError(
            f"{model} and {other} split the text into other tokens, so that their heads cannot be compared",
            hint="models with one tokenizer",
        )


def measure(run: Run[Config]) -> Findings:
    """How far every head is from the others, or from its counterpart."""
    import pyarrow as pa

    from guidance.probes.distance import head_distances
    from pipelines.probing.heads import heads_picture, write_heads
    from pipelines.probing.sequences import WatchedSequences
    from pipelines.training.learner import name_of_model

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    other = WatchedSequences({**run.inputs, "model": run.inputs["other"]}, config) if "other" in run.inputs else None
    total: Any = 0.0
    sites: list[Site] = []
    other_sites: list[Site] = []
    for batch in batches_of(run, watched, 1):  # the maps of one sequence fit into memory, those of a batch may not
        sites, maps = _maps(watched, batch)
        other_sites, others = (sites, maps) if other is None else _maps(other, batch)
        total = total + head_distances(maps, others).cpu()
    distances: torch.Tensor = total / watched.number
    names, theirs = ([(s.layer, h) for s in each for h in range(s.num_heads)] for each in (sites, other_sites))
    rows = [
        {"layer": a[0], "head": a[1], "other_layer": b[0], "other_head": b[1], "distance": float(distances[i, j])}
        for i, a in enumerate(names)
        for j, b in enumerate(theirs)
    ]
    with run.out.parquet(TABLE, distance_schema()) as writer:
        writer.write_table(pa.Table.from_pylist(rows, distance_schema()))
    figures = _figures(distances, sites, names, theirs, is_one=other is None)
    table = write_heads(run, figures, UNITS)
    shown = "nearest" if other is None or table[0]["counterpart"] is None else "counterpart"
    what = "the nearest other head" if shown == "nearest" else f"the same head of {name_of_model(run.inputs['other'])}"
    title = f"Distance from {what}\n{watched.number:,} sequences"
    run.out.write(
        "heads.png",
        heads_picture(run, table, shown, title=title, label="Jensen-Shannon divergence, hundredths of a nat"),
    )
    counts = {"sequences": watched.number, "heads": len(names)}
    return Findings(counts, {"mean": float(distances.mean()), "shown": shown})


def _maps(watched: Any, batch: Any) -> tuple[list[Site], torch.Tensor]:
    """The maps of one sequence, of all heads of a model, (heads, T, T)."""
    import torch

    found: dict[Site, torch.Tensor] = {}

    def watch(site: Site, attention: torch.Tensor) -> None:
        found[site] = attention[0].float()

    watched.watch(batch, watch)
    own = sorted((site for site in found if site.attention == "self"), key=lambda site: site.layer)
    return own, torch.cat([found[site] for site in own])


def _figures(
    distances: torch.Tensor,
    sites: list[Site],
    names: list[tuple[int, int]],
    theirs: list[tuple[int, int]],
    *,
    is_one: bool,
) -> dict[str, dict[Site, torch.Tensor]]:
    import torch

    others = distances.clone()
    if is_one:
        others.fill_diagonal_(torch.nan)
    far = torch.where(others.isnan(), torch.inf, others)
    places = {name: place for place, name in enumerate(theirs)}
    same = [
        float(distances[n, places[name]]) if not is_one and name in places else torch.nan
        for n, name in enumerate(names)
    ]
    nearest = far.amin(-1)
    values = {
        "nearest": nearest.masked_fill(nearest.isinf(), torch.nan),
        "mean": others.nanmean(-1),
        "counterpart": torch.tensor(same),
    }
    found: dict[str, dict[Site, torch.Tensor]] = {}
    for name, each in values.items():
        parts = each.split([site.num_heads for site in sites])
        found[name] = dict(zip(sites, parts, strict=True))
    return found


def _table(artifact: Artifact, config: Config) -> Table:
    from pipelines.probing.tables import SHOWN_HEADS, head_name, heads_of, number

    ranked = sorted(heads_of(artifact), key=lambda row: row[artifact.counts["shown"]])
    chosen = ranked if len(ranked) <= 2 * SHOWN_HEADS else [*ranked[:SHOWN_HEADS], *ranked[-SHOWN_HEADS:]]
    rows = [(head_name(row), *(number(row[name]) for name in UNITS)) for row in chosen]
    return Table(("head", "nearest", "mean", "counterpart"), rows)


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
    help="Measure how differently heads look (Jensen-Shannon divergence of their rows): within a model, or between two.",
    examples=(
        "guide probe distance guided wiki-128 --limit 100",
        "guide probe distance guided wiki-128 --from plain --limit 100",
    ),
)

run = STAGE.run
