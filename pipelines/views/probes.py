"""What a probe found, as one table for people; `guide probe` prints it, and so does `guide show`.

The whole result is in the files of the artifact; a table has what a terminal can show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.storage.artifacts import Artifact

SHOWN_RELATIONS = 15
"""Relations of syntax in a table, the most frequent ones, if the user says nothing else."""

SHOWN_HEADS = 8
"""Heads in a list of heads."""

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """A table with sentences below it.

    Attributes:
        rows: as wide as ``titles``.
    """

    titles: tuple[str, ...]
    rows: Rows
    notes: tuple[str, ...] = ()


def table_of(artifact: Artifact, **shown: Any) -> Table:
    """The table of an artifact of kind probe.

    Args:
        shown: what to show of it, for probes that let users choose.
    """
    return _TABLES[artifact.counts["probe"]](artifact, **shown)


def _coref(artifact: Artifact) -> Table:
    counts = artifact.counts
    names = ("accuracy", "pronominal", "proper", "nominal")
    rows = [(f"head {_head(counts['best'])}", *_shares(counts["best"], names))]
    rows.append(("split halves", _share(counts["split_half"]), "", "", ""))
    for kind in names[1:]:
        own = counts["best_by_kind"][kind]
        if own is not None and _head(own) != _head(counts["best"]):
            rows.append((f"head {_head(own)}", *_shares(own, names)))
    rows += [(name, *_shares(scores, names)) for name, scores in counts["baselines"].items()]
    read = f"{counts['questions']:,} questions in {counts['documents']:,} documents"
    note = f"{read}; {counts['cut_off_mentions']:,} mentions were cut off"
    return Table(("", "all", *names[1:]), list(dict.fromkeys(rows)), (note,))


def _deps(artifact: Artifact, min_words: int = 0) -> Table:
    counts = artifact.counts
    rows: list[tuple[str, ...]] = []
    left_out = []
    for relation, found in counts["relations"].items():
        own = found["best"]
        if own["words"] < min_words or (not min_words and len(rows) == SHOWN_RELATIONS):
            left_out.append(relation)
            continue
        looks, distance = own["direction"].replace("_", " "), f"{found['offset']:+d}"
        shares = _share(own["accuracy"]), _share(found["offset_accuracy"])
        rows.append((relation, f"{own['words']:,}", _head(own), looks, *shares, distance))
    notes = (
        [f"{len(left_out)} more: {', '.join(left_out)}; `guide probe deps --min-words 1` shows all"] if left_out else []
    )
    heads, offsets = (_share(counts[f"attachment_of_best_{name}"]) for name in ("heads", "offsets"))
    notes.append(f"all words: {heads} by the best head of each relation, {offsets} by the best distance")
    return Table(("relation", "words", "head", "looks", "right", "distance", "of"), rows, tuple(notes))


def _reflexive(artifact: Artifact) -> Table:
    counts = artifact.counts
    best = (f"head {_head(counts['best'])}", _share(counts["best"]["accuracy"]))
    return Table(("", "right"), [best, ("mean of all heads", _share(counts["mean"]))])


def _relevance(artifact: Artifact) -> Table:
    counts = artifact.counts
    rows = []
    for name, found in sorted(counts["patterns"].items(), key=lambda item: -item[1]["best"][item[0]]):
        heads = found["outstanding"]
        named = ", ".join(heads[:SHOWN_HEADS]) + (" …" if len(heads) > SHOWN_HEADS else "")
        rows.append((name, _head(found["best"]), _share(found["best"][name]), _share(found["mean"]), named or "–"))
    left_out = "; ".join(f"{name}: {why}" for name, why in counts["left_out"].items())
    notes = (f"not measured: {left_out}",) if left_out else ()
    return Table(("pattern", "best head", "relevance", "mean", "heads that stand out"), rows, notes)


def _blimp(artifact: Artifact) -> Table:
    counts = artifact.counts
    names = ("accuracy", *counts["floors"])
    rows = [(row["paradigm"], f"{row['pairs']:,}", *_shares(row, names)) for row in counts["paradigms"]]
    rows.append(("mean", "", _share(counts["accuracy"]), *_shares(counts["floors"], names[1:])))
    notes: tuple[str, ...] = ()
    if "heads" in counts:
        worst, usual = counts["heads"]["most_needed"], _share(counts["heads"]["pairs_right"])
        notes = (f"without head {_head(worst)}: {_share(worst['accuracy'])}, of {usual} of all pairs",)
    return Table(("paradigm", "pairs", "right", *names[1:]), rows, notes)


def _loss(artifact: Artifact) -> Table:
    from pipelines.stages.probe_loss import FLOORS

    names = ("loss", *FLOORS)
    rows = []
    for row in artifact.counts["slices"]:
        nats = (_number(row[name]) for name in names)
        rows.append((row["slice"], row["value"], f"{row['tokens']:,}", *nats, _share(row["accuracy"])))
    return Table(("", "", "tokens", *names, "right"), rows)


def _attack(artifact: Artifact) -> Table:
    names = ("masked", "entropy", "entropy_attacked", "highest", "highest_attacked", "special", "special_attacked")
    rows = [(str(row["layer"]), *_shares(row, names)) for row in artifact.counts["by_layer"]]
    return Table(("layer", "masked", "entropy", "attacked", "highest", "attacked", "special", "attacked"), rows)


def _sinks(artifact: Artifact) -> Table:
    counts = artifact.counts
    names = ("special", "first", "itself", "ordinary", "entropy")
    rows = [(f"layer {row['layer']}", *_shares(row, names)) for row in counts["by_layer"]]
    rows.append(("by chance", *(_share(counts["by_chance"].get(name)) for name in names)))
    note = f"most on special tokens: head {_head(counts['best'])}, {_share(counts['best']['special'])}"
    return Table(("", *names), rows, (note,))


def _distance(artifact: Artifact) -> Table:
    from pipelines.stages.probe_distance import UNITS

    ranked = sorted(_heads_of(artifact), key=lambda row: row[artifact.counts["shown"]])
    chosen = ranked if len(ranked) <= 2 * SHOWN_HEADS else [*ranked[:SHOWN_HEADS], *ranked[-SHOWN_HEADS:]]
    rows = [(_head(row), *(_number(row[name]) for name in UNITS)) for row in chosen]
    return Table(("head", "nearest", "mean", "counterpart"), rows)


def _importance(artifact: Artifact) -> Table:
    ranked = sorted(_heads_of(artifact), key=lambda row: -row["importance"])
    chosen = [*ranked[:SHOWN_HEADS], *(ranked[-3:] if len(ranked) > SHOWN_HEADS + 3 else [])]
    rows = [(_head(row), _number(row["score"]), f"{row['importance']:.3g}") for row in chosen]
    return Table(("head", "score", "importance"), rows)


_TABLES: Mapping[str, Callable[..., Table]] = {
    "coref": _coref,
    "deps": _deps,
    "reflexive": _reflexive,
    "relevance": _relevance,
    "blimp": _blimp,
    "loss": _loss,
    "attack": _attack,
    "sinks": _sinks,
    "distance": _distance,
    "importance": _importance,
}


def _heads_of(artifact: Artifact) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    with artifact.open("heads.parquet") as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def _head(row: Mapping[str, Any]) -> str:
    from pipelines.probing.heads import name_of

    return name_of(row)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _shares(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_share(row[name]) for name in names)
