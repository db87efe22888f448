"""``guide evaluate``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from cli.arguments import Model
from cli.completion import artifacts
from cli.options import Session, announce, stage_command
from cli.tables import folded
from guidance.errors import GateFailed, InputError, did_you_mean
from pipelines.engine.stage import Result
from pipelines.metrics import lower_is_better
from pipelines.stages import evaluate


@stage_command(
    "evaluate",
    evaluate.Config,
    kind=evaluate.STAGE.kind,
    group="Train",
    examples=[
        "guide evaluate reviews-model reviews",
        "guide evaluate reviews-model other-reviews --split valid --weights best",
        "guide evaluate ./some-classifier reviews",
        "guide evaluate guided wiki-128 --split valid",
        "guide evaluate ./bert-base wiki-128-of-bert --split valid --pseudo-perplexity 100",
        "guide evaluate de-en multi30k-pairs",
        "guide evaluate model/1f0c multi30k-pairs --split valid --weights best --beams 1",
        "guide evaluate de-en multi30k-pairs --masks multi30k-masks --json | jq .counts.metrics.bleu",
        "guide evaluate guided wiki-128 --split valid --fail-under accuracy=0.3 --fail-over loss=4.5",
    ],
    next_command="guide show {}",
)
def evaluate_command(
    session: Session,
    config: evaluate.Config,
    model: Model,
    data: Annotated[
        str,
        typer.Argument(
            help="A dataset of its task, sequences of its tokenizer, a corpus, or a text file.",
            autocompletion=artifacts("sequences", "corpus"),
        ),
    ],
    fail_under: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Limit of a metric: exit with 5 if it is lower or undefined (repeatable)."
        ),
    ] = None,
    fail_over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Limit of a metric that is better when lower, such as a loss: exit with 5 if it is higher (repeatable).",
        ),
    ] = None,
) -> Result:
    """Measure how good a model is at its task.

    The class of the model, and the data, decide what is measured.  Classifiers and other models of `guide finetune`: the
    metrics of their task.  Masked language models: loss, perplexity and accuracy at masked tokens, next to n-gram floors.  A
    model no better than `unigram` has learned nothing from context; one worse than `neighbours` has learned less than counts of
    both neighbouring tokens.  Causal language models: the same at every token, and bits per byte, which do not depend on the
    tokenizer; their n-gram floors read only earlier tokens.  BERT with next sentences: these too.  ELECTRA: precision and
    recall of the discriminator, accuracy of its generator.  Encoder-decoders: NLL, BLEU and chrF of their translations.  The
    model's plan is applied.  Any Hugging Face folder can be measured.

    Given a dataset, the command builds its sequences with the tokenizer of the model, and the masks that its plan needs.  The
    metrics are printed and stored, and so is the prediction for every example.
    """
    from pipelines.views.findings import metric_tables

    gates = [*parse_gates(fail_under, "--fail-under"), *parse_gates(fail_over, "--fail-over")]
    result = evaluate.run(model, data, config, **session.options())
    counts, split = result.artifact.counts, result.artifact.manifest["config"]["split"]
    # a text file is read as a whole, whatever split the settings name
    session.tell(f"measured on {data}, " + (f"split {split}" if split == config.split else "all of it"))
    for found in metric_tables(counts):
        for line in folded(found.titles, found.rows, None):
            session.tell(line)
    if failed := list(failures(gates, counts["metrics"])):
        announce(session, result)
        raise GateFailed("; ".join(failed))
    return result


def parse_gates(given: Sequence[str] | None, flag: str) -> list[tuple[str, str, float]]:
    """The flag, the metric and the limit of each ``NAME=VALUE``.  Raises InputError if one has another form,
    or its metric is better when it is lower and the flag is not for that."""
    gates = []
    for text in given or ():
        name, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not name or not math.isfinite(limit):
            raise InputError(f"{flag} {text!r}: not NAME=VALUE", hint=f"for example: {flag} accuracy=0.6")
        if flag == "--fail-under" and lower_is_better(name):
            raise InputError(f"{flag} {text}: {name} is better when it is lower", hint=f"--fail-over {text}")
        gates.append((flag, name, limit))
    return gates


def failures(gates: Sequence[tuple[str, str, float]], metrics: Mapping[str, float | None]) -> Iterator[str]:
    """What to say of each limit that was not met; letters may be small or capital.  Raises InputError if there is no such metric."""
    by_name = {name.lower(): name for name in metrics}
    for flag, given, limit in gates:
        if (name := by_name.get(given.lower(), given)) not in metrics:
            raise InputError(
                f"{flag} {name}: this evaluation has no such metric{did_you_mean(name, metrics)}",
                hint=f"known: {', '.join(metrics)}",
            )
        value = metrics[name]
        if value is None:
            yield f"{name} is undefined, and {flag} {name}={limit:g} was asked for"
        elif value < limit if flag == "--fail-under" else value > limit:
            yield f"{name} is {value:.6g}, {'under' if flag == '--fail-under' else 'over'} {limit:g}"
