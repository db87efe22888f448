"""Stage ``probe-relevance``: how much of its attention does each head spend on each pattern?

Reads a model, sequences, and masks if they are given.  Writes probe@1: ``heads.parquet`` (one row for each head, one column for
each pattern), ``patterns.parquet`` (one row for each pattern and head, with the standard error and the lift), ``probe.json`` (for
each pattern the heads that stand out) and ``heads-PATTERN.png`` for a few patterns.

Source: Li et al. 2022, equation 1 and section 3.1; `guidance.probes.relevance`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run
from pipelines.probing.heads import COLUMNS, SHOWN_HEADS, best, head_name, heads_picture, share, write_heads
from pipelines.probing.patterns import UNIT, PatternsConfig, check_patterns, measurable
from pipelines.probing.probe import Findings, probe, random_weights
from pipelines.stages.reading import ON_SEQUENCES
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns

if TYPE_CHECKING:
    from guidance.patterns.pattern import Pattern
    from guidance.probes.relevance import Relevance
    from pipelines.probing.sequences import SequenceBatch, WatchedSequences

TABLE = "patterns.parquet"
MOST_PICTURES = 6


class Config(PatternsConfig):
    """Which patterns are measured, and how."""

    special: bool = Field(
        True,
        description="Count special tokens; without them, attention among the other tokens is scaled to a sum of 1.",
    )
    diagonal: bool = Field(True, description="Count the attention of a token to itself.")
    random: int | None = random_weights()


OF_PATTERNS: Columns = {
    "pattern": ("string", "name, or condition"),
    **COLUMNS,
    "relevance": ("float64", UNIT),
    "standard_error": ("float64", "of the relevance over examples; null of one example"),
    "lift": (
        "float64",
        "relevance divided by that of a head that looks at all tokens alike that it can see; null where that is 0",
    ),
}
"""Columns of ``patterns.parquet``."""

MAY_BE_NULL = ("standard_error", "lift")


def measure(run: Run[Config]) -> Findings:
    """What every head spends on each pattern.  Raises InputError if a pattern needs a feature that is not there."""
    import torch

    from guidance.probes.relevance import Relevance, outstanding
    from pipelines.probing.sequences import WatchedSequences, batches_of

    config = run.config
    watched = WatchedSequences(run.inputs, config, config.random)
    patterns, left_out = measurable(config.patterns, watched.known)
    relevance = Relevance(list(patterns))
    for batch in batches_of(run, watched, config.batch_size):
        _add(relevance, watched, patterns, batch, config)
    table = write_heads(run, {name: relevance.of(name) for name in patterns}, dict.fromkeys(patterns, UNIT))
    rows: list[dict[str, Any]] = []
    findings: dict[str, dict[str, Any]] = {}
    for name in patterns:
        values = torch.tensor([row[name] for row in table])
        by_chance = relevance.by_chance(name)
        findings[name] = {
            "best": best(table, name),
            "mean": float(values.double().mean()),
            "deviation": float(values.double().std(correction=0)),
            "by_chance": by_chance,
            "outstanding": [
                head_name(row) for row, is_out in zip(table, outstanding(values).tolist(), strict=True) if is_out
            ],
        }
        errors = [error for by_head in relevance.standard_error(name).values() for error in by_head.tolist()]
        rows += [
            {
                "pattern": name,
                **{key: row[key] for key in COLUMNS},
                "relevance": row[name],
                "standard_error": None if math.isnan(error) else error,
                "lift": row[name] / by_chance if by_chance else None,
            }
            for row, error in zip(table, errors, strict=True)
        ]
    run.out.write_rows(TABLE, OF_PATTERNS, rows, may_be_null=MAY_BE_NULL)
    drawn = sorted(patterns, key=lambda p: (-len(findings[p]["outstanding"]), -float(findings[p]["best"][p])))
    files = Counter[str]()
    for name in drawn[:MOST_PICTURES]:
        title = f"Attention on {name}\n{watched.number:,} sequences"
        file = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:60].strip("-")
        files[file] += 1
        file += f"-{files[file]}" if files[file] > 1 else ""
        run.out.write(f"heads-{file}.png", heads_picture(run, table, name, title=title, label="% of attention"))
    counts = {"sequences": watched.number, "heads": len(table)}
    return Findings(counts, {"patterns": findings, "left_out": left_out})


def _add(
    relevance: Relevance,
    watched: WatchedSequences,
    patterns: Mapping[str, Pattern],
    batch: SequenceBatch,
    config: Config,
) -> None:
    """Read a batch."""
    import torch

    from guidance.probes.relevance import among, keys_of, masses, uniform, visible

    tokens, valid_BT = watched.tokens(batch), batch.valid_BT
    kept_BT = valid_BT if config.special else valid_BT & ~watched.special_BT(batch)
    wanted = torch.stack([keys_of(pattern, tokens) for pattern in patterns.values()], dim=1)
    if config.special and config.diagonal:
        relevance.begin(watched.examples(batch), uniform(wanted, kept_BT, is_causal=watched.is_causal))
        by_site = watched.watch(batch, lambda attention: masses(attention, wanted, kept_BT))
    else:
        even_B1TT = visible(valid_BT, is_causal=watched.is_causal).float()[:, None]

        def masses_among(attention: torch.Tensor) -> torch.Tensor:
            return masses(among(attention, kept_BT, diagonal=config.diagonal), wanted, kept_BT)

        relevance.begin(watched.examples(batch), masses_among(even_B1TT)[:, 0])
        by_site = watched.watch(batch, masses_among)
    for site, masses_BHP in by_site.items():
        relevance.add(site, masses_BHP)


def _table(artifact: Artifact, config: Config) -> Table:
    rows = []
    for name, finding in sorted(artifact.counts["patterns"].items(), key=lambda item: -item[1]["best"][item[0]]):
        heads, head = finding["outstanding"], finding["best"]
        named = ", ".join(heads[:SHOWN_HEADS]) + (" …" if len(heads) > SHOWN_HEADS else "")
        rows.append((name, head_name(head), share(head[name]), share(finding["mean"]), named or "–"))
    left_out = "; ".join(f"{name}: {why}" for name, why in artifact.counts["left_out"].items())
    notes = [f"not measured: {left_out}"] if left_out else []
    return Table(("pattern", "best head", "relevance", "mean", "heads that stand out"), rows, notes)


STAGE = probe(
    "relevance",
    2,
    Config,
    measure,
    takes=ON_SEQUENCES,
    check=check_patterns,
    table=_table,
    writes={TABLE: OF_PATTERNS},
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
