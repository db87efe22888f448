"""Stage ``probe-sinks``: how much of its attention does each head leave on tokens that say nothing?

Reads a model and sequences.  Writes probe@1: ``heads.parquet`` (one row for each head), ``probe.json`` and ``heads.png``.

Source: Clark et al. 2019, section 3.2 (separators and first tokens as a place to rest).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.probing.heads import best, head_columns, head_name, share, shares, write_heads
from pipelines.probing.probe import Findings, SequencesConfig, probe, random_weights
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact

if TYPE_CHECKING:
    from torch import Tensor

    from pipelines.probing.sequences import SequenceBatch, WatchedSequences

UNITS: Mapping[str, str] = {
    "special": "mean attention of a token on special tokens",
    "first": "mean attention of a token on the first token",
    "itself": "mean attention of a token on itself",
    "ordinary": "mean attention of a token on other tokens of the text",
    "entropy": "mean entropy of rows, from 0, one key, to 1, all keys alike",
    "highest": "mean of the highest attention of each row",
}


class Config(SequencesConfig):
    """Which sequences are read, and with which weights."""

    random: int | None = random_weights()


def measure(run: Run[Config]) -> Findings:
    """What every head does."""
    import torch

    from guidance.probes.relevance import uniform
    from pipelines.probing.sequences import Means, WatchedSequences, batches_of

    watched = WatchedSequences(run.inputs, run.config, run.config.random)
    means, by_chance = Means(), torch.zeros(2, dtype=torch.float64)
    for batch in batches_of(run, watched, run.config.batch_size):
        special_BT = watched.special_BT(batch) & batch.valid_BT
        wanted = _wanted(watched, batch, special_BT)
        by_chance += uniform(wanted[:, :2], batch.valid_BT, is_causal=watched.is_causal).double().sum(0).cpu()
        means.add(_figures(watched, batch, wanted))
    table = write_heads(
        run,
        {name: means.column(number) for number, name in enumerate(UNITS)},
        UNITS,
        "special",
        title=f"Attention on special tokens\n{watched.number:,} sequences",
        label="% of attention",
    )
    by_layer = []
    for layer in sorted({row["layer"] for row in table}):
        rows = [row for row in table if row["layer"] == layer]
        by_layer.append({name: sum(row[name] for row in rows) / len(rows) for name in UNITS} | {"layer": layer})
    chances = dict(zip(("special", "first"), (by_chance / watched.number).tolist(), strict=True))
    summary = {"best": best(table, "special"), "by_layer": by_layer, "by_chance": chances}
    return Findings({"sequences": watched.number, "heads": len(table)}, summary)


def _wanted(watched: WatchedSequences, batch: SequenceBatch, special_BT: Tensor) -> Tensor:
    """The keys that the first four of `UNITS` count, (B, 4, Q, K)."""
    import torch

    from guidance.patterns.combinations import read_pattern

    tokens, valid_BT, valid_BT1 = watched.tokens(batch), batch.valid_BT, batch.valid_BT[:, :, None]
    first_BTT = read_pattern("first").on(tokens).dense()
    itself_BTT = read_pattern("self").on(tokens).dense() & ~special_BT[:, None]
    ordinary_BTT = ~(special_BT[:, None] | itself_BTT) & valid_BT[:, None] & valid_BT1
    return torch.stack([special_BT[:, None] & valid_BT1, first_BTT, itself_BTT, ordinary_BTT], dim=1).float()


def _figures(watched: WatchedSequences, batch: SequenceBatch, wanted: Tensor) -> Mapping[Any, Tensor]:
    """The figures of `UNITS` on a batch, of each site (B, H, 6)."""
    import torch

    from guidance.probes.relevance import highest_entropy
    from guidance.probes.summary import summarise

    valid_BT = batch.valid_BT
    lengths_B1 = valid_BT.sum(-1, keepdim=True).float()
    most_B1 = highest_entropy(valid_BT, is_causal=watched.is_causal)[:, None]

    def figures(attention: Tensor) -> Tensor:
        summary = summarise(attention, wanted, valid_BT)
        entropy_BH = summary.entropy_BHQ.sum(-1) / (lengths_B1 * most_B1)
        highest_BH = summary.highest_BHQ.sum(-1) / lengths_B1
        return torch.cat([summary.masses_BHP, torch.stack([entropy_BH, highest_BH], dim=-1)], dim=-1)

    return watched.watch(batch, figures)


def _table(artifact: Artifact, config: Config) -> Table:
    counts = artifact.counts
    names = ("special", "first", "itself", "ordinary", "entropy")
    rows = [(f"layer {row['layer']}", *shares(row, names)) for row in counts["by_layer"]]
    rows.append(("by chance", *shares(counts["by_chance"], names)))
    note = f"most on special tokens: head {head_name(counts['best'])}, {share(counts['best']['special'])}"
    return Table(("", *names), rows, [note])


STAGE = probe(
    "sinks",
    1,
    Config,
    measure,
    takes=ON_SEQUENCES,
    table=_table,
    writes={"heads.parquet of sinks": head_columns(UNITS)},
    help="""Measure how much attention each head leaves on special tokens, on the first token and on itself.

    `guide probe relevance --no-special` measures patterns on what is left.
    """,
    examples=(
        "guide probe sinks guided wiki-128",
        "guide probe sinks ./bert-base text.txt --limit 200",
        "guide probe sinks ./bert-base text.txt --random 0",
    ),
)

run = STAGE.run
