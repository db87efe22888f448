"""``guide probe``: what heads do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.options import Session, stage_command
from cli.tables import folded
from pipelines.engine.stage import Result
from pipelines.stages import (
    probe_coreference,
    probe_dependencies,
    probe_pairs,
    probe_reflexives,
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


def _told(session: Session, result: Result, **shown: Any) -> Result:
    """Print the table of a probe, unless machines read the output."""
    table = table_of(result.artifact, **shown)
    for line in folded(table.titles, table.rows, None):
        session.tell(line)
    for note in table.notes:
        session.tell(note)
    return result
