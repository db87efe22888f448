"""Stage ``probe-deps``: does the word that a head looks at most have the right relation?

Reads a model and CoNLL-U files.  Writes probe@1: ``heads.parquet`` (one row for each head), ``relations.parquet`` (one row for
each relation, direction and head), ``probe.json`` (the best head of each relation beside the best fixed distance) and
``heads.png``.

Source: Clark et al. 2019, section 4.2; `guidance.probes.dependencies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import Field

from guidance.errors import InputError
from pipelines.engine.stage import Options, Result, Run, Stage, check_working_folder, run_stage
from pipelines.stages.probe_coreference import ReadingConfig
from pipelines.storage.columns import column
from pipelines.storage.store import Store
from pipelines.text.sources import expand

if TYPE_CHECKING:
    from guidance.sites import Site

RELATIONS = "relations.parquet"

UNITS: Mapping[str, str] = {
    "towards_head": "share of words whose head the head looks at most, from the word",
    "towards_dependent": "share of words that are looked at most from their head",
}


class Config(ReadingConfig):
    """Which sentences are read."""

    encoding: str = Field("utf-8", description="encoding of the files; invalid bytes are an error")


def run(model: str, files: Sequence[str], config: Config, *, store: Store, **options: Unpack[Options]) -> Result:
    """Probe a model.

    Args:
        model: a reference, or a model folder.
        files: as arguments of `pipelines.text.sources.expand`.

    Raises:
        InputError: a file is not CoNLL-U, or no sentence has a tree.
        PlanError: the plan of the model needs more than text.
    """
    from pipelines.training.plan_inputs import model_inputs

    check_working_folder()
    with expand(files, any_kind=True, stdin=None) as found:
        inputs = {**model_inputs(model, store), "treebank": found.files(None, None)}
        return run_stage(STAGE, config, inputs, store=store, **options)


def relation_schema() -> Any:
    """Columns of ``relations.parquet``."""
    import pyarrow as pa

    return pa.schema(
        [
            column("relation", pa.string(), "label of the treebank"),
            column("direction", pa.string(), "towards_head or towards_dependent"),
            column("stack", pa.string(), "encoder or decoder"),
            column("attention", pa.string(), "self, or pal for added heads"),
            column("layer", pa.int32(), "running number"),
            column("head", pa.int32(), "running number in its layer"),
            column("accuracy", pa.float64(), "share of the relation's words"),
            column("words", pa.int64(), "count of the relation's words"),
        ]
    )


def build(run: Run) -> None:
    """The stage itself; see `run`."""
    import pyarrow as pa
    import torch

    from guidance.probes.dependencies import Parser, offset_baseline
    from pipelines.probing.heads import best, heads_picture, write_heads
    from pipelines.probing.watched import WatchedModel
    from pipelines.text.blocks import Notes
    from pipelines.training.learner import folder_of

    config, notes = run.config, Notes()
    folder = folder_of(run.inputs["model"])
    model = WatchedModel(folder, length=config.max_length, device=config.device, random_seed=config.random)
    parsers: dict[Site, Parser] = {}
    counts = dict.fromkeys(("sentences", "cut_sentences", "words"), 0)
    read_trees: list[tuple[list[int], list[str]]] = []
    with run.progress.task("probe", total=config.limit or None, unit="sentences") as bar:
        for words, heads, relations in _trees(run, notes):
            if config.limit and counts["sentences"] >= config.limit:
                break
            seen: dict[Site, Any] = {}
            read = model.look(words, seen.__setitem__, config.words)
            bar.advance(1)
            if len(read.place) < len(words):
                counts["cut_sentences"] += 1
                continue
            places = torch.tensor([read.place[word] for word in range(len(words))])
            for site, attention in seen.items():
                places = places.to(attention.device)
                parsers.setdefault(site, Parser()).add(attention[:, places][:, :, places], heads, relations)
            counts["sentences"] += 1
            counts["words"] += len(words)
            read_trees.append((heads, relations))
    if not any(parser.total for parser in parsers.values()):
        raise InputError(
            f"{run.inputs['treebank'].names[0]}: no sentence with a tree fits into {config.max_length} tokens"
        )
    attached = {site: parser.attachment() for site, parser in parsers.items()}
    figures = {name: {site: found[number] for site, found in attached.items()} for number, name in enumerate(UNITS)}
    rows = write_heads(run, figures, UNITS)
    totals = next(iter(parsers.values())).total
    scored = [
        {
            "relation": relation,
            "direction": direction,
            "stack": site.stack,
            "attention": site.attention,
            "layer": site.layer,
            "head": head,
            "accuracy": float(scores[number][head]),
            "words": totals[relation],
        }
        for site, parser in parsers.items()
        for relation, scores in sorted(parser.scores().items())
        for number, direction in enumerate(UNITS)
        for head in range(site.num_heads)
    ]
    schema = relation_schema()
    with run.out.parquet(RELATIONS, schema) as writer:
        writer.write_table(pa.Table.from_pylist(scored, schema))
    fixed = offset_baseline(read_trees)
    found = {}
    for relation in sorted(totals, key=lambda relation: -totals[relation]):
        own = [row for row in scored if row["relation"] == relation]
        offset, share = fixed[relation]
        found[relation] = {"best": best(own, "accuracy"), "offset": offset, "offset_accuracy": share}
    summary = {
        "best": {name: best(rows, name) for name in UNITS},
        "attachment_of_best_heads": _attachment(found, totals),
        "attachment_of_best_offsets": sum(fixed[r][1] * totals[r] for r in totals) / sum(totals.values()),
    }
    run.out.write_json("probe.json", {"schema": 1, "probe": "deps", "counts": counts, **summary, "relations": found})
    title = f"Words whose head is looked at most\n{counts['sentences']:,} sentences"
    run.out.write("heads.png", heads_picture(run, rows, "towards_head", title=title, label="% of words"))
    run.out.counts |= {"probe": "deps", **counts, **summary, "relations": found}
    run.warn(*notes.lines())


def _trees(run: Run, notes: Any) -> Iterator[tuple[list[str], list[int], list[str]]]:
    """The words of each sentence that has a tree, their heads from 0, and their relations."""
    from guidance.probes.dependencies import ROOT
    from pipelines.text.conllu import read_sentences
    from pipelines.text.readers import open_lines

    given = run.inputs["treebank"]
    for path, name in zip(given.paths, given.names, strict=True):
        for sentence in read_sentences(open_lines(path, name, run.config.encoding, notes), name, notes):
            if sentence.heads is not None and len(sentence.forms) > 1:
                words = ["".join(form.split()) or "_" for form in sentence.forms]
                yield words, [head - 1 if head else ROOT for head in sentence.heads], sentence.relations


def _attachment(found: Mapping[str, Mapping[str, Any]], totals: Mapping[str, int]) -> float:
    """The share of words whose head is found by the best head of their relation (an unlabelled attachment score)."""
    return float(sum(found[r]["best"]["accuracy"] * totals[r] for r in totals) / sum(totals.values()))


STAGE = Stage("probe-deps", "probe", 1, Config, build)
