"""``guide probe``: what heads do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.options import Session, stage_command
from cli.tables import folded
from pipelines.engine.stage import Result
from pipelines.stages import (
    probe_attack,
    probe_coreference,
    probe_dependencies,
    probe_distance,
    probe_importance,
    probe_loss,
    probe_pairs,
    probe_reflexives,
    probe_relevance,
    probe_sinks,
)

SHOWN = 15
"""Relations in the table on the terminal; all are in ``probe.json``."""

SHOWN_HEADS = 8
"""Heads that stand out, for each pattern in the table on the terminal."""

DATA = "Sequences of its tokenizer, a dataset or a corpus, or a text file."

Model = Annotated[str, typer.Argument(help="A model: a name, name@n, an id, or a folder.", show_default=False)]


@stage_command(
    "probe coref",
    probe_coreference.Config,
    examples=[
        "guide probe coref guided litbank/conll/",
        "guide probe coref ./bert-base gum/ontogum/ --candidates preceding_mentions",
        "guide probe coref guided litbank/conll/ --random 0   # the same shape with random weights",
        "guide probe coref guided gap-validation.tsv --json | jq .counts.best",
    ],
    next_command="guide show {}",
)
def probe_coref(
    session: Session,
    config: probe_coreference.Config,
    model: Model,
    files: Annotated[list[str], typer.Argument(help="Files or folders with coreference.", show_default=False)],
) -> Result:
    """Find heads by which a mention looks most at one of its antecedents.

    The query is the head word of each mention that has an antecedent in the text; it is right if no other word has as much
    attention as the head word of an antecedent.  The best head is chosen on the same texts that it is measured on; the
    split-half figure chooses it on half of the documents and measures it on the others.  Beside it stand rules: the nearest
    mention, the nearest one with the same head word, and a cascade of string match, head match, agreement, and any mention.
    """
    result = probe_coreference.run(model, files, config, **session.options())
    counts = result.artifact.counts
    names = ("accuracy", "pronominal", "proper", "nominal")
    rows = [(f"head {_head(counts['best'])}", *(_share(counts["best"][name]) for name in names))]
    rows.append(("split halves", _share(counts["split_half"]), "", "", ""))
    for kind in names[1:]:
        own = counts["best_by_kind"][kind]
        if own is not None and _head(own) != _head(counts["best"]):
            rows.append((f"head {_head(own)}", *(_share(own[name]) for name in names)))
    rows += [(name, *(_share(scores[key]) for key in names)) for name, scores in counts["baselines"].items()]
    for line in folded(("", "all", *names[1:]), list(dict.fromkeys(rows)), None):
        session.tell(line)
    session.tell(
        f"{counts['questions']:,} questions in {counts['documents']:,} documents; {counts['cut_off_mentions']:,} mentions were cut off"
    )
    return result


@stage_command(
    "probe deps",
    probe_dependencies.Config,
    examples=[
        "guide probe deps guided en_ewt-ud-dev.conllu",
        "guide probe deps ./bert-base en_ewt-ud-dev.conllu --limit 500 --min-words 100",
    ],
    next_command="guide show {}",
)
def probe_deps(
    session: Session,
    config: probe_dependencies.Config,
    model: Model,
    files: Annotated[list[str], typer.Argument(help="CoNLL-U files or folders of them.", show_default=False)],
) -> Result:
    """Find the attention heads that follow syntactic relations, from a word to its head or from a head to its dependent.

    The table has the best head for each relation.  Beside it stands a baseline without a model: always the word at one
    distance, the one that is right most often.  Heads and distances are chosen on the sentences that they are measured on.
    Punctuation and roots are not scored.
    """
    result = probe_dependencies.run(model, files, config, **session.options())
    counts = result.artifact.counts
    rows: list[tuple[str, ...]] = []
    for relation, found in counts["relations"].items():
        own = found["best"]
        if own["words"] >= config.min_words and len(rows) < SHOWN:
            direction = own["direction"].replace("_", " ")
            shares = _share(own["accuracy"]), _share(found["offset_accuracy"])
            rows.append(
                (relation, f"{own['words']:,}", _head(own), direction, shares[0], shares[1], f"{found['offset']:+d}")
            )
    for line in folded(("relation", "words", "head", "looks", "right", "distance", "of"), rows, None):
        session.tell(line)
    session.tell(
        f"all words: {_share(counts['attachment_of_best_heads'])} by the best head of each relation, "
        f"{_share(counts['attachment_of_best_offsets'])} by the best distance"
    )
    return result


@stage_command(
    "probe reflexive",
    probe_reflexives.Config,
    examples=[
        "guide probe reflexive guided",
        "guide probe reflexive ./bert-base --distractor none",
        "guide probe reflexive guided sentences.tsv --random 0",
    ],
    next_command="guide show {}",
)
def probe_reflexive(
    session: Session,
    config: probe_reflexives.Config,
    model: Model,
    file: Annotated[
        str | None,
        typer.Argument(
            help="Lines of a sentence, the number of its reflexive from 0, and its determiner and noun, with tabs between.",
            show_default=False,
        ),
    ] = None,
) -> Result:
    """Find heads by which himself and herself look most at what they refer to.

    Without a file, 10,000 sentences are drawn from a grammar: "the man who can laugh would hurt himself".  The answer is right if
    no other token, special ones included, has as much attention as the determiner or the noun.
    """
    result = probe_reflexives.run(model, file, config, **session.options())
    counts = result.artifact.counts
    own = counts["best"]
    rows = [(f"head {_head(own)}", _share(own["accuracy"])), ("mean of all heads", _share(counts["mean"]))]
    for line in folded(("", "right"), rows, None):
        session.tell(line)
    return result


@stage_command(
    "probe relevance",
    probe_relevance.Config,
    examples=[
        "guide probe relevance guided wiki-128",
        "guide probe relevance segmenter topics --split test --limit 0",
        "guide probe relevance guided wiki-128 --masks wiki-masks --patterns dependency --patterns rare",
        "guide probe relevance ./bert-base text.txt --no-special --patterns 'matching_token and not self'",
    ],
    next_command="guide show {}",
)
def probe_relevance_command(
    session: Session,
    config: probe_relevance.Config,
    model: Model,
    data: Annotated[
        str,
        typer.Argument(help=DATA, show_default=False),
    ],
) -> Result:
    """Measure how much of its attention each head spends on each pattern (global relevance).

    All patterns are measured that the data have the features for.  A head stands out if it is three standard deviations above
    the mean of all heads; with ten heads or fewer none can.
    """
    result = probe_relevance.run(model, data, config, **session.options())
    counts = result.artifact.counts
    rows = []
    for name, found in sorted(counts["patterns"].items(), key=lambda item: -item[1]["best"][item[0]]):
        heads = ", ".join(found["outstanding"][:SHOWN_HEADS]) + (
            " …" if len(found["outstanding"]) > SHOWN_HEADS else ""
        )
        rows.append((name, _head(found["best"]), _share(found["best"][name]), _share(found["mean"]), heads or "–"))
    for line in folded(("pattern", "best head", "relevance", "mean", "heads that stand out"), rows, None):
        session.tell(line)
    if counts["left_out"]:
        session.tell("not measured: " + "; ".join(f"{name}: {why}" for name, why in counts["left_out"].items()))
    return result


@stage_command(
    "probe blimp",
    probe_pairs.Config,
    examples=[
        "guide probe blimp guided blimp/*.jsonl",
        "guide probe blimp guided pairs.tsv --masking word --floors wiki-128",
        "guide probe blimp guided blimp/ --limit 50 --each-head",
    ],
    next_command="guide show {}",
)
def probe_blimp(
    session: Session,
    config: probe_pairs.Config,
    model: Model,
    files: Annotated[
        list[str],
        typer.Argument(
            help="JSON lines with sentence_good and sentence_bad, or lines of a good sentence, a tab and a bad one.",
            show_default=False,
        ),
    ],
) -> Result:
    """Ask whether a masked language model finds the good sentence of minimal pairs more likely than the bad one.

    The likelihood of a sentence is the sum over its tokens, each masked alone.  Equal scores count as wrong.  The mean is over paradigms.
    """
    result = probe_pairs.run(model, files, config, **session.options())
    counts = result.artifact.counts
    names = ("accuracy", *counts["floors"])
    rows = [
        (row["paradigm"], f"{row['pairs']:,}", *(_share(row[name]) for name in names)) for row in counts["paradigms"]
    ]
    rows.append(("mean", "", _share(counts["accuracy"]), *(_share(value) for value in counts["floors"].values())))
    for line in folded(("paradigm", "pairs", "right", *names[1:]), rows, None):
        session.tell(line)
    if "heads" in counts:
        worst = counts["heads"]["most_needed"]
        session.tell(
            f"without head {_head(worst)}: {_share(worst['accuracy'])}, of {_share(counts['heads']['pairs_right'])} of all pairs"
        )
    return result


@stage_command(
    "probe loss",
    probe_loss.Config,
    examples=["guide probe loss guided wiki-128", "guide probe loss guided wiki-128 --masks wiki-masks --limit 0"],
    next_command="guide show {}",
)
def probe_loss_command(
    session: Session,
    config: probe_loss.Config,
    model: Model,
    data: Annotated[str, typer.Argument(help=DATA, show_default=False)],
) -> Result:
    """Say where a masked language model is good: its loss by frequency, place, neighbours and part of speech.

    Beside each stand the n-gram floors of the same tokens, counted in the training text of the sequences.
    """
    result = probe_loss.run(model, data, config, **session.options())
    names = ("loss", *probe_loss.FLOORS)
    rows = [
        (
            row["slice"],
            row["value"],
            f"{row['tokens']:,}",
            *(_nats(row[name]) for name in names),
            _share(row["accuracy"]),
        )
        for row in result.artifact.counts["slices"]
    ]
    for line in folded(("", "", "tokens", *names, "right"), rows, None):
        session.tell(line)
    return result


@stage_command(
    "probe attack",
    probe_attack.Config,
    examples=[
        "guide probe attack reviews-asa reviews",
        "guide probe attack reviews-model reviews --by freelb --limit 100",
    ],
    next_command="guide show {}",
)
def probe_attack_command(
    session: Session,
    config: probe_attack.Config,
    model: Model,
    data: Annotated[str, typer.Argument(help=DATA, show_default=False)],
) -> Result:
    """Show what an attack does to attention: that of the model's plan, FreeLB or SMART.

    The table has, by layer, the share of units that an adversary switches off, and how spread attention is without and under the attack.
    """
    result = probe_attack.run(model, data, config, **session.options())
    names = ("masked", "entropy", "entropy_attacked", "highest", "highest_attacked", "special", "special_attacked")
    rows = [(str(row["layer"]), *(_share(row[name]) for name in names)) for row in result.artifact.counts["by_layer"]]
    heads = ("layer", "masked", "entropy", "attacked", "highest", "attacked", "special", "attacked")
    for line in folded(heads, rows, None):
        session.tell(line)
    return result


@stage_command(
    "probe sinks",
    probe_sinks.Config,
    examples=["guide probe sinks guided wiki-128", "guide probe sinks ./bert-base text.txt --limit 200"],
    next_command="guide show {}",
)
def probe_sinks_command(
    session: Session,
    config: probe_sinks.Config,
    model: Model,
    data: Annotated[str, typer.Argument(help=DATA, show_default=False)],
) -> Result:
    """Measure how much attention each head leaves on special tokens, on the first token and on itself.

    `guide probe relevance --no-special` measures patterns on what is left.
    """
    result = probe_sinks.run(model, data, config, **session.options())
    counts = result.artifact.counts
    names = ("special", "first", "itself", "ordinary", "entropy")
    rows = [(f"layer {row['layer']}", *(_share(row[name]) for name in names)) for row in counts["by_layer"]]
    rows.append(("by chance", *(_share(counts["by_chance"].get(name)) for name in names)))
    for line in folded(("", *names), rows, None):
        session.tell(line)
    session.tell(f"most on special tokens: head {_head(counts['best'])}, {_share(counts['best']['special'])}")
    return result


@stage_command(
    "probe distance",
    probe_distance.Config,
    examples=[
        "guide probe distance guided wiki-128 --limit 100",
        "guide probe distance guided wiki-128 --from plain --limit 100",
    ],
    next_command="guide show {}",
)
def probe_distance_command(
    session: Session,
    config: probe_distance.Config,
    model: Model,
    data: Annotated[str, typer.Argument(help=DATA, show_default=False)],
    other: Annotated[
        str | None, typer.Option("--from", help="A second model: how far is each head from the same head there?")
    ] = None,
) -> Result:
    """Measure how differently heads look (Jensen-Shannon divergence of their rows): within a model, or between two."""
    import pyarrow.parquet as pq

    result = probe_distance.run(model, other, data, config, **session.options())
    with result.artifact.open("heads.parquet") as file:
        table = pq.read_table(file).to_pylist()
    shown = result.artifact.counts["shown"]
    ranked = sorted(table, key=lambda row: row[shown])
    chosen = ranked if len(ranked) <= 2 * SHOWN_HEADS else [*ranked[:SHOWN_HEADS], *ranked[-SHOWN_HEADS:]]
    cells = [(_head(row), *(_nats(row[name]) for name in probe_distance.UNITS)) for row in chosen]
    for line in folded(("head", "nearest", "mean", "counterpart"), cells, None):
        session.tell(line)
    return result


@stage_command(
    "probe importance",
    probe_importance.Config,
    examples=[
        "guide probe importance reviews-model reviews",
        "guide probe importance summariser papers --split test --by-layer",
        "guide probe importance guided wiki-128 --by off --limit 200   # the loss without each head",
        "guide finetune reviews --plan my-plan.toml --scores $(guide show probe/58a1 --json | jq -r .path)/heads.parquet",
    ],
    next_command="guide show {}",
)
def probe_importance_command(
    session: Session,
    config: probe_importance.Config,
    model: Model,
    data: Annotated[
        str,
        typer.Argument(
            help="A dataset of its task or sequences of one, or for word models any text.", show_default=False
        ),
    ],
) -> Result:
    """Measure how much the loss of a model depends on each head (first-order Taylor importance).

    The loss is that of its task, or of masked words.  Gradients of the mean loss are added up over the batches of a split.  The importance of a head is the sum of the squares of
    gradient times weight, over its rows of the query, key and value matrices and its columns of the output matrix.  With --by off it is how much the mean loss
    rises when the head is switched off.
    """
    import pyarrow.parquet as pq

    result = probe_importance.run(model, data, config, **session.options())
    with result.artifact.open("heads.parquet") as file:
        ranked = sorted(pq.read_table(file).to_pylist(), key=lambda row: -row["importance"])
    chosen = [*ranked[:SHOWN_HEADS], *(ranked[-3:] if len(ranked) > SHOWN_HEADS + 3 else [])]
    for line in folded(("head", "score", "importance"), [_important(row) for row in chosen], None):
        session.tell(line)
    return result


def _important(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return _head(row), f"{row['score']:.3f}", f"{row['importance']:.3g}"


def _head(row: Mapping[str, Any]) -> str:
    from pipelines.probing.heads import name_of

    return name_of(row)


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
