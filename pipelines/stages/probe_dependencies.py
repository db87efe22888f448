"""Stage ``probe-deps``: does the word that a head looks at most have the right relation?

Reads a model and CoNLL-U files.  Writes probe@1: ``heads.parquet`` (one row for each head), ``relations.parquet`` (one row for
each relation, direction and head), ``probe.json`` (the best head of each relation beside the best fixed distance) and
``heads.png``.

Source: Clark et al. 2019, section 4.2; `guidance.probes.dependencies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine.declaration import Table
from pipelines.engine.stage import Run, knob
from pipelines.inputs import Model, TextFiles
from pipelines.probing.heads import COLUMNS, best, head_columns, head_name, key_of, share, write_heads
from pipelines.probing.probe import Findings, ReadingConfig, probe
from pipelines.storage.artifacts import Artifact
from pipelines.storage.tables import Columns

if TYPE_CHECKING:
    from pathlib import Path

    from guidance.sites import Site
    from pipelines.text.blocks import Notes
    from pipelines.text.conllu import Sentence

RELATIONS = "relations.parquet"

UNITS: Mapping[str, str] = {
    "towards_head": "share of words whose head the head looks at most, from the word",
    "towards_dependent": "share of words that are looked at most from their head",
}


class Config(ReadingConfig):
    """Which sentences are read."""

    min_words: int = knob(
        0, "Fewest words of a relation that is shown, instead of the 15 most frequent relations.", ge=0
    )
    encoding: str = Field("utf-8", description="Encoding of the files; invalid bytes are an error.")


OF_RELATIONS: Columns = {
    "relation": ("string", "label of the treebank"),
    "direction": ("string", "towards_head or towards_dependent"),
    **COLUMNS,
    "accuracy": ("float64", "share of the relation's words"),
    "words": ("int64", "count of the relation's words"),
}
"""Columns of ``relations.parquet``."""


def measure(run: Run[Config]) -> Findings:
    """What relations every head follows.  Raises InputError if a file is not CoNLL-U, or no sentence has a tree."""
    from guidance.probes.dependencies import Parser, offset_baseline, share_seen
    from pipelines.probing.watched import WatchedModel
    from pipelines.text.blocks import Notes

    config, notes, files = run.config, Notes(), run.inputs["treebank"]
    # before the model is opened, so that a wrong file fails at once
    for path, name in zip(files.paths, files.names, strict=True):
        next(_sentences(path, name, config.encoding, Notes()), None)
    model = WatchedModel.of(run)
    parsers: dict[Site, Parser] = {}
    counts = dict.fromkeys(("sentences", "cut_sentences", "words"), 0)
    read_trees: list[tuple[list[int], list[str]]] = []
    with run.progress.task("probe", total=config.limit or None, unit="sentences") as bar:
        for words, heads, relations in _trees(run, notes):
            if config.limit and counts["sentences"] >= config.limit:
                break
            read, attention = model.look(words, config.words)
            bar.advance(1)
            if len(read.row_of) < len(words):
                counts["cut_sentences"] += 1
                continue
            rows = [read.row_of[word] for word in range(len(words))]
            for site, attention_HWW in attention.items():
                parsers.setdefault(site, Parser()).add(attention_HWW[:, rows][:, :, rows], heads, relations)
            counts["sentences"] += 1
            counts["words"] += len(words)
            read_trees.append((heads, relations))
    if not any(parser.total for parser in parsers.values()):
        raise InputError(
            f"{run.inputs['treebank'].names[0]}: no sentence with a tree fits into {config.max_length} tokens"
        )
    attached = {site: parser.attachment() for site, parser in parsers.items()}
    table = write_heads(
        run,
        {name: {site: scores[n] for site, scores in attached.items()} for n, name in enumerate(UNITS)},
        UNITS,
        "towards_head",
        title=f"Words whose head is looked at most\n{counts['sentences']:,} sentences",
        label="% of words",
    )
    totals = next(iter(parsers.values())).total
    scored = [
        {"relation": relation, "direction": direction, **key_of(site, head)}
        | {"accuracy": float(scores[n][head]), "words": totals[relation]}
        for site, parser in parsers.items()
        for relation, scores in sorted(parser.scores().items())
        for n, direction in enumerate(UNITS)
        for head in range(site.num_heads)
    ]
    run.out.write_rows(RELATIONS, OF_RELATIONS, scored)
    fixed = offset_baseline(read_trees)
    of_relation: dict[str, dict[str, Any]] = {}
    for relation in sorted(totals, key=lambda relation: -totals[relation]):
        own = [row for row in scored if row["relation"] == relation]
        offset, right = fixed[relation]
        of_relation[relation] = {"best": best(own, "accuracy"), "offset": offset, "offset_accuracy": right}
        if model.is_causal:
            of_relation[relation]["seen"] = dict(zip(UNITS, share_seen(read_trees, relation), strict=True))
    number = sum(totals.values())
    summary = {
        "best": {name: best(table, name) for name in UNITS},
        # the share of words whose head is found by the best head of their relation (an unlabelled attachment score)
        "attachment_of_best_heads": float(sum(of_relation[r]["best"]["accuracy"] * totals[r] for r in totals) / number),
        "attachment_of_best_offsets": sum(fixed[r][1] * totals[r] for r in totals) / number,
    }
    if model.is_causal:
        summary["seen"] = dict(zip(UNITS, share_seen(read_trees), strict=True))
    run.warn(*notes.lines())
    return Findings(counts, {**summary, "relations": of_relation})


def _trees(run: Run[Config], notes: Notes) -> Iterator[tuple[list[str], list[int], list[str]]]:
    """The words of each sentence that has a tree, their heads from 0, and their relations."""
    from guidance.probes.dependencies import ROOT

    given = run.inputs["treebank"]
    for path, name in zip(given.paths, given.names, strict=True):
        for sentence in _sentences(path, name, run.config.encoding, notes):
            if sentence.heads is not None and len(sentence.forms) > 1:
                words = ["".join(form.split()) or "_" for form in sentence.forms]
                yield words, [head - 1 if head else ROOT for head in sentence.heads], sentence.relations


def _sentences(path: Path, name: str, encoding: str, notes: Notes) -> Iterator[Sentence]:
    """The sentences of a file."""
    from pipelines.text.conllu import read_sentences
    from pipelines.text.readers import open_lines

    return read_sentences(open_lines(path, name, encoding, notes), name, notes)


SHOWN_RELATIONS = 15
"""Relations in the table, the most frequent ones, if the user says nothing else."""


def _table(artifact: Artifact, config: Config) -> Table:
    counts, min_words = artifact.counts, config.min_words
    rows: list[tuple[str, ...]] = []
    left_out = []
    for relation, figures in counts["relations"].items():
        own = figures["best"]
        if own["words"] < min_words or (not min_words and len(rows) == SHOWN_RELATIONS):
            left_out.append(relation)
            continue
        looks, distance = own["direction"].replace("_", " "), f"{figures['offset']:+d}"
        seen = (share(figures["seen"][own["direction"]]),) if "seen" in figures else ()
        shares = share(own["accuracy"]), *seen, share(figures["offset_accuracy"])
        rows.append((relation, f"{own['words']:,}", head_name(own), looks, *shares, distance))
    notes = [f"{len(left_out)} more: {', '.join(left_out)}; --min-words 1 shows all"] if left_out else []
    heads, offsets = (share(counts[f"attachment_of_best_{name}"]) for name in ("heads", "offsets"))
    notes.append(f"all words: {heads} by the best head of each relation, {offsets} by the best distance")
    titles = ("relation", "words", "head", "looks", "right", *(("seen",) if "seen" in counts else ()), "distance", "of")
    if seen := counts.get("seen"):
        shares = share(seen["towards_head"]), share(seen["towards_dependent"])
        notes.append(
            "of all words a causal model sees {} from the word, since their head stands before them, {} from the head".format(
                *shares
            )
        )
    return Table(titles, rows, tuple(notes))


STAGE = probe(
    "deps",
    1,
    Config,
    measure,
    takes={"model": Model(), "treebank": TextFiles("CoNLL-U files or folders of them.", argument="files")},
    table=_table,
    writes={"heads.parquet of deps": head_columns(UNITS), RELATIONS: OF_RELATIONS},
    help="""Find the attention heads that follow syntactic relations, from a word to its head or from a head to its dependent.

    The table has the best head for each relation, and a baseline without a model: always the word at one distance, the one
    that is right most often.  Heads and distances are chosen on the sentences that they are measured on.  A causal model can look
    from the later word to the earlier one only; "seen" is the share of words for which that is the direction.
    Punctuation and roots are not scored.
    """,
    examples=(
        "guide probe deps guided en_ewt-ud-dev.conllu",
        "guide probe deps ./bert-base en_ewt-ud-dev.conllu --limit 500 --min-words 100",
    ),
)

run = STAGE.run
