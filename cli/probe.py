"""``guide probe``: what heads do."""

from __future__ import annotations

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
from pipelines.views.probes import table_of

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
        "guide probe coref guided pro_stereotyped_type1.txt.dev anti_stereotyped_type1.txt.dev",
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
    attention as the head word of an antecedent.  A pronoun of GAP or WinoBias chooses between its candidates, on either side of it.
    The best head is chosen on the same texts that it is measured on; the
    split-half figure chooses it on half of the documents and measures it on the others.  The table also has rules: the nearest
    mention, the nearest one with the same head word, and a cascade of string match, head match, agreement, and any mention.
    """
    return _told(session, probe_coreference.run(model, files, config, **session.options()))


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
    min_words: Annotated[
        int,
        typer.Option(
            min=0,
            help="Show all relations with at least so many words, instead of the 15 most frequent.",
            show_default=False,
        ),
    ] = 0,
) -> Result:
    """Find the attention heads that follow syntactic relations, from a word to its head or from a head to its dependent.

    The table has the best head for each relation, and a baseline without a model: always the word at one distance, the one
    that is right most often.  Heads and distances are chosen on the sentences that they are measured on.
    Punctuation and roots are not scored.
    """
    return _told(session, probe_dependencies.run(model, files, config, **session.options()), min_words=min_words)


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
            help="Tab-separated lines: a sentence, the position of its reflexive from 0, what it refers to, such as: the man, and "
            "other noun phrases, if there are any.",
            show_default=False,
        ),
    ] = None,
) -> Result:
    """Find heads by which himself and herself look most at what they refer to.

    Without a file, 10,000 sentences are drawn from a grammar: "the man who can laugh would hurt himself".  The answer is right if
    no other token, special ones included, has as much attention as the determiner or the noun.  Confusion says for a layer how
    little of its attention to noun phrases goes to the right one.
    """
    return _told(session, probe_reflexives.run(model, file, config, **session.options()))


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
    return _told(session, probe_relevance.run(model, data, config, **session.options()))


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
    return _told(session, probe_pairs.run(model, files, config, **session.options()))


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

    Each line also has the n-gram floors of the same tokens, counted in the training text of the sequences.
    """
    return _told(session, probe_loss.run(model, data, config, **session.options()))


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

    The table has, by layer, the share of query-key pairs that an adversary hides, and how spread attention is without and under the
    attack.
    """
    return _told(session, probe_attack.run(model, data, config, **session.options()))


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
    return _told(session, probe_sinks.run(model, data, config, **session.options()))


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
    return _told(session, probe_distance.run(model, other, data, config, **session.options()))


@stage_command(
    "probe importance",
    probe_importance.Config,
    examples=[
        "guide probe importance reviews-model reviews",
        "guide probe importance summariser papers --split test --by-layer",
        "guide probe importance guided wiki-128 --by off --limit 200   # the loss without each head",
        "guide finetune reviews --init my-model --plan my-plan.toml --scores $(guide show probe/58a1 --json | jq -r .path)/heads.parquet",
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
            help="A dataset of its task, or its sequences; for a masked language model also any text file.",
            show_default=False,
        ),
    ],
) -> Result:
    """Measure how much the loss of a model depends on each head (first-order Taylor importance).

    The loss is that of its task, or of masked words.  Gradients of the mean loss are added up over the batches of a split.  The importance of a head is the sum of the squares of
    gradient times weight, over its rows of the query, key and value matrices and its columns of the output matrix.  With --by off it is how much the mean loss
    rises when the head is switched off.
    """
    return _told(session, probe_importance.run(model, data, config, **session.options()))


def _told(session: Session, result: Result, **shown: Any) -> Result:
    """Print the table of a probe, unless machines read the output."""
    table = table_of(result.artifact, **shown)
    for line in folded(table.titles, table.rows, None):
        session.tell(line)
    for note in table.notes:
        session.tell(note)
    return result
