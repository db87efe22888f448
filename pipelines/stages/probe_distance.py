"""Stage ``probe-distance``: how differently do heads look, within a model or between two?

Reads one or two models and sequences for each.  Writes probe@1: ``distances.parquet`` (one row for each pair of heads),
``heads.parquet`` (one row for each head of the first model: how far it is from the others, or from its counterpart), ``probe.json``
and ``heads.png``.

Source: Clark et al. 2019, section 6; Li et al. 2022, section 5 (the distance between seeds); `guidance.probes.distance`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from guidance.errors import InputError
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, run_stage
from pipelines.probe_inputs import SequencesConfig, open_inputs
from pipelines.storage.columns import column
from pipelines.storage.store import Store

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


def run(
    model: str, other: str | None, data: str, config: Config, *, store: Store, **options: Unpack[Options]
) -> Result:
    """Probe one model, or compare two.

    Args:
        model, data: see `pipelines.probe_inputs.open_inputs`.
        other: a second model, which must read the data as the same tokens.

    Raises:
        InputError: the two models read other tokens.
    """
    check_working_folder()
    with contextlib.ExitStack() as opened:
        inputs, read = open_inputs(model, data, config, store, opened, options.get("progress"))
        if other is not None:
            theirs, _ = open_inputs(other, data, config, store, opened, options.get("progress"))
            if theirs["sequences"].content != inputs["sequences"].content:
                raise InputError(
                    f"{model} and {other} split the text into other tokens, so that their heads cannot be compared",
                    hint="models with one tokenizer",
                )
            inputs["other"] = theirs["model"]
        return run_stage(STAGE, read, inputs, store=store, **options)


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


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    import pyarrow as pa

    from guidance.probes.distance import head_distances
    from pipelines.probing.heads import heads_picture, write_heads
    from pipelines.probing.sequences import WatchedSequences

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    other = WatchedSequences({**run.inputs, "model": run.inputs["other"]}, config) if "other" in run.inputs else None
    total: Any = 0.0
    sites: list[Site] = []
    other_sites: list[Site] = []
    with run.progress.task("probe", total=watched.number, unit="sequences") as bar:
        for batch in watched.batches(1):  # the maps of one sequence fit into memory, those of a batch may not
            sites, maps = _maps(watched, batch)
            other_sites, others = (sites, maps) if other is None else _maps(other, batch)
            total = total + head_distances(maps, others).cpu()
            bar.advance(1)
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
    counts = {"sequences": watched.number, "heads": len(names)}
    summary = {"mean": float(distances.mean()), "shown": shown}
    run.out.write_json("probe.json", {"schema": 1, "probe": "distance", "counts": counts, **summary})
    what = "the nearest other head" if shown == "nearest" else "the same head of the other model"
    title = f"Distance from {what} (nats x 100)\n{watched.number:,} sequences"
    run.out.write("heads.png", heads_picture(table, shown, title=title, label="Jensen-Shannon divergence"))
    run.out.counts |= {"probe": "distance", **counts, **summary}


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


STAGE = Stage("probe-distance", "probe", 1, Config, build)
