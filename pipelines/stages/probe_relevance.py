"""Stage ``probe-relevance``: how much of its attention does each head spend on each pattern?

Reads a model, sequences, and masks if they are given.  Writes probe@1: ``heads.parquet`` (one row for each head, one column for
each pattern), ``patterns.parquet`` (one row for each pattern and head, with the standard error and the lift), ``probe.json`` (for
each pattern the heads that stand out) and ``heads-PATTERN.png`` for a few patterns.

Source: Li et al. 2022, equation 1 and section 3.1; `guidance.probes.relevance`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipelines.engine.command import Table
from pipelines.engine.stage import Run
from pipelines.probing.probe import Findings, batches_of, probe
from pipelines.probing.sequences import SequencesConfig
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact
from pipelines.storage.columns import column

if TYPE_CHECKING:
    import torch

    from guidance.sites import Site

UNIT = "mean attention of a token on the keys of the pattern, over all examples"
TABLE = "patterns.parquet"
_MAY_BE_NULL = {
    "standard_error": "of the relevance over examples; null of one example",
    "lift": "relevance divided by that of a head that looks at all tokens alike; null where that is 0",
}
MOST_PICTURES = 6


class Config(SequencesConfig):
    """Which patterns are measured, and how."""

    patterns: list[str] = Field(
        [],
        description="a pattern (repeatable): a name, a combination, or a condition such as 'matching_token and not self'; "
        "by default all patterns that the sequences and the masks have the features for",
    )
    special: bool = Field(
        True, description="count special tokens; without them, attention among the other tokens is scaled to a sum of 1"
    )
    diagonal: bool = Field(True, description="count the attention of a token to itself")


def pattern_schema() -> Any:
    """Columns of ``patterns.parquet``."""
    import pyarrow as pa

    return pa.schema(
        [
            column("pattern", pa.string(), "name, or condition"),
            column("stack", pa.string(), "encoder or decoder"),
            column("attention", pa.string(), "self, or pal for added heads"),
            column("layer", pa.int32(), "running number"),
            column("head", pa.int32(), "running number in its layer"),
            column("relevance", pa.float64(), UNIT),
            *(pa.field(name, pa.float64(), metadata={"unit": unit}) for name, unit in _MAY_BE_NULL.items()),
        ]
    )


def check(config: Config, references: Mapping[str, Any]) -> None:
    """Raises InputError if there is no such pattern."""
    from pipelines.probing.patterns import read_written

    for name in config.patterns:
        read_written(name)


def measure(run: Run[Config]) -> Findings:
    """What every head spends on each pattern.

    Raises:
        InputError: a pattern needs a feature that is not there.
    """
    import math

    import pyarrow as pa
    import torch

    from guidance.probes.relevance import Relevance, among, keys_of, masses, outstanding, uniform
    from pipelines.probing.heads import best, heads_picture, write_heads
    from pipelines.probing.patterns import measurable
    from pipelines.probing.sequences import WatchedSequences
    from pipelines.probing.tables import head_name

    config = run.config
    watched = WatchedSequences(run.inputs, config)
    patterns, left_out = measurable(config.patterns, watched.known)
    relevance = Relevance(list(patterns))
    for batch in batches_of(run, watched, config.batch_size):
        tokens, kept_BT = watched.tokens(batch), batch.valid_BT
        if not config.special:
            kept_BT = kept_BT & ~torch.isin(
                tokens.ids_BT, torch.tensor(watched.tokenizer.all_special_ids, device=tokens.ids_BT.device)
            )
        wanted = torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
        plain = config.special and config.diagonal
        even_B1TT = (batch.valid_BT[:, :, None] & batch.valid_BT[:, None, :]).float()[:, None]
        by_chance = (
            uniform(wanted, kept_BT)
            if plain
            else masses(among(even_B1TT, kept_BT, diagonal=config.diagonal), wanted, kept_BT)[:, 0]
        )
        relevance.begin(batch.numbers, by_chance)

        def watch(
            site: Site,
            attention_BHTT: torch.Tensor,
            wanted: torch.Tensor = wanted,
            kept_BT: torch.Tensor = kept_BT,
            plain: bool = plain,
        ) -> None:
            seen = attention_BHTT if plain else among(attention_BHTT, kept_BT, diagonal=config.diagonal)
            relevance.add(site, masses(seen, wanted, kept_BT))

        watched.watch(batch, watch)
    table = write_heads(run, {name: relevance.of(name) for name in patterns}, dict.fromkeys(patterns, UNIT))
    rows: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    for name in patterns:
        values = torch.tensor([row[name] for row in table])
        stands_out = [row for row, out in zip(table, outstanding(values).tolist(), strict=True) if out]
        even, errors = relevance.by_chance(name), relevance.standard_error(name)
        found[name] = {
            "best": best(table, name),
            "mean": float(values.double().mean()),
            "deviation": float(values.double().std(correction=0)),
            "by_chance": even,
            "outstanding": [head_name(row) for row in stands_out],
        }
        each = [error for site_errors in errors.values() for error in site_errors.tolist()]
        for row, error in zip(table, each, strict=True):
            place = {key: row[key] for key in ("stack", "attention", "layer", "head")}
            own = {"standard_error": None if math.isnan(error) else error, "relevance": row[name]}
            rows.append({"pattern": name, **place, **own, "lift": row[name] / even if even else None})
    with run.out.parquet(TABLE, pattern_schema()) as writer:
        writer.write_table(pa.Table.from_pylist(rows, pattern_schema()))
    drawn = sorted(patterns, key=lambda name: (-len(found[name]["outstanding"]), -float(found[name]["best"][name])))
    for name in drawn[:MOST_PICTURES]:
        title = f"Attention on {name}\n{watched.number:,} sequences"
        file = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:60].strip("-")
        run.out.write(f"heads-{file}.png", heads_picture(run, table, name, title=title, label="% of attention"))
    counts = {"sequences": watched.number, "heads": len(table)}
    return Findings(counts, {"patterns": found, "left_out": left_out})


def _table(artifact: Artifact, config: Config) -> Table:
    from pipelines.probing.tables import SHOWN_HEADS, head_name, share

    rows = []
    for name, found in sorted(artifact.counts["patterns"].items(), key=lambda item: -item[1]["best"][item[0]]):
        heads = found["outstanding"]
        named = ", ".join(heads[:SHOWN_HEADS]) + (" …" if len(heads) > SHOWN_HEADS else "")
        rows.append((name, head_name(found["best"]), share(found["best"][name]), share(found["mean"]), named or "–"))
    left_out = "; ".join(f"{name}: {why}" for name, why in artifact.counts["left_out"].items())
    notes = [f"not measured: {left_out}"] if left_out else []
    return Table(("pattern", "best head", "relevance", "mean", "heads that stand out"), rows, notes)


STAGE = probe(
    "relevance",
    2,
    Config,
    measure,
    takes=ON_SEQUENCES,
    check=check,
    table=_table,
    help="""Measure how much of its attention each head spends on each pattern (global relevance).

    All patterns are measured that the data have the features for.  A head stands out if it is three standard deviations above
    the mean of all heads; with ten heads or fewer none can.
    """,
    examples=(
        "guide probe relevance guided wiki-128",
        "guide probe relevance segmenter topics --split test --limit 0",
        "guide probe relevance guided wiki-128 --masks wiki-masks --patterns dependency --patterns rare",
        "guide probe relevance ./bert-base text.txt --no-special --patterns 'matching_token and not self'",
    ),
)

run = STAGE.run
