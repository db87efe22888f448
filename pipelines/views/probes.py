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


KINDS_OF_MENTIONS = {"pronominal": "pronouns", "proper": "names", "nominal": "others"}
RULES = {"nearest": "nearest mention", "head match": "nearest with the same head word", "rules": "rules in order"}


def _coref(artifact: Artifact) -> Table:
    counts = artifact.counts
    number, questions = counts["asked"], counts["questions"]
    # a column that is about all questions says no more than the first
    parts = {name: title for name, title in KINDS_OF_MENTIONS.items() if 0 < number[name] < questions}
    parts |= {name: name for name in ("pro", "anti") if 0 < number[name] < questions}
    titles = {"accuracy": "all", **parts, **({"any_word": "any word"} if number["any_word"] else {})}
    difference = all(name in parts for name in ("pro", "anti"))

    def row(label: str, found: Mapping[str, Any]) -> tuple[str, ...]:
        shares = tuple(_share(found.get(name)) for name in titles)
        both = (found.get("pro"), found.get("anti"))
        return label, *shares, *((_points(*both),) if difference else ())

    empty = ("",) * (len(titles) + difference)
    rows = [("questions", *(f"{number[name]:,}" for name in titles), *(("",) if difference else ()))]
    best: dict[str, tuple[list[str], Any]] = {_head(counts["best"]): (["all"], counts["best"])}
    for name, title in list(titles.items())[1:]:
        head = counts["best_by"][name]
        best.setdefault(_head(head), ([], head))[0].append(title)
    rows += [row(f"head {name}, best on {' and '.join(of)}", head) for name, (of, head) in best.items()]
    rows.insert(2, ("split halves", _share(counts["split_half"]), *empty[1:]))
    rows += [row(RULES[name], scores) for name, scores in counts["baselines"].items()]
    return Table(("", *titles.values(), *(("pro - anti",) if difference else ())), rows, _coref_notes(artifact))


def _coref_notes(artifact: Artifact) -> tuple[str, ...]:
    counts, config = artifact.counts, artifact.manifest["config"]
    notes = [f"{counts['questions']:,} questions in {counts['documents']:,} documents"]
    if counts["without_antecedent"]:
        notes.append(f"{counts['without_antecedent']:,} pronouns have no antecedent among their candidates")
    if counts["cut_off_mentions"]:
        hint = "; a larger --max-length reads more"
        if counts["asked"]["any_word"] < counts["questions"]:
            hint = "; --scope windows reads whole documents" if config["scope"] == "document" else ""
        notes.append(f"{counts['cut_off_mentions']:,} of {counts['mentions']:,} mentions were cut off{hint}")
    found = ["; ".join(notes)]
    if counts["asked"]["any_word"]:
        found.append('a pronoun chooses between its candidates; under "any word" all words of the text compete')
    if not counts["baselines"]:
        found.append("no rules to compare with: the files mark no mention that would be wrong, so every rule is right")
    return tuple(found)


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
    notes, found = [f"{counts['sentences']:,} sentences"], counts["confusion"]
    if found:
        lowest = min(range(len(found["layers"])), key=lambda layer: found["layers"][layer])
        notes.append(
            f"confusion with other noun phrases: {found['layers'][lowest]:.2f} bits in layer {lowest}, where it is lowest, and "
            f"{sum(found['layers']) / len(found['layers']):.2f} on average; {found['even']:.2f} if all words were looked at alike "
            f"({found['sentences']:,} sentences)"
        )
    return Table(("", "right"), [best, ("mean of all heads", _share(counts["mean"]))], tuple(notes))


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


_TABLES: Mapping[str, Callable[..., Table]] = {
    "coref": _coref,
    "deps": _deps,
    "reflexive": _reflexive,
    "blimp": _blimp,
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


def _points(one: float | None, other: float | None) -> str:
    return "–" if one is None or other is None else f"{100 * (one - other):+.1f}"


def _shares(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_share(row[name]) for name in names)
