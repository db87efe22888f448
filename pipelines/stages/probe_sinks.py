"""Stage ``probe-sinks``: how much of its attention does each head leave on tokens that say nothing?

Reads a model and sequences.  Writes probe@1: ``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.

Source: Clark et al. 2019, section 3.2 (separators and first tokens as a place to rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.engine.command import Table
from pipelines.engine.stage import Run
from pipelines.probing.probe import Findings, batches_of, probe
from pipelines.probing.sequences import SequencesConfig
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact

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


def measure(run: Run[Config]) -> Findings:
    """What every head does."""
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
    for batch in batches_of(run, watched, config.batch_size):
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
    title = f"Attention on special tokens\n{watched.number:,} sequences"
    run.out.write("heads.png", heads_picture(run, table, "special", title=title, label="% of attention"))
    return Findings({"sequences": watched.number, "heads": len(table)}, summary)


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def _table(artifact: Artifact, config: Config) -> Table:
    from pipelines.probing.tables import head_name, share, shares

    counts = artifact.counts
    names = ("special", "first", "itself", "ordinary", "entropy")
    rows = [(f"layer {row['layer']}", *shares(row, names)) for row in counts["by_layer"]]
    rows.append(("by chance", *(share(counts["by_chance"].get(name)) for name in names)))
    note = f"most on special tokens: head {head_name(counts['best'])}, {share(counts['best']['special'])}"
    return Table(("", *names), rows, [note])


STAGE = probe(
    "sinks",
    1,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=_table,
    help="""Measure how much attention each head leaves on special tokens, on the first token and on itself.

    `guide probe relevance --no-special` measures patterns on what is left.
    """,
    examples=("guide probe sinks guided wiki-128", "guide probe sinks ./bert-base text.txt --limit 200"),
)

run = STAGE.run
