"""Stage ``probe-sinks``: how much of its attention does each head leave on tokens that say nothing?

Reads a model and sequences.  Writes probe@1: ``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.

Source: Clark et al. 2019, section 3.2 (separators and first tokens as a place to rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from pipelines.engine.stage import Options, Result, Run, Stage
from pipelines.probe_inputs import SequencesConfig, run_on
from pipelines.storage.store import Store

if TYPE_CHECKING:
    import torch

    from guidance.probes.summary import Summary
    from guidance.sites import Site

UNITS: Mapping[str, str] = {
    "special": "mean attention of a token on special tokens",
    "first": "mean attention of a token on the first token",
    "itself": "mean attention of a token on itself",
    "ordinary": "mean attention of a token on other tokens of the text",
    "entropy": "mean entropy of rows, from 0, one key, to 1, all keys alike",
    "highest": "mean of the highest attention of each row",
}


class Config(SequencesConfig):
    """Which sequences are read."""


def run(model: str, data: str, config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Probe a model.

    Args:
        model, data: see `pipelines.probe_inputs.open_inputs`.
    """
    return run_on(STAGE, model, data, config, store, options)


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    import math

    import torch

    from guidance.patterns.combinations import read_pattern
    from guidance.probes.summary import watch_summaries
    from pipelines.probing.heads import best, heads_picture, write_heads
    from pipelines.probing.sequences import WatchedSequences

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    special = torch.tensor(watched.tokenizer.all_special_ids, device=watched.device)
    totals: dict[Site, torch.Tensor] = {}
    even = torch.zeros(2, dtype=torch.float64)
    with run.progress.task("probe", total=watched.number, unit="sequences") as bar:
        for batch in watched.batches(config.batch_size):
            tokens, valid_BT = watched.tokens(batch), batch.valid_BT
            is_special_BT = torch.isin(tokens.ids_BT, special) & valid_BT
            first_BTT = read_pattern("first").on(tokens).dense()
            itself_BTT = read_pattern("self").on(tokens).dense() & ~is_special_BT[:, None]
            on_special_BTT = is_special_BT[:, None] & valid_BT[:, :, None]
            ordinary_BTT = ~(is_special_BT[:, None] | itself_BTT) & valid_BT[:, None] & valid_BT[:, :, None]
            wanted = torch.stack([on_special_BTT, first_BTT, itself_BTT, ordinary_BTT], dim=1).float()
            lengths_B = valid_BT.sum(-1).float()
            most_B = torch.tensor([math.log(max(2, n)) for n in lengths_B.tolist()], device=watched.device)
            even += torch.stack([is_special_BT.sum(-1) / lengths_B, 1 / lengths_B]).double().sum(-1).cpu()

            def receive(
                site: Site,
                summary: Summary,
                lengths_B: torch.Tensor = lengths_B,
                most_B: torch.Tensor = most_B,
            ) -> None:
                spread_BH = summary.entropy_BHQ.sum(-1) / (lengths_B * most_B)[:, None]
                peaks_BH = summary.highest_BHQ.sum(-1) / lengths_B[:, None]
                found = torch.cat([summary.masses_BHP, spread_BH[..., None], peaks_BH[..., None]], dim=-1)
                totals[site] = totals.get(site, 0) + found.double().sum(0).cpu()

            watch_summaries(watched.handle, receive, wanted, watched.guide_inputs(batch))
            bar.advance(len(batch.numbers))
    means = {site: total / watched.number for site, total in totals.items()}
    figures = {name: {site: mean[:, place] for site, mean in means.items()} for place, name in enumerate(UNITS)}
    table = write_heads(run, figures, UNITS)
    by_chance = dict(zip(("special", "first"), (even / watched.number).tolist(), strict=True))
    layers = sorted({row["layer"] for row in table})
    by_layer = [
        {name: _mean([row[name] for row in table if row["layer"] == layer]) for name in UNITS} | {"layer": layer}
        for layer in layers
    ]
    summary = {"best": best(table, "special"), "by_layer": by_layer, "by_chance": by_chance}
    counts = {"sequences": watched.number, "heads": len(table)}
    run.out.write_json("probe.json", {"schema": 1, "probe": "sinks", "counts": counts, **summary})
    title = f"Attention on special tokens (%)\n{watched.number:,} sequences"
    run.out.write("heads.png", heads_picture(table, "special", title=title, label="share of attention"))
    run.out.counts |= {"probe": "sinks", **counts, **summary}


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


STAGE = Stage("probe-sinks", "probe", 1, Config, build)
